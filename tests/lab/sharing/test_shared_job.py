"""Jobs on a host whose replicas copy weights, or share them."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import Workload
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.shared_exchange import exchange_threshold
from raybatch_lab.sharing.shared_job import HostSpec, run_job
from raybatch_lab.sharing.shared_weights import GroupLinks
from tests.lab.sharing.shared import H20, LLAMA, h20_costs

COSTS = h20_costs(LLAMA, 2)
SHARDS = Ownership(size=4, num_layers=80, by="shard")
ALONE = HostSpec(sharing="replicated", num_ranks=4, costs=COSTS, kv_tokens=320_000)
GROUP = replace(
    ALONE,
    sharing="both",
    ownership=SHARDS,
    kv_tokens=570_000,
    fetch_s=0.094,
    threshold_rows=60.0,
    row_bytes=16_384,
    links=GroupLinks(bytes_per_s=H20.link_bytes_per_s, latency_s=40e-6),
)


def rows_of(prompt, output):
    return np.array(prompt, np.int64), np.array(output, np.int64)


def long_tail(num_rows=1500, seed=0):
    rng = np.random.default_rng(seed)
    output = np.clip(rng.lognormal(6.5, 1.0, num_rows), 1, 20_000).astype(np.int64)
    return rows_of(np.full(num_rows, 1024), output)


def test_one_row_takes_its_prompt_and_its_passes():
    found = run_job(*rows_of([100], [3]), replace(ALONE, num_ranks=1))
    layer = COSTS.shape.layer
    prompt = layer.attention_work(100, Workload(tokens_per_sequence=100))
    attention_s = COSTS.attention.seconds(prompt) + 100 * COSTS.row_s
    prompt_s = 80 * (attention_s + COSTS.ffn_s(100)) + COSTS.rest_s(0)
    # the pass of the prompt draws the first token
    passes_s = 2 * replace(COSTS, cached_tokens=101).pass_s(1)
    assert found.completion_s == pytest.approx(prompt_s + passes_s)
    assert (found.fetch_passes, found.exchange_passes, found.mean_batch) == (3, 0, 2 / 3)
    assert (found.output_tokens, found.fetch_share) == (3, 1.0)


def test_a_pass_takes_its_copies_at_least():
    rows = rows_of([100] * 4, [50] * 4)
    found = run_job(*rows, replace(GROUP, sharing="fetch"))
    # each rank has one row
    assert found.completion_s == pytest.approx(0.094 * 50)
    assert run_job(*rows, ALONE).completion_s < found.completion_s / 2


def test_long_prompts_are_computed_in_chunks_beside_rows():
    rows = rows_of([10, 5000], [40, 2])
    found = run_job(*rows, replace(ALONE, num_ranks=1, max_pass_tokens=1000))
    # 1 pass for the first prompt, 999 tokens of the other in each of 6; then 39 - 6 alone
    assert found.fetch_passes == 1 + 6 + 33
    whole = run_job(*rows, replace(ALONE, num_ranks=1, max_pass_tokens=10_000))
    assert whole.fetch_passes == 1 + 1 + 38
    # weights are read more often, and no pass has fewer rows for it
    assert found.completion_s == pytest.approx(whole.completion_s, rel=0.1)


@pytest.mark.parametrize(
    "spec", [ALONE, GROUP, replace(GROUP, sharing="fetch")], ids=lambda s: s.sharing
)
def test_every_token_is_generated_once(spec):
    # the first one by the pass of its prompt
    rows = long_tail(400)
    found = run_job(*rows, spec)
    passes = found.fetch_passes + found.exchange_passes
    assert found.mean_batch * passes == pytest.approx(rows[1].sum() - len(rows[1]))
    assert found.completion_s >= found.tail_s >= 0


def test_rows_wait_for_kv():
    # room for two rows at a time in each of two replicas
    spec = replace(ALONE, num_ranks=2, kv_tokens=400)
    found = run_job(*rows_of([100] * 8, [100] * 8), spec)
    assert 1.9 < found.mean_batch <= 2.0
    # but for prompts, two rows make 99 passes together four times
    assert found.fetch_passes == pytest.approx(4 * 99, abs=8)


def test_a_group_changes_to_rounds_in_the_tail_and_never_back():
    found = run_job(*long_tail(), GROUP)
    assert found.num_switches == 1
    assert found.exchange_passes > 0
    assert found.fetch_passes > 0
    apart = run_job(*long_tail(), replace(GROUP, sharing="fetch"))
    assert (apart.num_switches, apart.exchange_passes) == (0, 0)
    assert found.completion_s < apart.completion_s
    assert found.tail_s < apart.tail_s / 2


def test_bursts_of_prompts_seldom_change_the_mode():
    # prompts are long, so that pages with one have several times the rows of those without
    rng = np.random.default_rng(0)
    output = np.clip(rng.lognormal(np.log(800), 1.0, 1500), 1, 20_000).astype(np.int64)
    rows = rows_of(np.full(1500, 3000), output)
    spec = replace(GROUP, threshold_rows=100.0, kv_tokens=150_000)
    assert run_job(*rows, spec).num_switches <= 3


def test_a_threshold_of_no_rows_never_changes_the_mode():
    found = run_job(*long_tail(), replace(GROUP, threshold_rows=0.0))
    assert found == run_job(*long_tail(), replace(GROUP, sharing="fetch"))


def test_a_row_that_fits_no_replica_is_refused():
    with pytest.raises(
        ConfigError, match="memory for 1100 tokens, but kv_tokens of a replica is 1000"
    ):
        run_job(*rows_of([100], [1000]), replace(ALONE, kv_tokens=1000))
    with pytest.raises(ConfigError, match="set ownership"):
        replace(GROUP, ownership=None)
    with pytest.raises(ConfigError, match="must be at least 1"):
        replace(GROUP, num_ranks=0)


def test_a_group_leaves_rounds_where_more_rows_wait_than_they_have_room_for():
    """Few long rows that take all KV, then many short ones."""
    rows = rows_of([100] * 32 + [32] * 3000, [4300] * 32 + [256] * 3000)
    tight = replace(GROUP, max_pass_tokens=96, kv_tokens=36_000)
    # steps of rounds have 24 rows of a rank, and copies do more with 70
    threshold = threshold_of(tight)
    assert 2 * tight.max_exchange_rows < threshold < threshold_of(replace(tight, num_ranks=1))
    found = run_job(*rows, replace(tight, threshold_rows=threshold))
    assert found.num_switches == 2
    assert found.completion_s < 0.6 * run_job(*rows, replace(tight, sharing="fetch")).completion_s


def threshold_of(host):
    """Return the threshold of a group, whose rounds have no more rows than those of a host."""
    return exchange_threshold(
        host.costs,
        host.ownership,
        host.fetch_s,
        row_bytes=host.row_bytes,
        links=host.links,
        most=1024,
        max_exchange_rows=host.max_exchange_rows,
    )
