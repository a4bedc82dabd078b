"""Decode steps of Triton kernels in a graph: all steps use the same tensors."""

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from raybatch.kernels.dispatch import ops_for
from tests.engine.forward.graph_cases import capture, fill_randomly, random_step, shape
from tests.engine.tiny_models import build


@pytest.fixture
def recorded_launches(monkeypatch, device):
    """Also record launches of interpreted kernels, which are no operations of torch."""
    if device.type == "cuda":
        return
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def noted(executor, *args, **kwargs):
        mode = _get_current_dispatch_mode()

        def run():
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                launch(executor, *args, **kwargs)

        if mode is not None:
            assert all(isinstance(value, (torch.Tensor, int, float, bool)) for value in args), (
                "what a launch is given"
            )
            mode.recording.add(run)
        run()

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)


def test_captured_kernels_give_the_logits_of_the_plain_forward_pass(
    tmp_path, monkeypatch, recorded_launches, device
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    # windows and experts
    build("mixtral-window", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    ops = ops_for(torch.device("cuda"))
    assert ops.is_fixed
    captured = capture(
        tmp_path / "model", device, ops=ops, steps=shape((4,), shared=(8,), mixed=(16,))
    )
    fill_randomly(captured.cache)
    for seed, num_rows in enumerate((3, 1)):
        batch = random_step(num_rows, seed, device)
        expected = captured.plain.forward(batch, captured.cache)
        made = captured.graphs.run(batch)
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)
    assert 2 == captured.graphs.counts.num_steps
    # also with shared prefixes and chunks
    captured.graphs.check(captured.plain)
