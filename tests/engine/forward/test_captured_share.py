"""How many steps of real workloads have a graph: the scheduler's own steps, and no model."""

from collections import Counter

import numpy as np
import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.step_graphs import graph_shape
from raybatch.kernels.step_index import StepIndex, StepSize
from raybatch.records.types import Request, Sampling
from tests.engine.fakes import FakeRunner, FakeSampler, FakeSpec, FakeStopChecker

NUM_KV_HEADS = 8
pytestmark = pytest.mark.meta


class CountingRunner(FakeRunner):
    """Computes nothing, and notes which graph each step would have."""

    def __post_init__(self):
        super().__post_init__()
        self.counts, self.num_rows, self.num_padded = Counter(), 0, 0

    def forward(self, batch):
        index = StepIndex(
            batch.attention,
            num_rows=len(batch.token_ids),
            num_kv_heads=NUM_KV_HEADS,
            block_size=self.block_size,
            joins_segments=self.joins_segments,
        )
        found = self.sizes.pick(index.size)
        self.counts["graph" if isinstance(found, StepSize) else found] += 1
        if isinstance(found, StepSize):
            # the host's half of a step, in full
            index.write(found, np.empty(found.num_index, np.int32))
            self.num_rows += len(batch.token_ids)
            self.num_padded += found.rows - len(batch.token_ids)
        return torch.zeros(len(batch.logits_idx), 2)


def run(requests, *, kv_tokens, block_size, joins_segments=True, **options):
    config = EngineConfig(block_size_tokens=block_size, **options)
    spec = FakeSpec(max_model_len=1 << 15)
    runner = CountingRunner(num_blocks=kv_tokens // block_size, block_size=block_size, spec=spec)
    runner.sizes, runner.joins_segments = graph_shape(config, spec).sizes(), joins_segments
    engine = Engine(runner, FakeSampler(), FakeStopChecker(), config)
    engine.add(requests)
    while engine.num_unfinished():
        engine.step()
    return runner


def request(i, prompt, max_tokens, **group):
    return Request(
        request_id=i,
        row_id=str(i),
        prompt_token_ids=prompt.astype(np.int32),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        **group,
    )


def shared_prefixes(rng, *, groups, rows, prefix, distinct, output):
    """W1: groups of rows with a prefix each."""
    for group in range(groups):
        head = rng.integers(0, 1000, prefix)
        for row in range(rows):
            prompt = np.concatenate((head, rng.integers(0, 1000, distinct)))
            yield request(group * rows + row, prompt, output, group_id=group, prefix_len=prefix)


def random_rows(rng, count, *, prompt, output, longest=8000):
    for i in range(count):
        lens = np.exp(rng.normal(np.log((prompt, output)), 0.8)).astype(int) + 1
        yield request(i, rng.integers(0, 1000, min(lens[0], longest)), int(min(lens[1], 4000)))


CASES = {
    "W1, 16 rows a prefix": (
        lambda rng: shared_prefixes(rng, groups=20, rows=16, prefix=2000, distinct=200, output=100),
        {"kv_tokens": 400_000, "block_size": 64},
    ),
    "W1, 2 rows a prefix": (
        lambda rng: shared_prefixes(rng, groups=60, rows=2, prefix=2000, distinct=200, output=100),
        {"kv_tokens": 400_000, "block_size": 64},
    ),
    "W1, small": (
        lambda rng: shared_prefixes(rng, groups=64, rows=16, prefix=256, distinct=32, output=16),
        {"kv_tokens": 100_000, "block_size": 16},
    ),
    "random rows": (
        lambda rng: random_rows(rng, 250, prompt=400, output=120),
        {"kv_tokens": 120_000, "block_size": 64},
    ),
    "short rows": (
        lambda rng: random_rows(rng, 400, prompt=12, output=20),
        {"kv_tokens": 40_000, "block_size": 16},
    ),
    "long prompts": (
        lambda rng: random_rows(rng, 40, prompt=9000, output=60, longest=30_000),
        {"kv_tokens": 400_000, "block_size": 64},
    ),
}


# without, a run that a chunk alone reads is one like others
@pytest.mark.parametrize("joins_segments", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("name", CASES)
def test_nineteen_of_twenty_steps_have_a_graph_and_little_padding(name, joins_segments):
    make, options = CASES[name]
    found = run(list(make(np.random.default_rng(42))), joins_segments=joins_segments, **options)
    total = sum(found.counts.values())
    assert total > 40
    assert found.counts["graph"] >= 0.95 * total, found.counts
    assert found.num_padded < 0.15 * found.num_rows
