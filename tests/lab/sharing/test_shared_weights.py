"""Weight fetch of simulated groups, compared with counts by hand."""

import random
from dataclasses import replace

import pytest

from raybatch.errors import ConfigError
from raybatch.records.share import Unit
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.shared_weights import GroupLinks, simulate_group
from tests.lab.sharing.shared import H20, LLAMA, QWEN3, FixedCosts, group_of, h20_costs

COSTS = FixedCosts()
GROUPS = [
    Ownership(size=size, num_layers=num_layers, by=by, order=order)
    for size, num_layers in ((2, 4), (3, 7), (4, 3), (8, 17))
    for by in ("layer", "shard")
    for order in ("shifted", "in_order")
]


@pytest.mark.parametrize("ownership", GROUPS, ids=str)
def test_with_infinite_links_nothing_waits(ownership):
    run = simulate_group(COSTS, group_of(ownership, num_slots=ownership.least_slots))
    assert (run.waited_s, run.num_waits, run.stall_share) == (0, 0, 0)
    assert run.pass_s == pytest.approx(ownership.num_layers * (1.0 + 2.0) + 0.5)


@pytest.mark.parametrize("ownership", GROUPS, ids=str)
def test_every_rank_copies_what_it_does_not_own_once_a_pass(ownership):
    run = simulate_group(COSTS, group_of(ownership, links=GroupLinks(bytes_per_s=3.0)))
    foreign = [len(ownership.fetches(rank)) for rank in range(ownership.size)]
    assert run.pass_bytes == pytest.approx(sum(foreign) / ownership.size)


@pytest.mark.parametrize("ownership", GROUPS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_group_ends_with_the_least_slots_and_never_with_fewer(ownership, seed):
    # links and delays that let ranks drift apart
    more = {"links": GroupLinks(bytes_per_s=0.7), "delay_share": 0.3, "delay_s": 5.0, "seed": seed}
    for num_slots in range(1, 2 * ownership.default_slots):
        group = group_of(ownership, num_slots=num_slots, **more)
        if num_slots >= ownership.least_slots:
            ended = simulate_group(COSTS, group).ended_s
            assert [3] * ownership.size == list(map(len, ended))
        else:
            least = f"at least {ownership.least_slots}"
            with pytest.raises(ConfigError, match=f"num_slots={num_slots}; .*{least}"):
                simulate_group(COSTS, group)


@pytest.mark.parametrize("copy_s", [0.5, 2.0, 2.25, 3.0, 9.0])
def test_one_slot_by_shard_waits_beyond_attention_and_the_own_shard(copy_s):
    ownership = Ownership(size=2, num_layers=5, by="shard")
    links = GroupLinks(bytes_per_s=1 / copy_s)
    run = simulate_group(COSTS, group_of(ownership, num_slots=1, links=links))
    # a fetch begins when the peer's shard of the previous layer is used; the own one takes 1 s
    waits = [max(0.0, copy_s - 2.0)] * 4 + [max(0.0, copy_s - 2.5)]
    assert run.waited_s == pytest.approx(sum(waits))
    assert run.num_waits == sum(wait > 0 for wait in waits)
    assert run.pass_s == pytest.approx(5 * 3.0 + 0.5 + sum(waits))
    assert (run.readers, run.most_readers) == (1, 1)


def ends_by_recurrence(ownership, rank, num_slots, copy_s, num_passes):
    """Return when a rank ends its passes if copies do not share links."""
    fetches = [(p, unit) for p in range(num_passes) for unit in ownership.fetches(rank)]
    order = {key: number for number, key in enumerate(fetches)}
    used_s, arrived_s, now, ends = [], [], 0.0, []

    def arrival(number):
        while len(arrived_s) <= number:
            k = len(arrived_s)
            begun = arrived_s[-1] if arrived_s else 0.0
            if k >= num_slots:
                begun = max(begun, used_s[k - num_slots])
            arrived_s.append(begun + copy_s)
        return arrived_s[number]

    for number in range(num_passes):
        for layer in range(ownership.num_layers):
            now += COSTS.attention
            for shard in ownership.shards_of(layer, rank):
                key = (number, Unit(layer, shard))
                if key in order:
                    now = max(now, arrival(order[key]))
                now += COSTS.ffn / ownership.num_shards
                if key in order:
                    used_s.append(now)
        now += COSTS.rest
        ends.append(now)
    return ends


@pytest.mark.parametrize("ownership", GROUPS, ids=str)
@pytest.mark.parametrize("copy_s", [0.3, 1.1, 4.0])
def test_copies_that_do_not_share_links_follow_a_recurrence(ownership, copy_s):
    links = GroupLinks(bytes_per_s=1 / copy_s, egress_bytes_per_s=float("inf"))
    for num_slots in {ownership.least_slots, ownership.default_slots}:
        run = simulate_group(COSTS, group_of(ownership, num_slots=num_slots, links=links))
        for rank, ended in enumerate(run.ended_s):
            expected = ends_by_recurrence(ownership, rank, num_slots, copy_s, num_passes=3)
            assert list(ended) == pytest.approx(expected)


@pytest.mark.parametrize(("egress", "seconds"), [(None, 8.0), (2.0, 4.0), (float("inf"), 4.0)])
def test_readers_of_one_owner_share_its_link(egress, seconds):
    # one layer of 4 bytes of rank 0, which the two others read at the same time
    ownership = Ownership(size=3, num_layers=1)
    links = GroupLinks(bytes_per_s=1.0, egress_bytes_per_s=egress)
    run = simulate_group(COSTS, group_of(ownership, num_slots=1, layer_bytes=4.0, links=links))
    first = [ended[0] for ended in run.ended_s]
    assert first == [3.5, seconds + 2.5, seconds + 2.5]
    assert run.most_readers == 2


def test_a_reader_that_comes_later_leaves_the_first_one_its_share():
    # rank 1 reads 4 bytes from 0 on, rank 2 from 2 on: 2 alone, 4 s at half, 2 alone
    ownership = Ownership(size=3, num_layers=1)
    links = GroupLinks(bytes_per_s=1.0)
    group = group_of(
        ownership, num_slots=1, layer_bytes=4.0, links=links, late_s=(0.0, 0.0, 2.0), num_passes=2
    )
    run = simulate_group(COSTS, group)
    assert run.ended_s[1][0] == 6.0 + 2.5
    assert run.ended_s[2][0] == 8.0 + 2.5


def test_a_copy_takes_the_latency_first():
    ownership = Ownership(size=2, num_layers=1)
    links = GroupLinks(bytes_per_s=1.0, latency_s=3.0)
    run = simulate_group(COSTS, group_of(ownership, layer_bytes=4.0, links=links, num_passes=2))
    assert run.ended_s[1][0] == 7.0 + 2.5


@pytest.mark.parametrize("by", ["layer", "shard"])
def test_a_slow_rank_holds_up_no_other(by):
    ownership = Ownership(size=4, num_layers=8, by=by)
    links = GroupLinks(bytes_per_s=4.0, egress_bytes_per_s=float("inf"))
    together = simulate_group(COSTS, group_of(ownership, links=links))
    apart = simulate_group(COSTS, group_of(ownership, links=links, slowness=(1.0, 5.0, 1.0, 1.0)))
    for rank in (0, 2, 3):
        assert apart.ended_s[rank] == together.ended_s[rank]
    assert apart.ended_s[1][-1] > 4 * together.ended_s[1][-1]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_shards_have_one_reader_per_owner_if_ranks_are_in_step_and_layers_in_order_most(size):
    links = GroupLinks(bytes_per_s=8.0)
    shards, layers = (
        simulate_group(COSTS, group_of(Ownership(size=size, num_layers=16, **more), links=links))
        for more in ({"by": "shard"}, {"order": "in_order"})
    )
    assert (shards.readers, shards.most_readers) == (1, 1)
    assert layers.most_readers == size - 1


def test_delays_are_the_same_for_a_seed_and_others_for_another():
    ownership = Ownership(size=4, num_layers=8)
    group = group_of(ownership, delay_share=0.2, delay_s=1.0, links=GroupLinks(bytes_per_s=1.0))
    first, again, other = (
        simulate_group(COSTS, replace(group, seed=seed)).ended_s for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first[0][0] > simulate_group(COSTS, replace(group, delay_share=0.0)).ended_s[0][0]


@pytest.mark.parametrize("by", ["layer", "shard"])
@pytest.mark.parametrize(
    ("model", "tp", "size"),
    [(LLAMA, 2, 2), (LLAMA, 2, 4), (QWEN3, 1, 8)],
    ids=["Llama TP2 DP2", "Llama TP2 DP4", "Qwen3 TP1 DP8"],
)
def test_default_slots_hide_copies_of_an_h20_in_a_batch_of_256(model, tp, size, by):
    ownership = Ownership(size=size, num_layers=model.num_layers, by=by)
    rng = random.Random(0)
    group = group_of(
        ownership,
        layer_bytes=model.layer.ffn_bytes / tp,
        links=GroupLinks(bytes_per_s=H20.link_bytes_per_s, latency_s=20e-6),
        rows=tuple(rng.randint(240, 272) for _ in range(size)),
        slowness=tuple(rng.uniform(1, 1.05) for _ in range(size)),
        late_s=tuple(rng.uniform(0, 0.2) for _ in range(size)),
        num_passes=4,
    )
    run = simulate_group(h20_costs(model, tp), group)
    assert run.stall_share <= 0.02


@pytest.mark.parametrize("size", [4, 8])
def test_shifted_layers_keep_all_links_busy_and_layers_in_order_half_of_them(size):
    links = GroupLinks(bytes_per_s=H20.link_bytes_per_s)
    shifted, in_order = (
        simulate_group(
            h20_costs(QWEN3, 1),
            group_of(
                Ownership(size=size, num_layers=64, order=order),
                layer_bytes=QWEN3.layer.ffn_bytes,
                links=links,
                # few rows, so that copies are the bottleneck
                rows=(32,) * size,
                num_passes=6,
            ),
        ).pass_s
        for order in ("shifted", "in_order")
    )
    fetch_s = 64 * QWEN3.layer.ffn_bytes * (size - 1) / size / H20.link_bytes_per_s
    assert shifted == pytest.approx(fetch_s, rel=0.01)
    assert in_order > 1.8 * shifted


def test_ranks_in_step_begin_passes_with_the_slowest_one():
    ownership = Ownership(size=2, num_layers=2)
    group = group_of(ownership, slowness=(1.0, 3.0))
    free, in_step = (
        simulate_group(COSTS, replace(group, in_step=in_step)).ended_s for in_step in (False, True)
    )
    # 2 layers of 3 s, and 0.5 s
    assert free == ((6.5, 13.0, 19.5), (19.5, 39.0, 58.5))
    assert in_step == ((6.5, 26.0, 45.5), (19.5, 39.0, 58.5))


def test_impossible_groups_are_refused():
    ownership = Ownership(size=2, num_layers=2)
    with pytest.raises(
        ConfigError, match="rows of a group needs 2 values, one for each rank, got 3"
    ):
        group_of(ownership, rows=(1, 1, 1))
    with pytest.raises(ConfigError, match="slowness of a group"):
        group_of(ownership, slowness=(1.0,))
    for wrong in ({"num_passes": 1}, {"num_slots": 0}, {"rows": (1, 0)}):
        with pytest.raises(ConfigError, match="num_passes of at least 2"):
            group_of(ownership, **wrong)
    with pytest.raises(ConfigError, match="GroupLinks needs"):
        GroupLinks(bytes_per_s=0.0)
