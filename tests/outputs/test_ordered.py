"""Copies of finished outputs with rows in input order."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from raybatch.durable.audit import audit, finish
from raybatch.durable.commit import commit_unit
from raybatch.durable.sink import prepare_sink
from raybatch.durable.storage import open_store
from raybatch.durable.units import UnitPlan, row_sums
from raybatch.errors import CommitError, ConfigError
from raybatch.outputs import ordered as row_copy
from raybatch.outputs.ordered import ordered
from raybatch.outputs.verify import verify
from raybatch.planning.shards import make_shard
from raybatch.planning.store import StoredPlan, write_plan, write_shard
from raybatch.planning.tally import unit_counts
from tests.clusters import local_ray
from tests.outputs.support import OUTPUT, contents, finished_rows, make_complete

# rows in the order of the plan; units of three, shards of five
ORDER = [7, 2, 9, 0, 11, 5, 1, 10, 3, 8, 4, 6]
UNIT_ROWS, SHARD_ROWS = 3, 5
NUM_UNITS = len(ORDER) // UNIT_ROWS


def make_reordered(sink: str, *, is_finished: bool = True, **changed) -> UnitPlan:
    """Write an output whose rows follow `ORDER`."""
    prepare_sink(sink, is_overwrite=False)
    place = np.argsort(ORDER)
    unit, pos = (place // UNIT_ROWS).astype(np.int32), (place % UNIT_ROWS).astype(np.int32)
    nothing, unknown = np.zeros(len(ORDER), np.int32), np.full(len(ORDER), np.nan)
    shard = make_shard(unit, pos, np.full(len(ORDER), -1), nothing, unknown)
    firsts = range(0, len(ORDER), SHARD_ROWS)
    names = [write_shard(sink, "plan-a", first, shard.slice(first, SHARD_ROWS)) for first in firsts]
    units = UnitPlan(
        hash="plan-a",
        unit_rows=np.full(NUM_UNITS, UNIT_ROWS),
        row_sums=row_sums(unit, np.arange(len(ORDER)), NUM_UNITS),
    )
    subject = {
        "hash": units.hash,
        "num_rows": len(ORDER),
        "num_units": NUM_UNITS,
        "num_groups": 0,
        "is_reordered": True,
        "logical_tokens": 0,
        "computed_tokens": 0,
        "block_size": 8,
        "options": {"unit_rows": 5},
        "files": (),
        "shards": tuple(zip(names, firsts, strict=True)),
        "fingerprint": {"sampling.n": "1", "sampling.logprobs": "null", "output_prefix": '""'},
    }
    write_plan(sink, StoredPlan(**{**subject, **changed}), units)
    store = open_store(sink)
    for number in range(NUM_UNITS if is_finished else 1):
        rows = ORDER[number * UNIT_ROWS : (number + 1) * UNIT_ROWS]
        table = finished_rows(rows)
        commit_unit(
            store,
            units.unit(number),
            table,
            pos=np.arange(UNIT_ROWS),
            row=np.array(rows),
            count=lambda table: unit_counts(table, OUTPUT),
            plan_hash=units.hash,
            attempt="test",
        )
    if is_finished:
        finish(store, units, audit(store, units))
    return units


@pytest.fixture
def sink(tmp_path: Path) -> str:
    make_reordered(str(tmp_path / "out"))
    return str(tmp_path / "out")


@pytest.fixture
def into(tmp_path: Path) -> str:
    return str(tmp_path / "in-order")


def row_ids(folder: str) -> list[str]:
    return pq.read_table(folder).column("row_id").to_pylist()


IN_ORDER = [f"a.parquet:{row}" for row in range(len(ORDER))]


def test_a_copy_has_every_row_once_in_the_order_of_the_input(sink, into):
    before = contents(Path(sink))
    ordered(sink, into)
    assert IN_ORDER == row_ids(into)
    assert pq.read_table(into).sort_by("row_id") == pq.read_table(sink).sort_by("row_id")
    assert before == contents(Path(sink))


def test_a_copy_is_an_output_that_can_be_verified(sink, into):
    ordered(sink, into)
    found = verify(into, deep=True)
    assert found.is_complete
    assert (3, verify(sink).statuses) == (found.num_units, found.statuses)


@pytest.mark.ray
def test_rows_sorted_by_ray_are_those_sorted_in_this_process(sink, into, tmp_path, monkeypatch):
    ordered(sink, into)
    monkeypatch.setattr(row_copy, "_MAX_DRIVER_BYTES", 0)
    monkeypatch.setattr(row_copy, "_BLOCK_ROWS", 4)
    with local_ray():
        ordered(sink, str(tmp_path / "by-ray"))
    assert parts_of(into) == parts_of(str(tmp_path / "by-ray"))


def parts_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).glob("data/*.parquet")}


def test_a_copy_that_was_cut_short_is_gone_on_with(sink, into):
    ordered(sink, into)
    whole = parts_of(into)
    for name in ("_SUCCESS", "data/part-000001.parquet"):
        (Path(into) / name).unlink()
    kept = {path: path.stat().st_mtime_ns for path in Path(into).glob("data/*")}
    ordered(sink, into)
    assert whole == parts_of(into)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    assert verify(into).is_complete


def test_a_damaged_part_is_named_with_the_way_out(sink, into):
    part = sorted(Path(sink).glob("data/*"))[1]
    data = bytearray(part.read_bytes())
    data[4:200] = bytes(196)
    part.write_bytes(data)
    with pytest.raises(CommitError, match=rf"{part.name} is corrupt: .*move it away"):
        ordered(sink, into)


def test_an_output_in_the_order_of_the_input_needs_no_copy(tmp_path, into):
    make_complete(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="already in input order"):
        ordered(str(tmp_path / "out"), into)


def test_an_output_that_is_not_finished_is_refused(tmp_path, into):
    make_reordered(str(tmp_path / "out"), is_finished=False)
    with pytest.raises(ConfigError, match="is not finished; run the job again to the end"):
        ordered(str(tmp_path / "out"), into)


def test_a_partitioned_output_is_refused_with_the_way_out(tmp_path, into):
    make_reordered(str(tmp_path / "out"), partition_by=("text",), is_finished=False)
    with pytest.raises(ConfigError, match="run the job with output_order=input from the start"):
        ordered(str(tmp_path / "out"), into)


@pytest.mark.parametrize("name", ["", "copy"])
def test_a_copy_that_readers_of_the_output_would_see_is_refused(sink, name):
    with pytest.raises(ConfigError, match="would see every row twice"):
        ordered(sink, str(Path(sink) / name))


def test_a_copy_above_the_output_is_refused(sink):
    with pytest.raises(ConfigError, match="is below"):
        ordered(sink, str(Path(sink).parent))


def test_a_folder_with_another_output_is_refused(sink, tmp_path):
    make_complete(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="rows of another output"):
        ordered(sink, str(tmp_path / "other"))


def test_a_folder_without_an_output_is_refused(tmp_path, into):
    with pytest.raises(ConfigError, match="is not the output of a raybatch job"):
        ordered(str(tmp_path / "none"), into)
