"""A unit is in the output whole and once, or not at all."""

import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable.commit import commit_unit, committed, receipt_of
from raybatch.durable.layout import part_name
from raybatch.durable.parts import encode_part, read_footer
from raybatch.durable.storage import open_store
from raybatch.durable.units import ErrorTally, UnitCounts, row_sum, row_sums
from raybatch.errors import CommitError
from tests.durable.support import SCHEMA, make_plan, make_table, unit_of

UNITS = [[4, 0, 2], [1, 3], [5]]
PLAN = make_plan(UNITS)


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def commit(store, number=0, **changes):
    return commit_unit(store, **{**unit_of(PLAN, UNITS, number), **changes})


def part(store, number=0):
    return pq.read_table(pa.BufferReader(store.read(part_name(number))))


def test_a_committed_unit_is_one_part_with_its_rows(store):
    receipt = commit(store)
    assert (0, 3, True) == (receipt.unit, receipt.num_rows, receipt.won)
    assert make_table(UNITS[0]).to_pydict() == part(store).to_pydict()


def test_a_part_has_exactly_the_one_schema(store):
    commit(store)
    assert part(store).schema.equals(SCHEMA, check_metadata=True)


def test_rows_are_written_in_the_order_of_their_positions(store):
    commit(store, table=make_table([2, 4, 0]), pos=np.array([2, 0, 1]), row=np.array([2, 4, 0]))
    assert ["r4", "r0", "r2"] == part(store)["id"].to_pylist()


def test_the_second_commit_of_a_unit_loses_and_changes_nothing(store):
    commit(store)
    before = store.read(part_name(0))
    second = commit(store, table=make_table(UNITS[0], answer="other"), attempt="b")
    assert not second.won
    assert before == store.read(part_name(0))


def test_the_receipt_of_a_part_that_lies_there_is_not_of_a_commit_that_won(store):
    won = commit(store)
    found = receipt_of(store, PLAN.unit(0), PLAN.hash)
    assert (won.won, found.won, found.counts) == (True, False, won.counts)


def test_a_lost_commit_returns_the_counts_of_the_rows_in_the_output(store):
    commit(store)
    counts = UnitCounts(num_rows=3, statuses={"error": 3})
    assert {"ok": 3} == commit(store, count=lambda _: counts).counts.statuses


@pytest.mark.parametrize(
    ("pos", "row", "reason"),
    [
        ([0, 1], [4, 0], "has 3 rows, got 2"),
        ([0, 1, 1], [4, 0, 0], "no row has position 2 of 3"),
        ([0, 1, 3], [4, 0, 2], "no row has position 2 of 3"),
        ([0, 1, -1], [4, 0, 2], "no row has position 2 of 3"),
        ([0, 1, 2], [4, 0, 3], "not those of the plan"),
        ([0, 1, 2], [4, 0, 0], "not those of the plan"),
    ],
)
def test_rows_that_are_not_the_units_are_refused(store, pos, row, reason):
    counts = UnitCounts(num_rows=len(pos))
    table = make_table(row)
    with pytest.raises(CommitError, match=reason):
        commit(store, table=table, pos=np.array(pos), row=np.array(row), count=lambda _: counts)
    assert [] == store.names("data")


def test_counts_of_other_rows_are_refused(store):
    with pytest.raises(CommitError, match="counts of 2 rows"):
        commit(store, count=lambda _: UnitCounts(num_rows=2))


def test_a_part_of_another_plan_is_not_taken_for_the_unit(store):
    commit(store, plan_hash="plan-b")
    with pytest.raises(CommitError, match="belongs to plan plan-b, the output to plan plan-a"):
        commit(store)
    with pytest.raises(CommitError, match="belongs to plan plan-b"):
        receipt_of(store, PLAN.unit(0), PLAN.hash)


def test_a_part_under_the_name_of_another_unit_is_refused(store):
    commit(store, 1)
    store.create(part_name(2), store.read(part_name(1)))
    with pytest.raises(CommitError, match="contains another unit, 1"):
        receipt_of(store, PLAN.unit(2), PLAN.hash)


def test_the_receipt_of_a_committed_unit_comes_from_its_footer(store):
    made = commit(store)
    found = receipt_of(store, PLAN.unit(0), PLAN.hash)
    assert (made.unit, made.num_rows, made.counts) == (found.unit, found.num_rows, found.counts)


def test_a_unit_that_is_not_committed_has_no_receipt(store):
    assert receipt_of(store, PLAN.unit(0), PLAN.hash) is None


def test_the_listing_says_which_units_are_committed(store):
    commit(store, 0)
    commit(store, 2)
    assert [True, False, True] == committed(store, PLAN).tolist()


def test_nothing_is_committed_in_a_folder_that_is_not_there(store):
    assert [False, False, False] == committed(store, PLAN).tolist()


@pytest.mark.parametrize(
    "name",
    [
        "data/part-000003.parquet",
        "data/part-000001-a.parquet",
        "data/part-1.parquet",
        "data/part-0000001.parquet",
        "data/part-00000\u0661.parquet",
        "data/notes.txt",
        "data/x=1/part-000001.parquet",
    ],
)
def test_a_file_that_is_no_unit_of_the_plan_is_refused(store, name):
    store.create(name, b"")
    with pytest.raises(CommitError, match=r"is not a part of plan plan-a \(1 such files\)"):
        committed(store, PLAN)


def test_numbers_with_more_than_six_digits_are_units():
    assert "data/part-1234567.parquet" == part_name(1234567)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "corrupt"),
        (b"PAR1", "corrupt"),
        (b"\xff\xff\xff\xffPAR1", "corrupt"),
        (b"x" * 40 + b"\0\0\0\0PAR1", "not a part of this output"),
    ],
)
def test_a_file_that_is_no_parquet_is_refused_by_name(store, data, problem):
    store.create(part_name(0), data)
    with pytest.raises(CommitError, match=rf"part-000000\.parquet is {problem}"):
        receipt_of(store, PLAN.unit(0), PLAN.hash)


def test_parquet_of_somebody_else_is_refused_by_name(store):
    buffer = pa.BufferOutputStream()
    pq.write_table(make_table([1]), buffer)
    store.create(part_name(0), bytes(buffer.getvalue()))
    with pytest.raises(CommitError, match="is not a part of this output"):
        receipt_of(store, PLAN.unit(0), PLAN.hash)


class CountingStore:
    def __init__(self, store):
        self.store, self.read_sizes, self.uri = store, [], store.uri

    def tail(self, name, num_bytes):
        self.read_sizes.append(num_bytes)
        return self.store.tail(name, num_bytes)


@pytest.mark.parametrize(("note", "num_requests"), [("", 1), ("n" * 40_000, 2)])
def test_a_footer_takes_one_request_or_two(store, note, num_requests):
    table = make_table(UNITS[0]).replace_schema_metadata({"note": note})
    commit(store, table=table)
    counting = CountingStore(store)
    assert 3 == read_footer(counting, part_name(0)).unit.num_rows
    assert num_requests == len(counting.read_sizes)


def test_counts_survive_the_footer(store):
    counts = UnitCounts(
        num_rows=3,
        statuses={"ok": 2, "error": 1},
        errors={"PromptTooLong": ErrorTally(num_rows=1, row_ids=("r4",), message="long")},
        prompt_tokens=10,
        cached_tokens=4,
        generated_tokens=7,
    )
    commit(store, count=lambda _: counts)
    assert counts == read_footer(store, part_name(0)).counts


def test_the_sum_of_a_unit_does_not_depend_on_the_order_of_its_rows():
    assert row_sum(np.array([4, 0, 2])) == row_sum(np.array([0, 2, 4]))


def test_the_sums_of_pieces_of_an_input_add_up():
    unit, row = np.array([0, 1, 0, 1]), np.arange(4)
    pieces = row_sums(unit[:2], row[:2], 2) + row_sums(unit[2:], row[2:], 2)
    assert row_sums(unit, row, 2).tolist() == pieces.tolist()
    assert [row_sum(np.array([0, 2])), row_sum(np.array([1, 3]))] == pieces.tolist()


def test_a_footer_that_could_not_be_read_again_is_refused():
    with pytest.raises(CommitError, match=r"smaller plan\.unit_rows"):
        encode_part(pa.table({"x": [1]}), " " * (33 << 20))
