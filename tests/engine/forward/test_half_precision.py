"""Every architecture in bfloat16 and float16, against transformers in the same type.

Two programs that round at different places give slightly different logits, and near ties give
different tokens. So logits must be as close to those of float32 as transformers' are, and tokens
must be equal where transformers prefers its own by more than rounding explains. A router with a
near tie may send a token to another expert: models with experts leave out some positions.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.models.config import read_model_spec
from tests import tolerances
from tests.engine.forward.test_models_match_transformers import make_prompts
from tests.engine.greedy_driver import GreedyDriver, prompt_logits
from tests.engine.real_engines import Engines, requests_of, run, tokens_of
from tests.engine.tiny_models import SHAPE, VARIANTS, build
from tests.tiers import pairs

pytestmark = pytest.mark.halfprecision

BLOCK_SIZE, NUM_TOKENS = 8, 10
# the largest errors of a position, relative to those of most
FACTOR = 2
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A checkpoint with the results of transformers."""

    path: Path
    dtype: torch.dtype
    exact: PreTrainedModel
    theirs: PreTrainedModel

    @property
    def tolerance(self) -> float:
        """Largest difference of logits, relative to their standard deviation."""
        return tolerances.of_layers(self.dtype, SHAPE["num_hidden_layers"])

    @property
    def share(self) -> float:
        """Share of positions that must be right."""
        return 0.9 if hasattr(self.theirs.config, "num_experts_per_tok") else 1.0

    def driver(self, **options) -> GreedyDriver:
        spec = read_model_spec(self.path)
        device = torch.device("cpu")
        weights = load_weights(self.path, spec, WeightForm(self.dtype), device=device)
        cache = allocate_kv_cache(
            spec, num_blocks=96, block_size=BLOCK_SIZE, dtype=self.dtype, device=device
        )
        return GreedyDriver(Decoder(spec, weights), cache, BLOCK_SIZE, list(range(96)), **options)

    def check_tokens(self, prompts, outputs) -> None:
        """Compare each token with the logits of transformers after the tokens before it.

        The best token there is the same, or better by at most the tolerance.
        """
        behind = []
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = logits_of(self.theirs, prompt + output[:-1])[len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
            behind.append((logits.amax(dim=-1) - chosen) / logits.std())
        is_near = torch.cat(behind) <= FACTOR * self.tolerance
        assert is_near.float().mean() >= self.share


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(path)
    return path, load(path, torch.float32)


@pytest.fixture(scope="module", params=DTYPES.values(), ids=DTYPES.keys())
def case(request, checkpoint) -> Case:
    path, exact = checkpoint
    return Case(path, request.param, exact, load(path, request.param))


def load(path, dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def logits_of(model, tokens) -> torch.Tensor:
    """The logits of every position, [T, V] in float32."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def test_logits_are_as_near_to_those_of_float32_as_transformers_are(case):
    prompt = make_prompts([57])[0]
    exact, theirs = logits_of(case.exact, prompt), logits_of(case.theirs, prompt)
    ours = prompt_logits(case.driver(), prompt)

    def errors(one, other):
        """Return the largest error of each position."""
        return (one - other).abs().amax(dim=-1) / exact.std()

    assert errors(ours, theirs).median() <= case.tolerance
    for share in (0.5, 0.9):
        most = FACTOR * errors(theirs, exact).quantile(share)
        assert errors(ours, exact).quantile(share) <= most


def test_tokens_of_chunks_over_scattered_context_are_those_of_transformers(case):
    prompts = make_prompts([3, 40, 61])
    case.check_tokens(prompts, case.driver(chunk=7).generate(prompts, NUM_TOKENS))


def test_tokens_after_a_shared_prefix_are_those_of_transformers(case):
    prompts = make_prompts([2, 30, 1], shared=2 * BLOCK_SIZE)
    driver = case.driver(chunk=16, shared_tokens=2 * BLOCK_SIZE)
    case.check_tokens(prompts, driver.generate(prompts, NUM_TOKENS))


@pytest.mark.parametrize(
    ("variant", "dtype", "kv_dtype", "budget"),
    pairs(
        ["mistral-window", "qwen3", "mixtral-window"],
        list(DTYPES),
        ["auto", "int8", "fp8"],
        [512, 23],
    ),
)
def test_engines_end_no_row_as_an_error(tmp_path, variant, dtype, kv_dtype, budget):
    build(variant).save_pretrained(tmp_path)
    engines = Engines(tmp_path)
    config = engines.config(
        dtype=dtype, block_size_tokens=8, kv_cache_dtype=kv_dtype, max_batched_tokens=budget
    )
    prompts = make_prompts([1, 8, 30, 61], shared=16)
    done = tokens_of(run(engines.make(config), requests_of(prompts, max_tokens=NUM_TOKENS)))
    assert {len(tokens) for tokens in done.values()} == {NUM_TOKENS}
