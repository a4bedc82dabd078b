"""Files on a store that takes its time: several are opened at once, and nothing else changes."""

import threading

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import file_slices
from raybatch.inputs.source import scan_source

NUM_FILES = 40
# the first reader waits this long for a second one
WAIT_S = 0.1


class Crowd:
    """Counts who has a file open, and makes the first wait for a second one."""

    def __init__(self) -> None:
        self.lock, self.is_two = threading.Lock(), threading.Event()
        self.num_open = self.most = 0

    def __enter__(self) -> None:
        with self.lock:
            self.num_open += 1
            self.most = max(self.most, self.num_open)
        if self.num_open > 1:
            self.is_two.set()
        self.is_two.wait(WAIT_S)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.num_open -= 1


CROWD = Crowd()


class CrowdedFileSystem(fsspec.get_filesystem_class("memory")):
    """Files of memory that count who opens them, `crowded://`."""

    protocol = "crowded"
    store: dict = {}  # noqa: RUF012 - as that of its parent
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("crowded://", "memory://"))

    def _open(self, path, mode="rb", **kwargs):
        if mode == "rb":
            with CROWD:
                pass
        return super()._open(path, mode, **kwargs)


fsspec.register_implementation("crowded", CrowdedFileSystem, clobber=True)


@pytest.fixture
def source(monkeypatch) -> str:
    files = fsspec.filesystem("crowded")
    files.store.clear()
    for index in range(NUM_FILES):
        with files.open(f"/in/{index:03}.parquet", "wb") as file:
            pq.write_table(pa.table({"text": [str(index)] * (index + 1)}), file)
    CROWD.most = 0
    CROWD.is_two.clear()
    return "crowded://in"


def test_footers_are_read_several_at_once_and_rows_keep_their_order(source):
    scanned = scan_source(source)
    assert 1 < CROWD.most <= 16
    assert [f"{index:03}.parquet" for index in range(NUM_FILES)] == [
        part.name for part in scanned.slices
    ]
    assert list(range(1, NUM_FILES + 1)) == [part.num_rows for part in scanned.slices]


def test_rows_of_small_files_are_read_several_at_once_in_their_order(source):
    scanned = scan_source(source)
    CROWD.most = 0
    CROWD.is_two.clear()
    tables = scanned.read(range(NUM_FILES), row_id_column="row_id")
    found = pa.concat_tables(tables)
    assert 1 < CROWD.most <= 8
    rows = [(f"{n:03}.parquet:{i}", str(n)) for n in range(NUM_FILES) for i in range(n + 1)]
    assert rows == list(zip(*found.to_pydict().values(), strict=True))


def test_a_file_that_was_lost_is_told_behind_the_rows_before_it(source):
    scanned = scan_source(source)
    fsspec.filesystem("crowded").rm("/in/017.parquet")
    tables = scanned.read(range(NUM_FILES))
    assert [n + 1 for n in range(17)] == [next(tables).num_rows for _ in range(17)]
    with pytest.raises(ConfigError, match=r"017\.parquet can no longer be read"):
        next(tables)


def test_a_large_file_is_not_held_in_memory(source, monkeypatch):
    monkeypatch.setattr(file_slices, "_AHEAD_BYTES", 0)
    scanned = scan_source(source)
    CROWD.most = 0
    assert NUM_FILES == sum(1 for _ in scanned.read(range(NUM_FILES)))
    assert CROWD.most == 1


def test_the_first_broken_file_is_the_one_that_is_named(source):
    files = fsspec.filesystem("crowded")
    for index in (31, 17):
        files.pipe_file(f"/in/{index:03}.parquet", b"PAR1 and no footer")
    with pytest.raises(ConfigError, match=r"017\.parquet"):
        scan_source(source)
    scanned = scan_source(source, skip_bad_files=True)
    assert ["017.parquet", "031.parquet"] == [file.name for file in scanned.skipped]
    assert NUM_FILES - 2 == len(scanned.slices)
