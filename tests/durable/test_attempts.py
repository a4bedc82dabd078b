"""What runs know of rows that end engines outlives them, and a bad marker costs deaths alone."""

import json
import uuid

import pytest

from raybatch.durable.journal import CrashCounts, read_crash_counts, write_crash_counts
from raybatch.durable.layout import ATTEMPTS, attempt_name
from raybatch.durable.storage import open_store
from raybatch.errors import CommitError
from tests.durable.support import make_plan

PLAN = make_plan([[4, 0, 2], [1, 3]])
UNIT = PLAN.unit(0)


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def write(store, crashes, given_up=(), *, unit=UNIT, plan="plan-a"):
    crash_counts = CrashCounts(crashes=crashes, given_up=frozenset(given_up))
    write_crash_counts(store, unit, crash_counts, plan_hash=plan)


def read(store, unit=UNIT):
    return read_crash_counts(store, unit, plan_hash="plan-a")


def test_without_a_marker_no_row_has_a_crash(store):
    assert CrashCounts() == read(store)


def test_markers_never_replace_each_other(store):
    for number in (1, 2):
        write(store, {1: number})
    assert [attempt_name(0, 0), attempt_name(0, 1)] == store.names(ATTEMPTS)


def test_of_several_markers_the_largest_count_of_each_row_holds(store):
    write(store, {1: 1, 2: 3})
    write(store, {0: 1, 1: 2}, given_up=[1])
    write(store, {1: 1})
    assert CrashCounts(crashes={0: 1, 1: 2, 2: 3}, given_up=frozenset({1})) == read(store)


def test_the_same_marker_written_twice_counts_once(store):
    write(store, {1: 2})
    write(store, {1: 2})
    assert {1: 2} == read(store).crashes


def test_units_have_crashes_of_their_own(store):
    write(store, {1: 2}, unit=PLAN.unit(1))
    assert CrashCounts() == read(store)


@pytest.mark.parametrize("crashes", [{}, {3: 1}, {-1: 1}], ids=["none", "beyond", "before"])
def test_crashes_of_rows_that_the_unit_has_not_are_refused(store, crashes):
    with pytest.raises(CommitError, match="unit 0 has 3 rows"):
        write(store, crashes)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"plan": "plan-a"}',
        json.dumps({"plan": "b", "unit": 0, "crashes": {"1": 9}, "given_up": []}).encode(),
        json.dumps({"plan": "plan-a", "unit": 1, "crashes": {"1": 9}, "given_up": []}).encode(),
        json.dumps({"plan": "plan-a", "unit": 0, "crashes": {"3": 9}, "given_up": []}).encode(),
        json.dumps(
            {"plan": "plan-a", "unit": 0, "crashes": {"0": 1, "3": 9}, "given_up": []}
        ).encode(),
        json.dumps({"plan": "plan-a", "unit": 0, "crashes": {"1": 9}, "given_up": [2]}).encode(),
    ],
    ids=["empty", "list", "short", "other plan", "other unit", "no row", "one row", "uncounted"],
)
def test_a_marker_that_says_something_else_is_left_out(store, data, caplog):
    store.create(attempt_name(0, 0), data)
    write(store, {1: 1})
    assert {1: 1} == read(store).crashes
    assert "000000/0.json: " in caplog.text
