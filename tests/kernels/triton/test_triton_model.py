import random

import pytest
import torch

from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.kernels.dispatch import REFERENCE, ops_for
from raybatch.models.config import read_model_spec
from tests.engine.forward.test_half_precision import load, logits_of
from tests.engine.greedy_driver import GreedyDriver, prompt_logits
from tests.engine.tiny_models import build, save

# one KV head, layers of two kinds, norms of heads, experts
CHOSEN = ["llama-multi-query", "qwen2-window-in-upper-layers", "qwen3", "mixtral"]

BLOCK_SIZE, NUM_BLOCKS = 8, 64


def greedy_tokens(path, prompts, num_tokens, ops, device):
    spec = read_model_spec(path)
    cache = allocate_kv_cache(
        spec, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=device
    )
    weights = load_weights(path, spec, WeightForm(torch.float32), device=device)
    blocks = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    driver = GreedyDriver(
        Decoder(spec, weights, ops=ops),
        cache,
        BLOCK_SIZE,
        blocks,
        chunk=9,
        shared_tokens=BLOCK_SIZE,
    )
    return driver.generate(prompts, num_tokens)


def check(path, lengths, num_tokens, device):
    """Compare the tokens behind a shared prefix and suffixes of such lengths."""
    rng = random.Random(3)
    prefix = [rng.randrange(1, 211) for _ in range(BLOCK_SIZE)]
    prompts = [prefix + [rng.randrange(1, 211) for _ in range(n)] for n in lengths]
    expected = greedy_tokens(path, prompts, num_tokens, REFERENCE, torch.device("cpu"))
    kernels = ops_for(torch.device("cuda"))
    assert kernels is not REFERENCE
    assert expected == greedy_tokens(path, prompts, num_tokens, kernels, device)


def test_a_model_of_one_layer_gives_the_same_tokens_with_either_form_of_the_ops(
    tmp_path, monkeypatch, device
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    # norms of heads and experts
    build("qwen3-moe", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    check(tmp_path / "model", (2, 13), 3, device)


@pytest.mark.slow
@pytest.mark.parametrize("variant", CHOSEN)
def test_a_model_gives_the_same_tokens_with_either_form_of_the_ops(
    variant, tmp_path, monkeypatch, device
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    save(variant, tmp_path / "model")
    check(tmp_path / "model", (2, 9, 23), 4, device)


@pytest.mark.halfprecision
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("mistral-window", torch.float16),
        pytest.param("mixtral-window", torch.float16, marks=pytest.mark.slow),
        pytest.param("qwen3-moe", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("qwen3", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_half_precision_is_as_near_to_float32_as_that_of_transformers(
    variant, dtype, tmp_path, monkeypatch, device
):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model"
    build(variant, num_hidden_layers=1).save_pretrained(path)
    prompt = list(range(5, 30))
    exact, theirs = (logits_of(load(path, kind), prompt) for kind in (torch.float32, dtype))
    spec = read_model_spec(path)
    cache = allocate_kv_cache(spec, num_blocks=8, block_size=BLOCK_SIZE, dtype=dtype, device=device)
    weights = load_weights(path, spec, WeightForm(dtype), device=device)
    ops = ops_for(torch.device("cuda"))
    decoder = Decoder(spec, weights, ops=ops)
    driver = GreedyDriver(decoder, cache, BLOCK_SIZE, list(range(8)), chunk=9)
    ours = prompt_logits(driver, prompt).cpu()

    def error(logits):
        return (logits - exact).abs().amax(dim=-1).median()

    assert error(ours) <= 2 * error(theirs)
