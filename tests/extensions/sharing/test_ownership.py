import random

import pytest

from raybatch.errors import ConfigError
from raybatch.records.share import Unit
from raybatch_extensions.sharing.ownership import Ownership, least_slots

GROUPS = [
    Ownership(size=size, num_layers=num_layers, by=by, order=order)
    for size in (2, 3, 4, 8)
    for num_layers in (1, 2, 7, 16, 21)
    for by in ("layer", "shard")
    for order in ("shifted", "in_order")
]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_every_unit_has_one_owner_and_every_rank_gets_the_rest(group):
    units = list(group.units())
    owned = [group.owned_by(rank) for rank in range(group.size)]
    assert sorted(unit for some in owned for unit in some) == units
    # no rank holds more than one layer or shard beyond its share
    assert max(map(len, owned)) - min(map(len, owned)) <= 1
    for rank in range(group.size):
        assert sorted(group.uses(rank)) == units
        assert [unit.layer for unit in group.uses(rank)] == sorted(u.layer for u in units)
        assert sorted(group.fetches(rank) + owned[rank]) == units


def ends(fetches: list[Unit], uses: list[Unit], num_slots: int) -> bool:
    """Run one pass: fetch into free slots, use fetched units; return False on deadlock."""
    here, waiting = set(), list(fetches)
    for unit in uses:
        while waiting and len(here) < num_slots:
            here.add(waiting.pop(0))
        if unit in fetches:
            if unit not in here:
                return False
            here.remove(unit)
    return True


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_least_slots_are_enough_and_one_fewer_is_not(group):
    for rank in range(group.size):
        orders = group.fetches(rank), group.uses(rank)
        assert ends(*orders, group.least_slots)
        of_rank = least_slots(*orders)
        assert ends(*orders, of_rank)
        assert of_rank == 1 or not ends(*orders, of_rank - 1)


def test_the_least_slots_of_random_orders_are_those_of_a_game():
    random.seed(7)
    for _ in range(300):
        units = [Unit(layer) for layer in range(random.randint(1, 7))]
        fetches = random.sample(units, random.randint(0, len(units)))
        least = next(n for n in range(1, 9) if ends(fetches, units, n))
        assert least_slots(fetches, units) == least


@pytest.mark.parametrize(("size", "least"), [(2, 1), (3, 2), (4, 3), (8, 7)])
def test_shifted_layers_need_a_cycle_of_slots_and_shards_one(size, least):
    group = Ownership(size=size, num_layers=3 * size)
    assert group.least_slots == least
    assert Ownership(size=size, num_layers=3 * size, by="shard").least_slots == 1
    assert Ownership(size=size, num_layers=3 * size, order="in_order").least_slots == 1
    group.check_slots(least)
    if least > 1:
        with pytest.raises(ConfigError, match=rf"weight_buffers .* at least {least},"):
            group.check_slots(least - 1)


def readers(group: Ownership) -> list[int]:
    """Return the most readers of one owner in each turn if ranks are in step."""
    turns = zip(*(group.fetches(rank) for rank in range(group.size)), strict=False)
    owners = ([group.owner(unit) for unit in turn] for turn in turns)
    return [max(map(some.count, some)) for some in owners]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("by", ["layer", "shard"])
def test_an_owner_has_one_reader_where_the_order_is_shifted(size, by):
    shifted = Ownership(size=size, num_layers=4 * size, by=by)
    assert set(readers(shifted)) == {1}
    in_order = Ownership(size=size, num_layers=4 * size, by=by, order="in_order")
    assert max(readers(in_order)) >= size - 1


def test_a_group_of_one_and_a_model_without_layers_are_refused():
    with pytest.raises(ConfigError, match=r"share_group .* at least 2, got 1"):
        Ownership(size=1, num_layers=4)
    with pytest.raises(ConfigError, match=r"num_layers .* got 0"):
        Ownership(size=2, num_layers=0)
