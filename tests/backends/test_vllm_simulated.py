"""What vLLM schedules, step by step, beside its simulation."""

from contextlib import closing

import numpy as np
import pytest

from raybatch.backends.vllm.backend import VllmBackend
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.records.types import Request, Sampling
from raybatch_lab.measured_runs import simulate_steps
from raybatch_lab.simulator.engine import EngineSpec
from tests.backends.vllm_engines import BLOCK_TOKENS, VllmShelf, save_text_model, start_tiny
from tests.lab.simulator.pools import costs
from tests.lab.simulator.test_vllm_scheduler import known

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = pytest.mark.vllm

NUM_BLOCKS, MAX_NUM_SEQS, BUDGET = 12, 8, 256


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    folder = save_text_model(tmp_path_factory.mktemp("vllm") / "model")
    sizes = {"max_model_len": 160, "max_batched_tokens": BUDGET, "max_num_seqs": MAX_NUM_SEQS}
    # one block of vLLM has no tokens
    return VllmShelf(lambda: start_tiny(folder, num_blocks=NUM_BLOCKS + 1, **sizes))


@pytest.fixture
def backend(shelf):
    with closing(shelf.make()) as made:
        yield made


def spec():
    limits = EngineLimits(
        kv_tokens=NUM_BLOCKS * BLOCK_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        block_size=BLOCK_TOKENS,
        max_batched_tokens=BUDGET,
    )
    return EngineSpec(cost=costs(**{n: getattr(limits, n) for n in limits.__slots__}), is_vllm=True)


def requests_of(rows, random):
    return [
        Request(
            request_id=row,
            row_id=str(row),
            prompt_token_ids=random.integers(0, 256, prompt).astype(np.int32),
            sampling=Sampling(max_tokens=output, ignore_eos=True),
        )
        for row, (prompt, output) in enumerate(zip(rows.prompt, rows.output.tolist(), strict=True))
    ]


def run(backend: VllmBackend, requests, monkeypatch):
    """Return the tokens of each step, and the preemptions."""
    scheduler, tokens = backend._engine._scheduler, []
    schedule = scheduler.schedule

    def noted(*args, **options):
        made = schedule(*args, **options)
        tokens.append(made.total_num_scheduled_tokens)
        return made

    monkeypatch.setattr(scheduler, "schedule", noted)
    before = backend.stats().num_preemptions
    backend.submit(requests)
    generated = []
    while backend.num_unfinished():
        assert not [c.error for c in backend.poll() if c.error]
        generated.append(backend.stats().generated_tokens)
    assert generated == sorted(set(generated))
    return tokens, backend.stats().num_preemptions - before


@pytest.mark.parametrize("seed", range(6))
def test_steps_are_those_of_vllm(backend, monkeypatch, seed):
    random = np.random.default_rng(seed)
    rows = known(random.integers(1, 100, 24), random.integers(1, 60, 24))
    simulated, stats = simulate_steps(rows, spec())
    tokens, num_preemptions = run(backend, requests_of(rows, random), monkeypatch)
    assert tokens == [step.tokens for step in simulated]
    assert num_preemptions == stats.num_preemptions
