import gzip
import json

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import file_slices
from raybatch.inputs.file_slices import FileSlice, Size, pack, read_slice
from raybatch.inputs.source import Source, scan_source
from raybatch.planning.source_checks import check_unique_ids
from tests.stages.support import rows_of, write_parquet

LIMIT = Size(num_rows=10, num_bytes=100, num_pieces=3)


def packed(*sizes):
    return [list(run) for run in pack([Size(*size) for size in sizes], LIMIT)]


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([(6, 1), (4, 1), (1, 1)], [[0, 1], [2]]),
        ([(1, 60), (1, 40), (1, 1)], [[0, 1], [2]]),
        ([(1, 1)] * 4, [[0, 1, 2], [3]]),
        ([(1, 1), (99, 999), (1, 1), (1, 1)], [[0], [1], [2, 3]]),
    ],
    ids=["none", "rows", "bytes", "pieces", "a large one stays alone"],
)
def test_neighbours_are_packed_within_every_limit(sizes, runs):
    assert packed(*sizes) == runs


def test_slices_cover_every_row_once_and_know_their_positions(tmp_path):
    table = pa.table({"x": list(range(50_000))})
    write_parquet(tmp_path / "a.parquet", table, row_group_size=30_000)
    source = scan_source(str(tmp_path))
    assert rows_of(source) == list(range(50_000))
    assert [part.first_row for part in source.slices] == [0, 30_000]


def test_small_row_groups_share_a_slice(tmp_path):
    table = pa.table({"x": list(range(20_000))})
    write_parquet(tmp_path / "a.parquet", table, row_group_size=1000)
    source = scan_source(str(tmp_path))
    assert [(part.first_row, part.num_rows) for part in source.slices] == [
        (0, 16_000),
        (16_000, 4000),
    ]
    assert rows_of(source) == list(range(20_000))


def test_row_group_is_read_in_small_tables(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": list(range(5000))}))
    (part,) = scan_source(str(tmp_path)).slices
    assert [table.num_rows for table in read_slice(part)] == [1024] * 4 + [904]


def test_parquet_file_without_rows_is_no_slice(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": pa.array([], pa.int64())}))
    write_parquet(tmp_path / "b.parquet", pa.table({"x": [1]}))
    assert [part.name for part in scan_source(str(tmp_path)).slices] == ["b.parquet"]


def test_rows_know_their_file_and_position_however_they_are_sliced(tmp_path):
    for name, row_group_size in (("a", 70), ("b", 30_000), ("c", 50_000)):
        table = pa.table({"x": list(range(40_000))})
        write_parquet(tmp_path / f"{name}.parquet", table, row_group_size=row_group_size)
    source = scan_source(str(tmp_path))
    tables = [t for task in source.tasks() for t in source.read(task, row_id_column="id")]
    ids = [row_id for table in tables for row_id in table.column("id").to_pylist()]
    assert ids == [f"{name}.parquet:{i}" for name in "abc" for i in range(40_000)]


def source_of(*slices: tuple[int, int]) -> Source:
    """Return a source of slices with these numbers of rows and bytes, each in a separate file."""
    parts = tuple(
        FileSlice(
            path=f"{i}.parquet",
            name=f"{i}.parquet",
            row_groups=range(1),
            first_row=0,
            num_rows=num_rows,
            num_bytes=num_bytes,
        )
        for i, (num_rows, num_bytes) in enumerate(slices)
    )
    return Source(schema=pa.schema([]), slices=parts, num_rows=sum(p.num_rows for p in parts))


def test_small_files_share_a_task():
    assert [len(task) for task in source_of(*[(10, 100)] * 150).tasks()] == [64, 64, 22]


def test_files_that_are_large_in_rows_or_bytes_have_tasks_of_their_own():
    source = source_of((20_000, 1), (20_000, 1), (1, 100 << 20), (1, 100 << 20))
    assert [len(task) for task in source.tasks()] == [1, 1, 1, 1]


def test_tasks_stay_few_however_large_the_source_is():
    num_tasks = len(source_of(*[(1 << 20, 1 << 30)] * 50_000).tasks())
    assert 1000 <= num_tasks <= 2048


def test_tasks_cover_every_slice_once():
    tasks = source_of(*[(i * 997 % 30_000, i) for i in range(1000)]).tasks()
    assert [index for task in tasks for index in task] == list(range(1000))


@pytest.fixture
def opened(monkeypatch):
    """The paths that are opened, in order."""
    paths = []
    really_open = fsspec.open

    def noting_open(path, *args, **options):
        paths.append(path.rpartition("/")[2])
        return really_open(path, *args, **options)

    monkeypatch.setattr(fsspec, "open", noting_open)
    return paths


def test_ids_are_read_from_a_file_that_is_opened_once(tmp_path, opened):
    table = pa.table({"x": list(range(60_000))})
    write_parquet(tmp_path / "a.parquet", table, row_group_size=20_000)
    source = scan_source(str(tmp_path))
    assert len(source.slices) == 3
    opened.clear()
    check_unique_ids(source, "x")
    assert opened == ["a.parquet"]


def test_task_with_many_slices_of_a_file_opens_it_once(tmp_path, opened):
    table = pa.table({"x": list(range(60_000))})
    write_parquet(tmp_path / "a.parquet", table, row_group_size=20_000)
    source = scan_source(str(tmp_path))
    opened.clear()
    assert sum(table.num_rows for table in source.read(range(3))) == 60_000
    assert opened == ["a.parquet"]


def test_task_opens_a_large_file_when_it_gets_there(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(file_slices, "_AHEAD_BYTES", 10_000)
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", pa.table({"x": list(range(3000))}))
    source = scan_source(str(tmp_path))
    (task,) = source.tasks()
    opened.clear()
    next(source.read(task))
    assert opened == ["a.parquet"]


def write_all_kinds(folder, num_rows):
    """Write files of all kinds with rows in several row groups, batches or blocks; return names."""
    for number, suffix in enumerate(["csv", "ipc", "jsonl", "jsonl.gz", "parquet", "stream.arrow"]):
        rows = [f"{suffix} {row}" for row in range(num_rows)]
        table = pa.table({"x": rows})
        path = folder / f"{number}.{suffix.replace('ipc', 'arrow')}"
        folder.mkdir(exist_ok=True)
        if suffix == "parquet":
            pq.write_table(table, path, row_group_size=7)
        elif "jsonl" in suffix:
            text = "".join(json.dumps({"x": one}) + "\n" for one in rows).encode()
            path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
        elif suffix == "csv":
            path.write_text("x\n" + "".join(f"{one}\n" for one in rows))
        else:
            new = pa.ipc.new_file if suffix == "ipc" else pa.ipc.new_stream
            with new(path, table.schema) as out:
                out.write_table(table, max_chunksize=9)


def rows_with_ids(source):
    tables = [table for task in source.tasks() for table in source.read(task, row_id_column="id")]
    return pa.concat_tables(tables).to_pylist() if tables else []


@pytest.mark.parametrize("limit", [1, 20, 1 << 14])
def test_portions_of_files_have_all_rows_once_with_their_ids(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(file_slices, "_SLICE_LIMIT", Size(limit, 1 << 20, 1 << 10))
    monkeypatch.setattr(file_slices, "ROWS_PER_TABLE", 5)
    write_all_kinds(tmp_path / "in", 40)
    source = scan_source(str(tmp_path / "in"))
    whole, names = rows_with_ids(source), sorted({part.name for part in source.slices})
    assert len(names) == 6
    random = np.random.default_rng(limit)
    for _ in range(20):
        cuts = {name: [0, *sorted(random.integers(0, 41, 2).tolist()), 40] for name in names}
        parts = [
            source.within({name: range(found[i], found[i + 1]) for name, found in cuts.items()})
            for i in range(3)
        ]
        read = [rows_with_ids(part) for part in parts]
        assert [part.num_rows for part in parts] == [len(rows) for rows in read]
        for name in names:
            of_file = [row for rows in read for row in rows if row["id"].startswith(f"{name}:")]
            assert [row for row in whole if row["id"].startswith(f"{name}:")] == of_file


def test_a_file_that_has_changed_is_refused_by_the_portion_with_its_end(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": list(range(40))}))
    source = scan_source(str(tmp_path))
    write_parquet(tmp_path / "a.parquet", pa.table({"x": list(range(41))}))
    assert len(rows_with_ids(source.within({"a.parquet": range(10)}))) == 10
    with pytest.raises(ConfigError, match="changed while it was read"):
        rows_with_ids(source.within({"a.parquet": range(10, 40)}))
