"""Kernels that take the place of references at the start, and wrong ones that do not."""

import logging
from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward import ops_choice
from raybatch.engine.loading.loaded_model import load_model
from raybatch.kernels.byte_numbers import FP8, INT8
from raybatch.kernels.dispatch import REFERENCE, ops_for
from tests.engine.tiny_models import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    # dense layers beside sparse ones, heads with norms; and windows in some layers
    build("qwen3-moe-mlp-only-layers", num_hidden_layers=2).save_pretrained(folder / "sparse")
    build("qwen2-window-in-upper-layers", num_hidden_layers=2).save_pretrained(folder / "windows")
    return folder


def agreed(folder, device, *, form=None, dtype="float32", kv_dtype=None, **options):
    config = EngineConfig(device=str(device), dtype=dtype, tune_malloc=False, **options)
    model = load_model(str(folder), config)
    form = form or ops_for(torch.device("cuda"))
    kv_dtype = kv_dtype or model.dtype
    return ops_choice.agreed_ops(form, model.spec, model.weights, block_size=8, kv_dtype=kv_dtype)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """The interpreter takes a second for what a GPU does in no time."""
    monkeypatch.setattr(ops_choice, "_CHUNKS", (21, 5))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("windows", {}, marks=pytest.mark.slow),
        pytest.param("sparse", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
        ("windows", {"dtype": "float16", "kv_dtype": INT8}),
        ("sparse", {"dtype": "bfloat16", "kv_dtype": FP8, "quantization": "fp8"}),
    ],
    ids=str,
)
def test_all_kernels_take_the_place_of_the_references(
    name, options, folder, device, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        made = agreed(folder / name, device, **options)
    assert caplog.messages == []
    assert made == ops_for(torch.device("cuda"))


def halved(op):
    return lambda *arguments, **options: op(*arguments, **options) * 0.9


def forgets_its_last_block(op):
    def prepared(*arguments, **options):
        made = op(*arguments, **options)
        made.parts.chunk_blocks[-1] = 0
        return made

    return prepared


def fails(_):
    def failing(*_, **__):
        raise RuntimeError("no such instruction")

    return failing


@pytest.mark.parametrize(
    ("part", "field", "wrong", "message"),
    [
        ("rms_norm", "rms_norm", halved, "its kernel differs by a relative error of 0"),
        ("moe_ffn", "moe_ffn", halved, "its kernel differs by a relative error of 0"),
        ("linear", "linear", fails, "its kernel failed: RuntimeError: no such instruction"),
        ("attention", "prepare_attention", forgets_its_last_block, "its kernel differs"),
    ],
)
def test_a_wrong_kernel_stays_out_and_is_named(
    part, field, wrong, message, folder, device, caplog, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ops_choice, "_PARTS", {part: ops_choice._PARTS[part]})
    kernels = ops_for(torch.device("cuda"))
    form = replace(kernels, **{field: wrong(getattr(kernels, field))})
    with caplog.at_level(logging.WARNING):
        assert agreed(folder / "sparse", device, form=form) == REFERENCE
    (found,) = caplog.messages
    assert found.startswith(f"using the torch reference for {part}: {message}")
