"""Engines with weights as bytes, against transformers with the same numbers as floats."""

from pathlib import Path

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.weights.layout import tensors_of
from raybatch.errors import ConfigError
from raybatch.kernels.byte_numbers import (
    BYTE_DTYPES,
    dequantise_weight,
    quantise_weight,
    weight_scales,
)
from tests.engine.forward.test_models_match_transformers import greedy_of, make_prompts
from tests.engine.greedy_driver import GreedyDriver, prompt_logits
from tests.engine.tiny_models import save

VARIANTS = ["llama", "qwen2", "qwen3-tied-attention-bias", "mixtral", "qwen3-moe-mlp-only-layers"]
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, save(request.param, path)


def make_driver(path: Path | str, **options) -> GreedyDriver:
    model = load_model(str(path), EngineConfig(device="cpu", dtype="float32", **options))
    cache = allocate_kv_cache(
        model.spec, num_blocks=32, block_size=8, dtype=torch.float32, device=CPU
    )
    may_compile = options.get("compile_kernels", True)
    ops = pick_ops(model.spec, model.weights, block_size=8, may_compile=may_compile)
    return GreedyDriver(Decoder(model.spec, model.weights, ops=ops), cache, 8, list(range(32)))


def rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if weight.dim() == 3:
        return torch.stack([rounded(expert, dtype) for expert in weight])
    scales = weight_scales(weight, dtype)
    return dequantise_weight(quantise_weight(weight, scales, dtype), scales, torch.float32)


def round_linears(model, dtype):
    """Round all linears of a model of transformers but its head and routers."""
    for name, parameter in model.named_parameters():
        is_linear = "_proj" in name and not name.endswith("bias")
        if is_linear and parameter.dim() > 1:
            parameter.data = rounded(parameter.data, dtype)


@pytest.mark.parametrize("compile_kernels", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("form", list(BYTE_DTYPES))
def test_tokens_are_those_of_the_rounded_model(checkpoint, form, compile_kernels, tmp_path):
    path, model = checkpoint
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    round_linears(model, BYTE_DTYPES[form])
    prompts = make_prompts([1, 8, 61])
    expected = greedy_of(model, prompts)
    model.load_state_dict(state)
    driver = make_driver(path, quantization=form, compile_kernels=compile_kernels)
    assert driver.generate(prompts, 10) == expected


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.03), ("fp8", 0.08)])
def test_logits_of_the_demo_model_are_off_by_a_small_part_of_their_spread(form, bound):
    prompt = list(b"The tower is a hundred metres high")
    plain, quantized = make_driver("demo"), make_driver("demo", quantization=form)
    expected = prompt_logits(plain, prompt)
    error = prompt_logits(quantized, prompt) - expected
    relative = float(error.square().mean().sqrt() / expected.std())
    assert bound / 10 < relative < bound


def test_layers_take_a_quarter_of_the_memory(checkpoint):
    path, _ = checkpoint

    def layer_bytes(**options):
        weights = load_model(str(path), EngineConfig(dtype="float32", **options)).weights
        return sum(t.nbytes for layer in weights.layers for t in tensors_of(layer) if t.dim() > 1)

    # beside the bytes there are scales and, in these small models, large norms of heads
    assert layer_bytes(quantization="int8") < 0.4 * layer_bytes()


def test_an_unknown_form_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match=r"quantization.*int8.*fp8"):
        EngineConfig(quantization="int4")
