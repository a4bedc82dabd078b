import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from raybatch.engine.forward.decoder import Decoder, dense_panel_width
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.weights import layout as weight_layout
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.models.config import read_model_spec
from tests import tolerances
from tests.engine.greedy_driver import GreedyDriver, prompt_logits
from tests.engine.references import greedy_tokens, reference_tokens
from tests.engine.tiny_models import TOLERANCE, VARIANTS, save

BLOCK_SIZE = 8
NUM_TOKENS = 10
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("shared_cache")


def make_prompts(lengths: list[int], shared: int = 0) -> list[list[int]]:
    rng = random.Random(3)
    prefix = [rng.randrange(1, 211) for _ in range(shared)]
    return [prefix + [rng.randrange(1, 211) for _ in range(n)] for n in lengths]


def make_driver(
    path: Path,
    is_shuffled: bool = False,
    is_compiled: bool = True,
    has_dense_panels: bool | None = None,
    **options,
) -> GreedyDriver:
    spec = read_model_spec(path)
    has_dense_panels = is_compiled if has_dense_panels is None else has_dense_panels
    width = dense_panel_width(torch.float32, CPU, may_compile=has_dense_panels, byte_dtype=None)
    weights = load_weights(path, spec, WeightForm(torch.float32, panel_width=width), device=CPU)
    cache = allocate_kv_cache(
        spec, num_blocks=96, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
    )
    blocks = list(range(96))
    if is_shuffled:
        random.Random(5).shuffle(blocks)
    ops = pick_ops(spec, weights, block_size=BLOCK_SIZE, may_compile=is_compiled)
    decoder = Decoder(spec, weights, ops=ops)
    return GreedyDriver(decoder, cache, BLOCK_SIZE, blocks, **options)


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]
) -> tuple[Path, str]:
    return tiny_checkpoint(request.param), request.param


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
def test_whole_prompts_of_mixed_lengths_give_the_same_tokens(checkpoint, is_compiled):
    path, variant = checkpoint
    prompts = make_prompts([1, 8, 23, 61])
    driver = make_driver(path, is_compiled=is_compiled)
    assert reference_tokens(variant, prompts, NUM_TOKENS) == driver.generate(prompts, NUM_TOKENS)


# experts in C take the wider ones
@pytest.mark.parametrize("widths", [(8, 4), (32, 16)], ids=["narrow", "wide"])
def test_weights_in_panels_give_the_same_tokens(checkpoint, widths, monkeypatch):
    path, variant = checkpoint
    monkeypatch.setattr(weight_layout, "_MIN_PANELLED_BYTES", {})
    every = dict.fromkeys(weight_layout._PANEL_WIDTHS, widths)
    monkeypatch.setattr(weight_layout, "_PANEL_WIDTHS", every)
    prompts = make_prompts([1, 8, 61])
    driver = make_driver(path, has_dense_panels=False)
    assert reference_tokens(variant, prompts, NUM_TOKENS) == driver.generate(prompts, NUM_TOKENS)


def test_panels_of_all_linears_give_the_same_tokens_in_torch(checkpoint):
    path, variant = checkpoint
    prompts = make_prompts([1, 8, 61])
    driver = make_driver(path, is_compiled=False, has_dense_panels=True)
    assert reference_tokens(variant, prompts, NUM_TOKENS) == driver.generate(prompts, NUM_TOKENS)


def test_chunked_prompts_in_scattered_blocks_give_the_same_tokens(checkpoint):
    path, variant = checkpoint
    prompts = make_prompts([3, 40])
    driver = make_driver(path, is_shuffled=True, chunk=7)
    assert reference_tokens(variant, prompts, NUM_TOKENS) == driver.generate(prompts, NUM_TOKENS)


def test_prompts_that_share_a_prefix_give_the_same_tokens(checkpoint):
    path, variant = checkpoint
    prompts = make_prompts([2, 30], shared=2 * BLOCK_SIZE)
    driver = make_driver(path, chunk=16, shared_tokens=2 * BLOCK_SIZE)
    assert reference_tokens(variant, prompts, NUM_TOKENS) == driver.generate(prompts, NUM_TOKENS)


def test_logits_of_every_position_are_the_same(checkpoint):
    path, _ = checkpoint
    prompt = make_prompts([57])[0]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    found = prompt_logits(make_driver(path), prompt)
    tolerances.assert_close(found, expected, TOLERANCE)


def greedy_of(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("variant", ["qwen2", "mixtral"])
def test_sharded_checkpoints_give_the_same_tokens_as_transformers(variant, tmp_path):
    model = save(variant, tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    prompts = make_prompts([4, 19])
    assert greedy_of(model, prompts) == make_driver(tmp_path).generate(prompts, NUM_TOKENS)


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe"])
def test_bfloat16_checkpoints_run_in_float32_like_transformers(variant, tmp_path):
    model = save(variant, tmp_path, dtype=torch.bfloat16)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    prompts = make_prompts([4, 19])
    assert greedy_of(model, prompts) == make_driver(tmp_path).generate(prompts, NUM_TOKENS)


def test_older_rope_keys_give_the_same_tokens_as_transformers(tmp_path):
    model = save("llama-rope-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = make_prompts([4, 19])
    assert greedy_of(model, prompts) == make_driver(tmp_path).generate(prompts, NUM_TOKENS)
