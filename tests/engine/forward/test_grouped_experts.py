"""When torch's grouped product computes experts, with fake device times."""

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from raybatch.engine.forward import library_ops
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.kernels.dispatch import REFERENCE
from raybatch.models.config import read_model_spec
from tests.engine.tiny_models import build

TOP_K = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(path / "cache"))
        build("qwen3-moe", num_hidden_layers=1).save_pretrained(path)
        spec = read_model_spec(path)
        form = WeightForm(torch.bfloat16)
        yield spec, load_weights(path, spec, form, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(library_ops, "_TOKENS", (32, 16, 8))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def experts(*tensors, min_grouped_rows=None, factor=1.0, **options):
    """Experts whose grouped form is wrong by a factor."""
    made = REFERENCE.moe_ffn(*tensors, **options)
    return made if min_grouped_rows is None else made * factor


def chosen(model, *, grouped_s, form=experts):
    """Choose between kernels that take 1 s and grouped products of `grouped_s`, by tokens."""

    def seconds_of(run):
        is_grouped = "min_grouped_rows" in run.keywords
        return grouped_s[len(run.args[0])] if is_grouped else 1.0

    ops = replace(REFERENCE, moe_ffn=form)
    made = library_ops.with_grouped_experts(ops, *model, seconds_of=seconds_of)
    return getattr(made.moe_ffn, "keywords", {}).get("min_grouped_rows")


@pytest.mark.parametrize(
    ("grouped_s", "min_rows"),
    [
        ({32: 0.5, 16: 0.6, 8: 0.7}, 8 * TOP_K),
        ({32: 0.5, 16: 1.5, 8: 0.1}, 32 * TOP_K),
        ({32: 0.99, 16: 0.1, 8: 0.1}, None),
    ],
)
def test_grouped_products_are_used_from_the_size_where_they_are_faster(grouped_s, min_rows, model):
    assert min_rows == chosen(model, grouped_s=grouped_s)


def test_grouped_products_that_differ_are_not_taken(model, caplog):
    fast = dict.fromkeys((32, 16, 8), 0.1)
    with caplog.at_level(logging.INFO):
        assert chosen(model, grouped_s=fast, form=partial(experts, factor=1.1)) is None
    assert "torch's grouped product differs by a relative error of 0.1" in caplog.text


def test_a_device_without_grouped_products_keeps_its_kernels(model, caplog):
    def failing(*tensors, min_grouped_rows=None, **options):
        if min_grouped_rows is not None:
            raise RuntimeError("not on this device")
        return experts(*tensors, **options)

    with caplog.at_level(logging.INFO):
        assert chosen(model, grouped_s={}, form=failing) is None
    assert "torch's grouped product failed: RuntimeError: not on this device" in caplog.text


@pytest.mark.parametrize(
    ("capability", "dtype", "num_dims"),
    [((8, 9), torch.bfloat16, 3), ((9, 0), torch.float32, 3), ((9, 0), torch.bfloat16, 4)],
)
def test_other_devices_types_and_layouts_have_none(capability, dtype, num_dims, model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    shape = (4, 16, 16, 16)[-num_dims:]
    shard = replace(
        model[1].layers[0].ffn.shard,
        experts_gate_up=torch.zeros(shape, dtype=dtype),
        experts_down=torch.zeros(shape, dtype=dtype),
    )
    assert not library_ops.can_group(shard, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    plain = torch.zeros(4, 16, 16, dtype=torch.bfloat16)
    shard = replace(shard, experts_gate_up=plain, experts_down=plain)
    assert library_ops.can_group(shard, torch.device("cuda"))
