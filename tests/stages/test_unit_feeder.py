"""Feeders that write, with a pool inside the test's process: what is asked, kept and written."""

import asyncio
import time
from copy import copy
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors.wire.columns import CHECKPOINTED_SCHEMA, RESULT_SCHEMA
from raybatch.actors.wire.records import RowCrashes
from raybatch.config import WaveConfig
from raybatch.durable.journal import POS, ROW, CrashCounts
from raybatch.durable.storage import store_of
from raybatch.planning.dataset import without_groups
from raybatch.planning.fingerprint import output_schema
from raybatch.planning.shards import stretches
from raybatch.planning.store import write_plan
from raybatch.policy.deadline import UnitDeadline
from raybatch.records.pool_stats import PoolStats
from raybatch.rows.plan_columns import ROW as NUMBER
from raybatch.rows.plan_columns import (
    place_columns,
    plan_columns,
    take_groups,
    with_columns,
    with_groups_of,
)
from raybatch.stages.unit_feeder import PlacedRows, UnitFeeder, _calls
from raybatch.stages.unit_writer import SPECIAL, UnitWatch, UnitWriter
from tests.report.test_recorder import stored_plan
from tests.stages.support import LocalPool, fake_stage

FAR = 10**6


class UnitPool(LocalPool):
    """Never ends a call whose last text is "wait", and stops the run once the rest is answered."""

    def __init__(self, spec):
        super().__init__(spec)
        self.notes = []
        self.forgotten = []
        self.watches = []
        self.is_over, self.num_asked = False, 0
        self.results = {}

    async def generate(self, table, samplings, *, name="", watch=None, **_):
        self.watches.append(watch)
        results = await super().generate(table, samplings)
        last = table.num_rows - 1
        if b"wait" in bytes(table.column("prompt_token_ids")[last].as_py()):
            rows = results.column("row").to_numpy()
            self.results[name] = results.filter(pa.array(rows != last))
            self.is_over = True
            await asyncio.Event().wait()
        return results

    async def partial_results(self, seen, *, client, watches):
        none = RESULT_SCHEMA.empty_table()
        return [
            (none, num_seen) if num_seen or name not in self.results else (self.results[name], 1)
            for name, num_seen in seen.items()
        ]

    async def has_named(self, *, client, name):
        return False

    async def is_stopped(self, *, client="default"):
        self.num_asked += 1
        await asyncio.sleep(0.01)
        return self.is_over

    def forget(self, names, *, client):
        self.forgotten += names

    def note_unit(self, unit, state, *, client="default"):
        self.notes.append((unit, state))


def planned(texts, unit_rows, groups=None):
    """Return rows with the columns of a plan, the last first."""
    positions = np.concatenate([np.arange(size) for size in unit_rows]).astype(np.int32)
    units = np.repeat(np.arange(len(unit_rows)), unit_rows).astype(np.int32)
    group_ids = np.full(len(texts), -1) if groups is None else np.array(groups)
    table = with_columns(
        pa.table({"text": pa.array(texts, pa.string())}),
        {
            **place_columns(units, positions, np.arange(len(texts))),
            **plan_columns(
                pa.array(group_ids, mask=group_ids < 0),
                pa.array(np.zeros(len(texts), np.int32)),
                pa.nulls(len(texts), pa.int32()),
            ),
        },
    )
    return table.take(np.arange(len(texts))[::-1])


def make_feeder(model, sink, unit_rows, *, waves=(), flush_every_s=FAR, **options):
    """Return a feeder class and its pool, for a plan whose units are stretches of the input."""
    stage = fake_stage(model, prompt="{text}", **options)
    units = stretches("plan-a", np.array(unit_rows))
    stored = stored_plan(hash=units.hash, num_rows=units.num_rows, num_units=len(unit_rows))
    write_plan(str(sink), stored, units)
    writer = UnitWriter(
        sink=str(sink),
        store=store_of(str(sink)),
        stored=stored,
        schema=output_schema(pa.schema([("text", pa.string())]), stage.config),
        output=stage.config.output,
        attempt="test",
    )
    own = {
        "config": stage.config,
        "client": stage.client,
        "pool": UnitPool(stage.pool.spec),
        "writer": writer,
        "flush_every_s": flush_every_s,
        "waves": waves,
    }
    return type("LocalFeeder", (UnitFeeder,), own)


def feed(feeder, rows):
    return asyncio.run(feeder()(rows))


def written(sink):
    return pq.read_table(sink / "data").to_pylist()


def checkpointed(row, tokens):
    values = {"row": row, "sample_idx": 0, "token_ids": tokens, "num_cached_tokens": 0}
    return pa.RecordBatch.from_pylist([{**values, "logprobs": None}], schema=CHECKPOINTED_SCHEMA)


def test_the_units_of_a_block_are_written_each_in_its_order(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [3, 2])
    receipts = feed(feeder, planned(["a", "b", "c", "d", "e"], [3, 2]))
    assert [(0, 3), (1, 2)] == [(row["unit"], row["num_rows"]) for row in receipts.to_pylist()]
    parts = [pq.read_table(tmp_path / "data" / f"part-00000{unit}.parquet") for unit in (0, 1)]
    assert [["a", "b", "c"], ["d", "e"]] == [part.column("text").to_pylist() for part in parts]
    assert SPECIAL not in parts[0].column_names
    assert {(0, "started"), (0, "written"), (1, "started"), (1, "written")} == set(
        feeder.pool.notes
    )
    assert len(feeder.pool.forgotten) == 2


class SlowPool(UnitPool):
    """Says that each row has taken an engine 1,000 s."""

    def stats(self, client="default"):
        num_rows = sum(map(len, self.batches))
        return PoolStats(
            num_ready=1, rows_received=num_rows, rows_done=num_rows, busy_s=1000.0 * num_rows
        )


def test_a_unit_that_would_not_be_done_in_time_is_not_begun(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [3, 2, 4])
    feeder.pool = SlowPool(feeder.pool.spec)
    # as predicted there is time for six rows of nine, whichever units are asked for first
    feeder.deadline = UnitDeadline(ends_at=time.time() + 650, ready_at=0.0, row_s=100.0)
    receipts = feed(feeder, planned(list("abcdefghi"), [3, 2, 4]))
    begun_units = {unit for unit, _ in feeder.pool.notes}
    assert begun_units == {row["unit"] for row in receipts.to_pylist()}
    assert 1 <= len(begun_units) <= 2


def test_a_unit_that_is_written_is_not_asked_again(model, tmp_path):
    rows = planned(["a", "b", "c"], [2, 1])
    feed(make_feeder(model, tmp_path, [2, 1]), rows.slice(0, 1))
    feeder = make_feeder(model, tmp_path, [2, 1])
    receipts = feed(feeder, rows)
    assert [True, False] == receipts.column("won").to_pylist()
    assert 1 == len(feeder.pool.batches)


def test_special_tokens_of_rows_are_counted_in_the_footer(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [3])
    feed(feeder, planned(["a", "<|eos|>b<|user|>", "c"], [3]))
    counts = feeder.writer.receipt_of(0).counts
    assert (1, 2) == (counts.special_rows, counts.special_tokens)


def test_a_row_without_a_count_of_special_tokens_is_refused(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [1])
    feed(feeder, planned(["a"], [1]))
    part = pq.read_table(tmp_path / "data" / "part-000000.parquet")
    zero, none = pa.array([0], pa.int64()), pa.array([None], pa.int64())
    uncounted = with_columns(part, {POS: zero, ROW: zero, SPECIAL: none})
    with pytest.raises(ValueError, match="null"):
        feeder.writer.joined([uncounted])


def test_every_row_of_a_wave_gets_its_own_new_answer(model, tmp_path):
    texts = ["a", "b", None, "c", "d"]
    again = WaveConfig(on=("truncated",), sampling={"max_tokens": 6})
    feed(make_feeder(model, tmp_path / "waves", [5], waves=(again,)), planned(texts, [5]))
    options = {"sampling": {"max_tokens": 6}}
    feed(make_feeder(model, tmp_path / "once", [5], **options), planned(texts, [5]))
    waves, once = (written(tmp_path / name) for name in ("waves", "once"))
    assert [2, 2, 2, 2] == [row.pop("attempts") for row in waves if row["text"]]
    assert [1, 1, 1, 1] == [row.pop("attempts") for row in once if row["text"]]
    assert once == waves


def test_a_run_that_stops_keeps_what_is_finished_and_goes_on_from_there(model, tmp_path):
    texts = ["a", "b", "wait"]
    feeder = make_feeder(model, tmp_path, [3], flush_every_s=0.01)
    assert 0 == feed(feeder, planned(texts, [3])).num_rows
    assert [(0, "started"), (0, "left")] == feeder.pool.notes
    assert ["a", "b"] == sorted(feeder.writer.journal_of(0).column("text").to_pylist())
    later = make_feeder(model, tmp_path, [3])
    later.pool.generate = LocalPool.generate.__get__(later.pool)
    assert 1 == feed(later, planned(texts, [3])).num_rows
    assert 1 == len(later.pool.requests)
    assert texts == [row["text"] for row in written(tmp_path)]


def test_a_run_that_has_to_stop_begins_no_unit(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [1, 1, 1])
    feeder.pool.is_over = True
    assert 0 == feed(feeder, planned(["a", "b", "c"], [1, 1, 1])).num_rows
    assert [] == feeder.pool.batches
    assert feeder.pool.num_asked == 1


def test_a_row_that_was_given_up_is_not_asked_and_its_neighbour_is(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [2])
    feeder.writer.keep_crash_counts(0, CrashCounts(crashes={1: 3}, given_up=frozenset({1})))
    feed(feeder, planned(["a", "b"], [2]))
    first, second = written(tmp_path)
    assert "" == first["__inference_error__"]
    assert "3 times" in second["__inference_error__"]
    assert [1] == [len(batch) for batch in feeder.pool.batches]


def test_the_pool_hears_how_often_engines_died_with_each_row(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [3])
    feeder.writer.keep_crash_counts(0, CrashCounts(crashes={1: 2}, given_up=frozenset()))
    feed(feeder, planned(["a", "b", "c"], [3]))
    # rows of one call run in the order of the plan
    assert [[0, 2, 0]] == [watch.crashes.tolist() for watch in feeder.pool.watches]


@pytest.fixture
def watch(model, tmp_path):
    feeder = make_feeder(model, tmp_path, [4])
    return UnitWatch(feeder.writer, 0), feeder.writer


def test_tokens_that_rows_have_gained_outlive_the_run(watch):
    unit, writer = watch
    placed = unit.at(np.array([1, 3]))
    placed.note_checkpointed(checkpointed(1, [7, 8]))
    asyncio.run(unit.flush())
    again = UnitWatch(writer, 0).at(np.array([3, 0]))
    assert [{"row": 0, "token_ids": [7, 8]}] == again.checkpointed.select(
        ["row", "token_ids"]
    ).to_pylist()
    assert UnitWatch(writer, 0).at(np.array([1])).checkpointed is None


def test_deaths_outlive_the_run_and_belong_to_their_rows(watch):
    unit, writer = watch
    placed = unit.at(np.array([1, 3]))
    deaths = [RowCrashes(0, 1, False), RowCrashes(1, 3, True)]
    asyncio.run(placed.note_crashes(deaths))
    again = UnitWatch(writer, 0).at(np.array([3, 1, 0]))
    assert [3, 1, 0] == again.crashes.tolist()
    assert {0} == again.given_up().keys()
    assert [1, 0] == again.take([1, 2]).crashes.tolist()


def test_rows_of_one_call_have_the_watch_of_their_unit_and_the_same_name_in_every_run(watch):
    unit, _ = watch
    rows = planned(["a", "b"], [2])
    placed = PlacedRows.of(rows, unit)
    assert [1, 0] == placed.watch.positions.tolist()
    assert PlacedRows.of(rows).watch is None
    assert placed.name == PlacedRows.of(rows, unit).name
    assert placed.name != PlacedRows.of(rows.slice(1), unit).name


def test_calls_of_two_plans_or_of_other_rows_never_share_a_name(watch):
    """A pool takes a call with a known name for one that a dead feeder has begun."""
    unit, _ = watch
    rows = planned(["a", "b"], [2])
    other = copy(unit)
    other.writer = replace(unit.writer, stored=replace(unit.writer.stored, hash="another"))
    assert PlacedRows.of(rows, unit).name != PlacedRows.of(rows, other).name
    # rows of a probe have no places yet
    table = pa.table({"text": ["a", "b"], NUMBER: pa.array([0, 1])})
    probe = without_groups(table)
    assert PlacedRows.of(probe.slice(0, 1)).name != PlacedRows.of(probe.slice(1)).name


def test_groups_of_two_plans_never_share_an_id():
    rows = planned(["a", "b", "c"], [3], [0, 0, -1]).sort_by("__rb_plan_rank")
    first, second = (take_groups(with_groups_of(rows, plan)) for plan in ("first", "second"))
    assert (first[0], -1) == (first[1], first[2])
    assert first[0] != second[0]
    assert min(first[0], second[0]) >= 0


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([-1] * 2400, [1024, 1024, 352]),
        ([0] * 1200 + [1] * 1200, [1200, 1200]),
        ([0] * 2400, [2048, 352]),
        ([0] * 1024 + [1] * 10, [1024, 10]),
    ],
    ids=["alone", "two groups", "one long group", "a border in place"],
)
def test_a_unit_is_cut_into_calls_between_groups_where_one_ends_soon(groups, sizes):
    rows = planned([""] * len(groups), [len(groups)], groups).sort_by("__rb_plan_rank")
    calls = _calls(rows)
    assert sizes == [call.num_rows for call in calls]
    assert rows.equals(pa.concat_tables(calls))
