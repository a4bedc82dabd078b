"""Finished rows outlive an attempt, and a bad journal costs work alone."""

import uuid

import pyarrow as pa
import pytest

from raybatch.durable.commit import committed
from raybatch.durable.journal import (
    POS,
    ROW,
    journal_schema,
    read_fragments,
    read_token_checkpoints,
    write_fragment,
    write_token_checkpoint,
)
from raybatch.durable.layout import fragment_name, token_checkpoint_name
from raybatch.durable.storage import open_store
from raybatch.durable.units import CommitUnit
from raybatch.errors import CommitError
from tests.durable.support import SCHEMA, make_plan, make_table

UNITS = [[4, 0, 2], [1, 3]]
PLAN = make_plan(UNITS)
UNIT = PLAN.unit(0)


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def rows_at(pos, *, answer="x", rows=UNITS[0]):
    numbers = [rows[one] for one in pos]
    table = make_table(numbers, answer=answer)
    columns = [*table.columns, pa.array(pos, pa.int64()), pa.array(numbers, pa.int64())]
    return pa.table(columns, schema=journal_schema(SCHEMA))


def write(store, pos, *, attempt="a", unit=UNIT, plan="plan-a", **options):
    write_fragment(store, unit, rows_at(pos, **options), plan_hash=plan, attempt=attempt)


def read(store, unit=UNIT, **options):
    return read_fragments(store, unit, SCHEMA, plan_hash="plan-a", **options)


def test_kept_rows_come_back_by_position(store):
    write(store, [2, 0])
    table = read(store)
    assert ([0, 2], [4, 2], ["r4", "r2"]) == tuple(
        table[name].to_pylist() for name in (POS, ROW, "id")
    )


def test_what_comes_back_has_the_schema_of_the_journal_exactly(store):
    write(store, [0])
    assert read(store).schema.equals(journal_schema(SCHEMA), check_metadata=True)


def test_rows_with_dictionaries_of_their_own_are_kept_together(store):
    schema = pa.schema([pa.field("label", pa.dictionary(pa.int32(), pa.string()))])
    rows = [
        pa.table(
            [pa.array([label]).dictionary_encode(), pa.array([pos]), pa.array([UNITS[0][pos]])],
            schema=journal_schema(schema),
        )
        for pos, label in enumerate("ab")
    ]
    write_fragment(store, UNIT, pa.concat_tables(rows), plan_hash="plan-a", attempt="a")
    found = read_fragments(store, UNIT, schema, plan_hash="plan-a")
    assert found["label"].to_pylist() == ["a", "b"]


def test_a_unit_without_a_journal_has_no_rows(store):
    assert 0 == read(store).num_rows


def test_of_rows_kept_twice_the_first_by_name_counts(store):
    write(store, [1, 2], attempt="b", answer="later")
    write(store, [1, 0], attempt="a", answer="first")
    assert [0, 1, 2] == read(store)[POS].to_pylist()
    assert ["first", "first", "later"] == read(store)["text"].to_pylist()


def test_the_same_fragment_may_be_kept_again(store):
    write(store, [0])
    write(store, [0])
    assert 1 == read(store).num_rows


def test_a_journal_is_no_commit(store):
    write(store, [0, 1, 2])
    assert not committed(store, PLAN).any()


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "plan-b"},
        {"unit": CommitUnit(number=0, num_rows=9, row_sum=0), "pos": [7], "rows": list(range(9))},
    ],
    ids=["another plan", "no place in the unit"],
)
def test_rows_that_are_not_the_units_are_left_out(store, caplog, options):
    write(store, **{"pos": [0], "attempt": "b", **options})
    write(store, [1])
    assert [1] == read(store)[POS].to_pylist()
    assert "skipped " in caplog.text


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_torn_fragment_is_left_out(store, caplog, cut):
    write(store, [0], attempt="whole")
    name = fragment_name(0, 0, 1, "whole")
    store.create(fragment_name(0, 1, 1, "torn"), store.read(name)[:cut])
    assert [0] == read(store)[POS].to_pylist()
    assert "1-torn.arrow: " in caplog.text


def test_a_fragment_of_another_schema_is_left_out(store, caplog):
    table = rows_at([0]).append_column("more", pa.array([1]))
    write_fragment(store, UNIT, table, plan_hash="plan-a", attempt="a")
    assert 0 == read(store).num_rows
    assert "another schema" in caplog.text


@pytest.mark.parametrize("pos", [[], [3], [-1]])
def test_rows_without_a_place_are_not_kept(store, pos):
    table = rows_at([0]).slice(0, len(pos)).set_column(2, POS, pa.array(pos, pa.int64()))
    with pytest.raises(CommitError, match="unit 0 has 3 rows, got the positions"):
        write_fragment(store, UNIT, table, plan_hash="plan-a", attempt="a")


TOKENS = pa.schema([pa.field("row", pa.int32(), nullable=False), ("tokens", pa.list_(pa.int32()))])


def tokens_at(row, num_tokens=2):
    return pa.RecordBatch.from_pydict({"row": [row], "tokens": [[7] * num_tokens]}, schema=TOKENS)


def write_tokens(store, row, *, attempt="a", unit=UNIT, plan="plan-a", **options):
    write_token_checkpoint(store, unit, tokens_at(row, **options), plan_hash=plan, attempt=attempt)


def read_tokens(store, schema=TOKENS):
    return list(read_token_checkpoints(store, UNIT, schema, plan_hash="plan-a"))


def test_tokens_of_unfinished_rows_come_back(store):
    write_tokens(store, 1)
    assert [tokens_at(1)] == read_tokens(store)


def test_all_that_was_kept_of_a_row_comes_back(store):
    write_tokens(store, 1, attempt="a")
    write_tokens(store, 1, attempt="b", num_tokens=5)
    assert [tokens_at(1), tokens_at(1, 5)] == read_tokens(store)


def test_finished_and_unfinished_rows_do_not_see_each_other(store, caplog):
    write(store, [0])
    write_tokens(store, 1)
    assert ([0], 1) == (read(store)[POS].to_pylist(), len(read_tokens(store)))
    assert not caplog.text


def test_tokens_of_another_unit_plan_or_place_are_left_out(store, caplog):
    write_tokens(store, 1, plan="plan-b")
    write_tokens(store, 3, attempt="b")
    store.create(token_checkpoint_name(0, "c"), b"torn")
    assert [] == read_tokens(store)
    assert 3 == caplog.text.count("skipped ")


def test_tokens_in_another_form_are_left_out(store, caplog):
    write_tokens(store, 1)
    assert [] == read_tokens(store, pa.schema([("row", pa.int32())]))
    assert "another schema" in caplog.text
