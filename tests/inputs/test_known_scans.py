"""Scans that a job keeps: no file is read twice, and a file that was replaced is read again."""

import json
import os
from dataclasses import replace

import fsspec
import pyarrow as pa
import pytest

from raybatch.durable.storage import store_of
from raybatch.errors import ConfigError
from raybatch.inputs import source
from raybatch.inputs import source as module
from raybatch.inputs.source import KnownScans, scan_source
from tests.s3 import bucket, s3_endpoint
from tests.stages.support import write_parquet

__all__ = ["bucket", "s3_endpoint"]

ROWS = pa.table({"id": ["a", "b", "c"], "n": [1, 2, 3]})


@pytest.fixture
def folder(tmp_path):
    """Files of each kind, some in a partition folder."""
    place = tmp_path / "in"
    write_parquet(place / "lang=en" / "a.parquet", ROWS)
    (place / "b.jsonl").write_text('{"id": "d", "n": 4}\n{"id": "e", "n": 5}\n')
    (place / "c.csv").write_text("id,n\nf,6\n")
    with pa.OSFile(str(place / "d.arrow"), "wb") as file, pa.ipc.new_file(file, ROWS.schema) as out:
        out.write_table(ROWS)
    return place


@pytest.fixture
def scanned(monkeypatch):
    """The names of files that were scanned, in order."""
    names, scan = [], module.scan_file

    def noted(file, **options):
        names.append(file.name)
        return scan(file, **options)

    monkeypatch.setattr(module, "scan_file", noted)
    return names


def scan(place, sink, *options):
    known = KnownScans(str(place), *options)
    known.load(store_of(str(sink)))
    source = scan_source(str(place), schema_policy="cast", known=known)
    known.save(store_of(str(sink)))
    return source


def rows_of(source):
    return [row for task in source.tasks() for t in source.read(task) for row in t.to_pylist()]


def test_a_second_scan_reads_no_file_and_tells_the_same(folder, tmp_path, scanned):
    first = scan(folder, tmp_path / "out")
    assert sorted(scanned) == ["b.jsonl", "c.csv", "d.arrow", "lang=en/a.parquet"]
    again = scan(folder, tmp_path / "out")
    assert len(scanned) == 4
    assert first == again
    assert rows_of(first) == rows_of(again)


def test_a_scan_that_keeps_nothing_asks_for_no_version(folder, monkeypatch):
    monkeypatch.setattr(source, "_version_of", lambda _: pytest.fail("a version is read"))
    assert scan_source(str(folder), schema_policy="cast").num_rows == 9


def test_only_files_that_were_replaced_or_added_are_scanned_again(folder, tmp_path, scanned):
    scan(folder, tmp_path / "out")
    scanned.clear()
    (folder / "b.jsonl").write_text('{"id": "x", "n": 4}\n{"id": "y", "n": 5}\n')
    os.utime(folder / "b.jsonl", ns=(1, 1))
    (folder / "e.csv").write_text("id,n\ng,7\n")
    source = scan(folder, tmp_path / "out")
    assert sorted(scanned) == ["b.jsonl", "e.csv"]
    fresh = scan_source(str(folder), schema_policy="cast")
    assert source == fresh
    scanned.clear()
    (folder / "e.csv").unlink()
    assert scan(folder, tmp_path / "out").num_rows == fresh.num_rows - 1
    assert scanned == []


def test_other_options_and_damaged_records_scan_everything(folder, tmp_path, scanned):
    first = scan(folder, tmp_path / "out")
    record = tmp_path / "out" / "_raybatch" / "scan.json"
    kept = json.loads(record.read_text())
    damages = ["", "[]", "{", json.dumps({**kept, "schemas": []}), json.dumps({**kept, "files": 3})]
    for damage in damages:
        scanned.clear()
        record.write_text(damage)
        assert scan(folder, tmp_path / "out") == first
        assert len(scanned) == 4
    scanned.clear()
    scan(folder, tmp_path / "out", "other")
    assert len(scanned) == 4


def test_a_file_that_changes_behind_its_record_is_an_error_when_it_is_read(folder, tmp_path):
    stat = os.stat(folder / "c.csv")
    source = scan(folder, tmp_path / "out")
    (folder / "c.csv").write_text("id,n\n,\n\n")
    os.utime(folder / "c.csv", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    slices = tuple(part for part in source.slices if part.name == "c.csv")
    slices = tuple(replace(part, num_rows=2) for part in slices)
    with pytest.raises(ConfigError, match="changed while it was read"):
        rows_of(replace(source, slices=slices, num_rows=2))


def test_objects_of_a_bucket_are_known_by_their_tags(bucket, tmp_path, scanned):
    place = f"s3://{bucket}/in"
    fs = fsspec.filesystem("s3")
    for name in ("a", "b"):
        fs.pipe_file(f"{place}/{name}.csv", b"id,n\nf,6\n")
    first = scan(place, tmp_path / "out")
    assert scan(place, tmp_path / "out") == first
    assert scanned == ["a.csv", "b.csv"]
    fs.pipe_file(f"{place}/b.csv", b"id,n\ng,7\n")
    scan(place, tmp_path / "out")
    assert scanned == ["a.csv", "b.csv", "b.csv"]


def test_checks_of_rows_are_noted_for_these_files_alone(folder, tmp_path):
    store = store_of(str(tmp_path / "out"))

    def loaded():
        known = KnownScans(str(folder))
        known.load(store)
        scan_source(str(folder), schema_policy="cast", known=known)
        return known

    known = loaded()
    assert not known.is_checked("id", ())
    known.note_checked("id", ())
    known.save(store)
    assert loaded().is_checked("id", ())
    assert not loaded().is_checked("n", ())
    (folder / "e.csv").write_text("id,n\ng,7\n")
    assert not loaded().is_checked("id", ())
