"""KV in 8 bits: errors of logits, and rows whose tokens no event changes."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig, from_mapping
from raybatch.engine.engine import Engine
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.loading.loaded_model import resolve
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import allocate_kv_cache, kv_bytes_per_token, pick_kv_dtype
from raybatch.engine.sampling.sampler import Sampler
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.errors import ConfigError
from raybatch.kernels import byte_numbers
from raybatch.models.config import read_model_spec
from tests.backends.test_native_backend import greedy_reference, run, shared_prompts
from tests.engine.fakes import FakeStopChecker
from tests.engine.greedy_driver import GreedyDriver, prompt_logits
from tests.engine.memory.test_swap import Choice
from tests.engine.tiny_models import build

BLOCK = 4
CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("kind", ["int8", "fp8"])
# mean error of a logit over the standard deviation of logits; these models are random, with scores
# so large that a small error of a key decides which token gets the attention
BOUNDS = {"int8": 0.035, "fp8": 0.18}
# nats between two tokens that count as equal: sums in another order may round a number of a row to
# the next step, which moves logits by this much
TIE = 0.02

pytestmark = pytest.mark.usefixtures("shared_cache")


class Row(NamedTuple):
    """The tokens of a row, and the lead of each over the second best one."""

    tokens: list[int]
    gaps: list[float]


@pytest.fixture(scope="module", params=["llama", "mistral-window", "qwen3-moe"])
def path(request, tiny_checkpoint):
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def dense(tiny_checkpoint):
    return tiny_checkpoint("llama")


def make(path, kind, *, num_blocks=400, num_host_blocks=0, **options):
    """A backend with these numbers of blocks, which moves KV to the host if it has any there."""
    dtype = pick_kv_dtype(kind, torch.float32)
    block_bytes = BLOCK * kv_bytes_per_token(read_model_spec(path), dtype)
    config = EngineConfig(
        block_size_tokens=BLOCK,
        dtype="float32",
        device="cpu",
        kv_cache_dtype=kind,
        kv_cache_bytes=num_blocks * block_bytes,
        host_kv_bytes=num_host_blocks * block_bytes,
        **options,
    )
    runner = ModelRunner.load(str(path), config)
    assert runner.num_blocks == (num_host_blocks if options.get("kv_offload") else num_blocks)
    assert runner.tiers.block_bytes == block_bytes
    sampler = Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids)
    recovery = Choice() if num_host_blocks else None
    return NativeBackend(Engine(runner, sampler, FakeStopChecker(), config, recovery=recovery))


def alone(path, kind, prompts):
    """Return the undisturbed result of each prompt: one chunk, no neighbour, no prefix hit."""
    backend, rows = make(path, kind, enable_prefix_caching=False), []
    for prompt in prompts:
        done = run(backend, [prompt], logprobs=2)[0, 0]
        gaps = [float(values[0] - values[1]) for _, values in done.logprobs]
        rows.append(Row(done.token_ids.tolist(), gaps))
    return rows


def check_same(expected, found):
    """Check that rows have the tokens that they have alone; one may differ after a tie."""
    others = [
        (row, tokens) for row, tokens in zip(expected, found, strict=True) if row[0] != tokens
    ]
    assert len(others) <= 1, others
    for row, tokens in others:
        alike = zip(row.tokens, tokens, row.gaps, strict=True)
        gap = next(gap for own, other, gap in alike if own != other)
        assert gap < TIE, (row, tokens)


def tokens_of(done, prompts, sample_idx=0):
    return [done[i, sample_idx].token_ids.tolist() for i in range(len(prompts))]


def logits_of(path, kind, prompt):
    spec = read_model_spec(path)
    decoder = Decoder(spec, load_weights(path, spec, WeightForm(torch.float32), device=CPU))
    cache = allocate_kv_cache(
        spec, num_blocks=30, block_size=BLOCK, dtype=pick_kv_dtype(kind, torch.float32), device=CPU
    )
    driver = GreedyDriver(
        decoder=decoder, cache=cache, block_size=BLOCK, free_blocks=list(range(30))
    )
    return prompt_logits(driver, prompt)


@BOTH
def test_errors_of_logits_are_small(path, kind, rng):
    prompt = rng.integers(1, 211, 100).tolist()
    expected = logits_of(path, "auto", prompt)
    error = (logits_of(path, kind, prompt) - expected).abs() / expected.std()
    assert 0 < float(error.mean()) < BOUNDS[kind]


@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_the_bound_on_logits_sees_wrong_scales(dense, rng, monkeypatch, factor):
    prompt = rng.integers(1, 211, 100).tolist()
    expected = logits_of(dense, "auto", prompt)
    right = byte_numbers.dequantise
    monkeypatch.setattr(
        "raybatch.kernels.attention.dequantise", lambda *args: right(*args) * factor
    )
    error = (logits_of(dense, "int8", prompt) - expected).abs() / expected.std()
    assert float(error.mean()) > BOUNDS["int8"]


DISTURBANCES = {
    "together, with prefix hits": {},
    "chunks and preemption": {"num_blocks": 24, "max_batched_tokens": 17},
    "swap": {"num_blocks": 24, "num_host_blocks": 200, "max_batched_tokens": 37},
    "window": {"kv_offload": True, "num_blocks": 18, "num_host_blocks": 400},
    "drafts": {"speculative_tokens": 3, "max_batched_tokens": 37},
    "torch": {"compile_kernels": False, "max_batched_tokens": 37},
}


@pytest.fixture(
    scope="module",
    params=[("llama", "int8"), ("mistral-window", "fp8"), ("qwen3-moe", "int8")],
    ids="-".join,
)
def undisturbed(request, tiny_checkpoint):
    """A model, its KV dtype, prompts and their undisturbed results."""
    variant, kind = request.param
    path = tiny_checkpoint(variant)
    prompts = shared_prompts(np.random.default_rng(5))
    return path, kind, prompts, alone(path, kind, prompts)


@pytest.mark.parametrize("options", DISTURBANCES.values(), ids=DISTURBANCES.keys())
def test_no_event_changes_the_tokens_of_a_row(undisturbed, options):
    path, kind, prompts, expected = undisturbed
    backend = make(path, kind, **options)
    done = run(backend, prompts, n=2)
    for sample_idx in range(2):
        check_same(expected, tokens_of(done, prompts, sample_idx))
    stats = backend.stats()
    assert stats.cached_tokens > 0
    has_window = "kv_offload" in options
    assert (stats.num_preemptions > 0) == ("num_blocks" in options and not has_window)
    assert (stats.num_swapped_tokens > 0) == ("num_host_blocks" in options and not has_window)
    assert (stats.swapped_bytes > 0) == ("num_host_blocks" in options)


def test_any_neighbours_and_any_sizes_give_a_row_the_same_tokens(dense):
    rng = np.random.default_rng(11)
    prompts = shared_prompts(rng)
    expected = alone(dense, "int8", prompts)
    for _ in range(5):
        chosen = rng.permutation(len(prompts))[: rng.integers(1, len(prompts) + 1)]
        backend = make(
            dense,
            "int8",
            num_blocks=int(rng.integers(20, 80)),
            max_batched_tokens=int(rng.integers(5, 60)),
            max_num_seqs=int(rng.integers(1, 15)),
            enable_prefix_caching=bool(rng.integers(2)),
        )
        done = run(backend, [prompts[i] for i in chosen])
        check_same([expected[i] for i in chosen], tokens_of(done, chosen))


@BOTH
def test_a_row_that_moves_between_engines_ends_with_the_same_tokens(dense, kind, rng):
    prompts = shared_prompts(rng)[:5]
    first, second = make(dense, kind), make(dense, kind)
    expected = alone(dense, kind, prompts)
    begun = 0

    def polled_once(backend):
        nonlocal begun
        found = poll()
        begun += 1
        if begun == 4:
            states = backend.export(range(len(prompts)))
            assert all(len(state.token_ids) for state in states)
            second.restore(states)
        return found

    poll = first.poll
    first.poll = lambda: polled_once(first)
    run(first, prompts)
    done = {}
    while second.num_unfinished():
        done |= {(c.request_id, c.sample_idx): c for c in second.poll()}
    check_same(expected, tokens_of(done, prompts))


@BOTH
def test_a_row_with_nan_changes_no_other(tmp_path, kind):
    bad_token = 210
    model = build("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[bad_token] = float("nan")
    model.save_pretrained(tmp_path / "model")
    good = [[3, 1, 4, 1, 5, 9], [9, 5, 1, 4, 1, 3]]
    expected = alone(tmp_path / "model", kind, good)
    backend = make(tmp_path / "model", kind, num_blocks=12)
    done = run(backend, [[*range(1, 30), bad_token]])
    assert done[0, 0].error.startswith("NonFiniteLogits: ")
    # the pool is small, so these rows get the blocks that held NaN
    check_same(expected, tokens_of(run(backend, good), good))


def test_tokens_of_the_default_are_those_of_transformers(dense, rng):
    prompts = shared_prompts(rng)
    expected = greedy_reference("llama", prompts)
    assert expected == tokens_of(run(make(dense, "auto"), prompts), prompts)


@BOTH
@pytest.mark.parametrize(("head_dim", "times"), [(64, 3.76), (128, 3.87)])
def test_a_budget_holds_almost_four_times_the_blocks(tmp_path, kind, head_dim, times):
    build("qwen3", head_dim=head_dim).save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    config = EngineConfig(kv_cache_bytes=100 << 20, max_num_seqs=1 << 20)

    def count(name):
        named = replace(config, kv_cache_dtype=name)
        return resolve(named, spec, CPU).count_blocks(named, free_bytes=0)

    assert count(kind) / count("auto") == pytest.approx(times, abs=0.02)


def test_an_unknown_kv_dtype_is_refused_by_name():
    options = {"kv_cache_dtype": "int4"}
    message = "kv_cache_dtype must be one of auto, int8, fp8, got 'int4'"
    with pytest.raises(ConfigError, match=message):
        from_mapping(EngineConfig, options, where="job.yaml: engine")
