"""COMBINE, the split and the lot: every part comes out once, unchanged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raybatch.engine.forward.coroutine import (
    Lot,
    Module,
    Part,
    SequenceCoroutine,
    YieldPoint,
    combine,
)

POINT = YieldPoint(1, Module.FFN)


def part(index):
    return Part(index=index, prepared=None, moves=None)


def coroutine(*sizes, first=0, point=POINT):
    return SequenceCoroutine(
        point=point,
        parts=tuple(part(first + i) for i in range(len(sizes))),
        num_rows=sizes,
        hidden=torch.arange(sum(sizes) * 2.0).view(-1, 2) + 100 * first,
    )


def numbers(coroutines):
    return [[part.index for part in each.parts] for each in coroutines]


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5))
def test_splitting_undoes_combining(sizes):
    made, first = [], 0
    for group in sizes:
        made.append(coroutine(*group, first=first))
        first += len(group)
    singles = [single for each in made for single in each.split()]
    together = combine(made)
    assert together.num_rows == tuple(size for group in sizes for size in group)
    for single, again in zip(singles, together.split(), strict=True):
        assert single.parts[0].index == again.parts[0].index
        assert torch.equal(single.hidden, again.hidden)


def test_writes_to_a_part_are_kept():
    together = combine([coroutine(2), coroutine(3, first=1)])
    together.split()[1].hidden.zero_()
    assert not together.hidden[2:].any()


def test_coroutines_at_different_points_are_not_combined():
    other = coroutine(1, first=1, point=YieldPoint(2, Module.ATTENTION))
    with pytest.raises(ValueError, match="different yield points"):
        combine([coroutine(1), other])
    with pytest.raises(ValueError, match="no coroutines to combine"):
        combine([])


def test_points_follow_one_another_through_the_layers():
    first = YieldPoint(0, Module.ATTENTION)
    assert first.after() == YieldPoint(0, Module.FFN)
    assert first.after().after() == YieldPoint(1, Module.ATTENTION)
    assert sorted([POINT, first, first.after()]) == [first, first.after(), POINT]


def test_a_lot_returns_waiting_parts_and_takes_them_back():
    lot, one, two = Lot(), coroutine(1), coroutine(1, first=1)
    lot.add(one)
    lot.add(two)
    assert numbers(lot.waiting[POINT]) == [[0], [1]]
    (taken,) = lot.take([two])
    lot.park(taken)
    lot.finish(lot.take([one])[0])
    lot.finish(lot.take([two])[0])
    assert not lot


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda lot, one: lot.add(one), "added twice"),
        (lambda lot, one: lot.take([coroutine(1)]), "taken but not parked"),
        (lambda lot, one: lot.take([one, one]), "taken but not parked"),
        (lambda lot, one: lot.park(one), "parked but not taken"),
        (lambda lot, one: lot.finish(one), "finished but not taken"),
        (lambda lot, one: (lot.finish(lot.take([one])[0]), lot.add(one)), "added twice"),
        (lambda lot, one: (lot.finish(lot.take([one])[0]), lot.park(one)), "parked but not"),
        (lambda lot, one: (lot.take([one]), lot.add(one)), "added twice"),
    ],
)
def test_a_misused_part_is_an_error(mistake, message):
    lot, one = Lot(), coroutine(1)
    lot.add(one)
    with pytest.raises(RuntimeError, match=message):
        mistake(lot, one)
