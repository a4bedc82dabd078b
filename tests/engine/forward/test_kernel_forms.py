"""Steps that kernels are compiled for: few rows with logits, and none that the memory lacks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raybatch.engine.forward import ops_choice
from raybatch.engine.forward.ops_choice import run_forms, steps_of_forms
from raybatch.kernels.dispatch import ops_for
from tests.kernels.triton.big_models import spec_of, weights_of

BLOCK = 64


@pytest.fixture
def spec():
    return spec_of("Qwen3-8B")


@pytest.mark.parametrize("max_tokens", [2048, 16_384])
def test_no_more_rows_have_logits_than_run_at_once(max_tokens, spec):
    batches = list(steps_of_forms(spec, block_size=BLOCK, max_tokens=max_tokens, max_rows=256))
    assert max_tokens == max(len(batch.token_ids) for batch in batches)
    assert 257 == max(len(batch.logits_idx) for batch in batches)
    assert {1, 2, 4, 256} <= {batch.attention.num_decode for batch in batches}


def test_steps_that_the_memory_does_not_hold_are_left_out(spec, monkeypatch, caplog):
    taken = []

    def forward(batch, cache):
        taken.append(len(batch.token_ids))
        if taken[-1] > 300:
            raise torch.OutOfMemoryError("CUDA out of memory")

    decoder = SimpleNamespace(forward=forward)
    monkeypatch.setattr(ops_choice, "Decoder", lambda *_, **__: decoder)
    run_forms(
        ops_for(torch.device("cpu")),
        replace(spec, vocab_size=512),
        weights_of(spec),
        block_size=BLOCK,
        kv_dtype=torch.bfloat16,
        max_tokens=2048,
        max_rows=256,
    )
    assert [1, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512] == taken
    assert "a warm-up step of 512 tokens does not fit" in caplog.text
