"""Jobs on a host whose replicas copy weights, or share them."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.ownership import Ownership
from raybatch.simulator.rows import SimulatedRows
from raybatch.simulator.shared_job import HostSpec, run_job
from raybatch.simulator.shared_weights import GroupLinks
from tests.simulator.shared import H20, LLAMA, h20_costs

COSTS = h20_costs(LLAMA, 2)
TILES = Ownership(size=4, num_layers=80, by="tile")
ALONE = HostSpec(way="replicated", num_ranks=4, costs=COSTS, kv_tokens=320_000)
GROUP = replace(
    ALONE,
    way="both",
    ownership=TILES,
    kv_tokens=570_000,
    copies_s=0.094,
    threshold_rows=60.0,
    row_bytes=16_384,
    links=GroupLinks(bytes_per_s=H20.link_bytes_per_s, latency_s=40e-6),
)


def rows_of(prompt, output):
    return SimulatedRows.of(np.array(prompt, np.int64), np.array(output, np.int64))


def long_tail(num_rows=1500, seed=0):
    rng = np.random.default_rng(seed)
    output = np.clip(rng.lognormal(6.5, 1.0, num_rows), 1, 20_000).astype(np.int64)
    return rows_of(np.full(num_rows, 1024), output)


def test_one_row_takes_its_prompt_and_its_passes():
    found = run_job(rows_of([100], [3]), replace(ALONE, num_ranks=1))
    one = replace(COSTS, cached_tokens=100)
    layer = COSTS.shape.layer
    prompt_s = 80 * COSTS.ffn.seconds(layer.ffn_work(100))
    passes_s = 3 * one.pass_s(1)
    assert found.completion_s > passes_s + prompt_s
    assert found.completion_s < passes_s + 2.2 * prompt_s
    assert (found.was_passes, found.cas_passes, found.mean_batch) == (3, 0, 1.0)
    assert (found.output_tokens, found.was_share) == (3, 1.0)


def test_a_pass_takes_its_copies_at_least():
    rows = rows_of([100] * 4, [50] * 4)
    spec = replace(GROUP, way="was")
    found = run_job(rows, spec)
    # a prompt, and passes of one row, of each rank
    assert found.completion_s == pytest.approx(0.094 * (50 + 1))
    assert run_job(rows, ALONE).completion_s < found.completion_s / 2


@pytest.mark.parametrize("spec", [ALONE, GROUP, replace(GROUP, way="was")], ids=lambda s: s.way)
def test_every_token_is_generated_once(spec):
    rows = long_tail(400)
    found = run_job(rows, spec)
    passes = found.was_passes + found.cas_passes
    assert found.mean_batch * passes == pytest.approx(rows.output.sum())
    assert found.completion_s >= found.tail_s >= 0


def test_rows_wait_for_kv():
    # room for two rows at a time in each of two replicas
    spec = replace(ALONE, num_ranks=2, kv_tokens=400)
    found = run_job(rows_of([100] * 8, [100] * 8), spec)
    assert (found.mean_batch, found.was_passes) == (2.0, 400)


def test_a_group_changes_to_rounds_in_the_tail_and_never_back():
    found = run_job(long_tail(), GROUP)
    assert found.num_switches == 1
    assert found.cas_passes > 0
    assert found.was_passes > 0
    apart = run_job(long_tail(), replace(GROUP, way="was"))
    assert (apart.num_switches, apart.cas_passes) == (0, 0)
    assert found.completion_s < apart.completion_s
    assert found.tail_s < apart.tail_s / 2


def test_a_threshold_of_no_rows_never_changes_the_mode():
    found = run_job(long_tail(), replace(GROUP, threshold_rows=0.0))
    assert found == run_job(long_tail(), replace(GROUP, way="was"))


def test_a_row_that_fits_no_replica_is_refused():
    with pytest.raises(ConfigError, match="KV for 1100 tokens, a replica has 1000"):
        run_job(rows_of([100], [1000]), replace(ALONE, kv_tokens=1000))
    with pytest.raises(ConfigError, match="needs an ownership"):
        replace(GROUP, ownership=None)
    with pytest.raises(ConfigError, match="a host needs"):
        replace(GROUP, num_ranks=0)
