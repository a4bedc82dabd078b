"""The audit tells what an output lacks, and success is not said without it."""

import json
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from raybatch.durable.audit import audit, finish, is_finished
from raybatch.durable.commit import commit_unit
from raybatch.durable.layout import SUCCESS, part_name
from raybatch.durable.parts import read_footer
from raybatch.durable.storage import open_store
from raybatch.durable.units import ErrorTally, UnitCounts, join_plans, sum_counts
from raybatch.errors import CommitError
from tests.durable.support import make_plan, unit_of

UNITS = [[4, 0, 2], [1, 3], [5]]
PLAN = make_plan(UNITS)


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def commit(store, *numbers, plan=PLAN):
    for number in numbers:
        commit_unit(store, **unit_of(plan, UNITS, number))


def test_a_complete_output_is_clean(store):
    commit(store, 0, 1, 2)
    found = audit(store, PLAN)
    assert found.is_clean
    assert "expected 6, written 6, lost 0, duplicated 0" == str(found)


def test_the_audit_adds_up_what_the_units_say(store):
    commit(store, 0, 1, 2)
    counts = audit(store, PLAN).counts
    assert (6, {"ok": 6}, 6) == (counts.num_rows, counts.statuses, counts.generated_tokens)


def test_a_missing_unit_is_counted_and_named(store):
    commit(store, 0, 2)
    found = audit(store, PLAN)
    assert (2, 1, (1,), False) == (
        found.lost_rows,
        found.num_missing,
        found.missing,
        found.is_clean,
    )


def test_rows_that_have_no_plan_yet_are_missing(store):
    head = replace(PLAN, rows_left=5)
    commit(store, 0, 1, 2)
    found = audit(store, head)
    assert (11, 6, 5, 0, False) == (
        found.expected_rows,
        found.written_rows,
        found.missing_rows,
        found.unreadable_rows,
        found.is_clean,
    )
    with pytest.raises(CommitError, match="is not complete"):
        finish(store, head, found)
    # the plan of these rows is the last one
    whole = join_plans([head, LATER])
    assert (0, 6 + LATER.num_rows) == (whole.rows_left, audit(store, whole).expected_rows)


def test_a_part_of_another_plan_is_foreign_and_its_rows_are_lost(store):
    commit(store, 0, 1)
    commit(store, 2, plan=make_plan(UNITS, hash="plan-b"))
    found = audit(store, PLAN)
    assert (1, 1, False) == (found.num_foreign, found.lost_rows, found.is_clean)
    assert "belongs to plan plan-b" in found.foreign[0]


def test_a_part_with_too_many_rows_is_told_as_duplicates(store):
    commit(store, 0, 1, 2)
    found = audit(store, make_plan([UNITS[0], UNITS[1][:1], UNITS[2]]))
    assert (1, False) == (found.duplicated_rows, found.is_clean)


def test_a_part_with_too_few_rows_is_told_as_loss(store):
    commit(store, 0, 1, 2)
    found = audit(store, make_plan([UNITS[0], [1, 3, 6], UNITS[2]]))
    assert (1, False) == (found.lost_rows, found.is_clean)


def test_a_part_with_other_rows_is_foreign(store):
    commit(store, 0, 1, 2)
    found = audit(store, make_plan([UNITS[0], [1, 6], UNITS[2]]))
    assert (1, False) == (found.num_foreign, found.is_clean)


@pytest.mark.parametrize("name", ["data/part-000009.parquet", "data/copy of part-000001.parquet"])
def test_a_file_of_no_unit_is_foreign(store, name):
    commit(store, 0, 1, 2)
    store.create(name, b"")
    found = audit(store, PLAN)
    assert (1, False) == (found.num_foreign, found.is_clean)
    assert found.foreign[0].endswith("is not a part of the plan; move it away")


@pytest.mark.parametrize(
    ("make", "record"),
    [
        (Path.mkdir, "is a folder, not a part; move it away"),
        (lambda path: path.symlink_to("nowhere"), "part-000002.parquet and run the job again"),
    ],
)
def test_a_folder_or_a_link_to_nothing_in_the_place_of_a_part_is_told(tmp_path, make, record):
    store = open_store(str(tmp_path))
    commit(store, 0, 1)
    make(tmp_path / part_name(2))
    found = audit(store, PLAN)
    assert (1, 1, 0) == (found.num_foreign, found.lost_rows, found.num_missing)
    assert record in found.foreign[0]
    with pytest.raises(CommitError if make is Path.mkdir else FileNotFoundError):
        read_footer(store, part_name(2))


def test_a_broken_part_is_foreign(store):
    commit(store, 0, 1)
    store.create(part_name(2), b"torn")
    found = audit(store, PLAN)
    assert (1, 1) == (found.num_foreign, found.num_missing + found.lost_rows)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_many_shares_of_units_add_up(store, num_threads):
    units = [[number] for number in range(600)]
    plan = make_plan(units)
    for number in range(600):
        commit_unit(store, **unit_of(plan, units, number))
    found = audit(store, plan, num_threads=num_threads)
    assert (600, True) == (found.written_rows, found.is_clean)


def test_success_lists_the_parts(store):
    commit(store, 0, 1, 2)
    finish(store, PLAN, audit(store, PLAN))
    record = json.loads(store.read("_SUCCESS"))
    assert ("plan-a", 3, 6) == (record["plan"], record["units"], record["rows"])
    assert store.names("data") == record["files"]


def test_success_is_said_once(store):
    commit(store, 0, 1, 2)
    found = audit(store, PLAN)
    finish(store, PLAN, found)
    before = store.read("_SUCCESS")
    finish(store, PLAN, found)
    assert before == store.read("_SUCCESS")


def test_success_is_not_said_of_an_output_that_lacks_a_unit(store):
    commit(store, 0, 1)
    with pytest.raises(CommitError, match="1 units are missing, such as 2"):
        finish(store, PLAN, audit(store, PLAN))
    assert store.size("_SUCCESS") is None


def test_an_output_is_finished_when_success_was_said(store):
    commit(store, 0, 1, 2)
    assert not is_finished(store, PLAN)
    finish(store, PLAN, audit(store, PLAN))
    assert is_finished(store, PLAN)


@pytest.mark.parametrize("record", [b"", b"{torn", b"[1]", b"{}"])
def test_a_success_that_cannot_be_read_is_refused_with_the_way_out(store, record):
    store.replace(SUCCESS, record)
    with pytest.raises(CommitError, match=r"_SUCCESS was not written by a run; remove it and run"):
        is_finished(store, PLAN)


def test_the_success_of_another_plan_is_refused(store):
    commit(store, 0, 1, 2)
    finish(store, PLAN, audit(store, PLAN))
    with pytest.raises(CommitError, match="belongs to plan plan-a, not to plan-b"):
        is_finished(store, make_plan(UNITS, hash="plan-b"))


def test_counts_keep_three_ids_of_each_error():
    parts = [
        UnitCounts(errors={"Bad": ErrorTally(num_rows=2, row_ids=(f"a{n}", f"b{n}"), message="m")})
        for n in range(3)
    ]
    expected = ErrorTally(num_rows=6, row_ids=("a0", "b0", "a1"), message="m")
    assert {"Bad": expected} == sum_counts(parts).errors


def test_an_empty_plan_is_complete(store):
    plan = make_plan([])
    finish(store, plan, audit(store, plan))
    assert is_finished(store, plan)


LATER = replace(make_plan([[0, 1], [2]], hash="plan-b"), first_unit=3)
BOTH = join_plans([PLAN, LATER])


def commit_later(store, *numbers, plan=LATER):
    for number in numbers:
        commit_unit(store, **unit_of(plan, [[0, 1], [2]], number))


def test_units_of_a_later_plan_are_numbered_after_the_last(store):
    commit_later(store, 0, 1)
    assert [part_name(3), part_name(4)] == store.names("data")


def test_units_of_several_plans_are_audited_together(store):
    commit(store, 0, 1, 2)
    commit_later(store, 0, 1)
    found = audit(store, BOTH)
    assert (9, True, 5) == (found.written_rows, found.is_clean, found.num_units)


def test_a_unit_of_the_wrong_one_of_several_plans_is_foreign(store):
    commit(store, 0, 1, 2)
    commit_later(store, 0, 1, plan=replace(LATER, hash="plan-a"))
    found = audit(store, BOTH)
    assert (2, 3) == (found.num_foreign, found.lost_rows)
    assert "belongs to plan plan-a, the output to plan plan-b" in found.foreign[0]


def test_an_output_that_has_grown_is_not_finished_until_the_rest_is_there(store):
    commit(store, 0, 1, 2)
    finish(store, PLAN, audit(store, PLAN))
    before = store.read("_SUCCESS")
    assert not is_finished(store, BOTH)
    with pytest.raises(CommitError, match="2 units are missing"):
        finish(store, BOTH, audit(store, BOTH))
    assert before == store.read("_SUCCESS")


def test_success_is_replaced_when_an_output_has_grown(store):
    commit(store, 0, 1, 2)
    finish(store, PLAN, audit(store, PLAN))
    commit_later(store, 0, 1)
    finish(store, BOTH, audit(store, BOTH))
    record = json.loads(store.read("_SUCCESS"))
    assert ("plan-a+plan-b", 5, 9, 5) == (
        record["plan"],
        record["units"],
        record["rows"],
        len(record["files"]),
    )


def test_success_of_a_grown_output_is_not_taken_back_by_who_knows_less(store):
    commit(store, 0, 1, 2)
    commit_later(store, 0, 1)
    finish(store, BOTH, audit(store, BOTH))
    with pytest.raises(CommitError, match="belongs to plan"):
        finish(store, PLAN, audit(store, BOTH))
    assert is_finished(store, BOTH)


def test_plans_that_do_not_follow_each_other_are_refused():
    with pytest.raises(CommitError, match="do not number its units"):
        join_plans([PLAN, replace(LATER, first_unit=2)])
