"""Layouts of replicas by length beside all there are."""

import itertools

import numpy as np
import pytest
from stage_layouts import H100, H100_MOVES, curve_of, equal_work, least_latency, pool_of, shards_of

from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.plan import length_cuts
from raybatch_lab.stages.replica_seconds import stage_seconds

NUM_REPLICAS = 3


def lengths_of(num_rows):
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(6, 1.3, num_rows).astype(int) + 1
    return RowLengths(prompts, rng.lognormal(5.5, 1, num_rows).astype(int) + 1)


def latency_of(lengths, bounds, counts):
    """Return the sum of all rows' latencies, as in the paper; all rows run at once."""
    prompts, finals = lengths.prompt_lens.astype(float), lengths.final_lens
    total = 0.0
    for (low, high), count in zip(itertools.pairwise(bounds), counts, strict=True):
        ends_here = (finals > low) & (finals <= high)
        each = ends_here.sum() / count
        pairs = (prompts[ends_here] ** 2).sum() / count
        one_s = H100.step_s + H100.row_s * each + H100.prompt_pair_s * pairs
        one_s += H100.prompt_token_s * prompts[ends_here].sum() / count
        one_s += H100.context_s * finals[ends_here].sum() / count
        total += count * each * one_s
        total += float(H100_MOVES.seconds(low, ((prompts <= low) & (finals > low)).sum()))
    return total


def test_no_layout_has_less_latency():
    lengths = lengths_of(60)
    plan = least_latency(pool_of(curve_of(2.0), NUM_REPLICAS), lengths)
    cuts = length_cuts(lengths.longest).tolist()
    found = []
    for num_stages in range(1, NUM_REPLICAS + 1):
        for inner in itertools.combinations(cuts[1:-1], num_stages - 1):
            for counts in itertools.product((1, 2, 3), repeat=num_stages):
                if sum(counts) == NUM_REPLICAS:
                    found.append(latency_of(lengths, [0, *inner, cuts[-1]], counts))
    counts = [stage.num_replicas for stage in plan.stages]
    bounds = [0, *(stage.up_to for stage in plan.stages)]
    assert latency_of(lengths, bounds, counts) == pytest.approx(min(found))


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 2]])
def test_stages_of_equal_work_take_equally_long(counts):
    lengths, pool = lengths_of(5000), pool_of(curve_of(1.0), NUM_REPLICAS)
    plan = equal_work(pool, lengths, counts)
    ends = np.array([0, *(stage.up_to for stage in plan.stages)])
    seconds = stage_seconds(pool, lengths, ends[:-1], ends[1:], np.array(counts))
    assert seconds.max() < 1.25 * seconds.mean()


def test_shards_have_rows_of_equal_work():
    lengths = lengths_of(5000)
    bounds = shards_of(lengths, NUM_REPLICAS).bounds
    shard = np.searchsorted(bounds, lengths.final_lens, side="left")
    finals, prompts = lengths.final_lens, lengths.prompt_lens
    contexts = np.bincount(shard, (finals**2 - prompts**2) / 2)
    assert contexts.max() < 1.2 * contexts.mean()
