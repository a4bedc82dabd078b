"""Which files a source has, whatever they are called and however they are linked."""

import os
import re

import fsspec
import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.listing import list_files
from raybatch.inputs.source import check_outside, scan_source
from tests.stages.support import rows_of, write_parquet

NAMES = [
    "with space.parquet",
    "percent%20%41.parquet",
    "hash#1.parquet",
    "question?.parquet",
    "star*[1]{2}.parquet",
    "umlaut-äöü-日本語-🙂.parquet",
    "quote'\"`$(x);&|.parquet",
    "plus+=@:,.parquet",
    "l" * 240 + ".parquet",
]


def names_of(source):
    return [file.name for file in list_files(str(source))]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:12])
def test_file_of_any_printable_name_is_read_and_gives_its_ids(tmp_path, name):
    write_parquet(tmp_path / "in" / name, pa.table({"x": [1, 2]}))
    for source in (tmp_path / "in", tmp_path / "in" / name):
        (table,) = scan_source(str(source)).read(range(1), row_id_column="id")
        assert table.column("id").to_pylist() == [f"{name}:0", f"{name}:1"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\nb.parquet", r"a\nb.parquet"),
        ("a\x1b[31m\x07.parquet", r"a\x1b[31m\x07.parquet"),
        ("a\\nb.parquet", r"a\\nb.parquet"),
        ("a\u202eb\u2028.parquet", r"a\u202eb\u2028.parquet"),
        (os.fsdecode(b"a\xff.parquet"), r"a\udcff.parquet"),
    ],
)
def test_row_ids_are_printable_whatever_the_file_is_called(tmp_path, name, shown):
    write_parquet(tmp_path / "whole.parquet", pa.table({"x": [1]}))
    os.rename(tmp_path / "whole.parquet", os.path.join(tmp_path, name))
    (table,) = scan_source(str(tmp_path)).read(range(1), row_id_column="id")
    assert table.column("id").to_pylist() == [f"{shown}:0"]


def test_two_names_never_have_one_text():
    names = ["a\nb", "a\\nb", "a\\\nb", "a\\\\nb", "a\x0ab\\", "\\", "\n", "\\n"]
    names = sorted(set(names))
    assert len({safe_text(name) for name in names}) == len(names)


def test_message_about_a_file_is_one_line_whatever_it_is_called(tmp_path):
    (tmp_path / "a\nINFO all is well.parquet").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        scan_source(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_path_with_a_mark_of_chained_protocols_is_refused(tmp_path):
    write_parquet(tmp_path / "a::b.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match=r"a::b\.parquet has '::' in its path.*rename it"):
        scan_source(str(tmp_path))


def test_a_source_whose_own_path_is_a_chain_is_refused(tmp_path):
    write_parquet(tmp_path / "a::b" / "c.parquet", pa.table({"x": [1]}))
    with pytest.raises(ConfigError, match=r"a::b has '::' in its path.*rename it"):
        list_files(str(tmp_path / "a::b"))


def test_folder_that_looks_like_a_pattern_is_itself(tmp_path):
    write_parquet(tmp_path / "data[1]" / "a.parquet", pa.table({"x": [1]}))
    write_parquet(tmp_path / "data1" / "b.parquet", pa.table({"x": [2]}))
    assert rows_of(scan_source(str(tmp_path / "data[1]"))) == [1]
    assert rows_of(scan_source(str(tmp_path / "data[1-2]"))) == [2]


def test_links_in_a_circle_are_not_followed(tmp_path, caplog):
    write_parquet(tmp_path / "in" / "sub" / "a.parquet", pa.table({"x": [1]}))
    (tmp_path / "in" / "sub" / "up").symlink_to("..")
    (tmp_path / "in" / "self").symlink_to(".")
    for source in (tmp_path / "in", tmp_path / "in" / "**"):
        assert names_of(source) == ["sub/a.parquet"]
    assert "leads back to a folder above it" in caplog.text


def test_links_to_files_and_folders_elsewhere_are_followed(tmp_path):
    write_parquet(tmp_path / "far" / "a.parquet", pa.table({"x": [1]}))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "far")
    (tmp_path / "in" / "b.parquet").symlink_to(tmp_path / "far" / "a.parquet")
    assert names_of(tmp_path / "in") == ["b.parquet", "folder/a.parquet"]


def test_link_without_a_target_is_an_error_that_names_it(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    (tmp_path / "b.parquet").symlink_to("nothing")
    with pytest.raises(ConfigError, match=r"b\.parquet cannot be opened: FileNotFoundError"):
        scan_source(str(tmp_path), skip_bad_files=True)


def test_pipes_are_not_waited_for(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    os.mkfifo(tmp_path / "b.parquet")
    assert names_of(tmp_path) == ["a.parquet"]


def test_folders_that_a_glob_matches_are_searched_through(tmp_path):
    for name in ("a.parquet/part-0.parquet", "b.parquet", "c/d/e.parquet", "_f.parquet/x.parquet"):
        write_parquet(tmp_path / name, pa.table({"x": [1]}))
    assert names_of(tmp_path / "*.parquet") == ["a.parquet/part-0.parquet", "b.parquet"]
    assert names_of(tmp_path / "**/*.parquet") == [
        "a.parquet/part-0.parquet",
        "b.parquet",
        "c/d/e.parquet",
    ]
    assert names_of(tmp_path / "c*") == ["c/d/e.parquet"]


def test_sink_below_a_folder_that_the_glob_matches_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is inside the source"):
        check_outside(str(tmp_path / "runs-2" / "out"), str(tmp_path / "runs-*"))


@pytest.mark.parametrize("pattern", ["", "*", "**", "**/*.parquet", "[s]ub", "sub/?.parquet"])
def test_other_file_systems_have_folders_and_globs_too(tmp_path, pattern):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1]}))
    root = f"memory://{tmp_path.name}"
    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"/{tmp_path.name}/sub/a.parquet", (tmp_path / "a.parquet").read_bytes())
    try:
        assert rows_of(scan_source(f"{root}/{pattern}".rstrip("/"))) == [1]
    finally:
        fs.rm(f"/{tmp_path.name}", recursive=True)


def test_protocol_of_local_files_may_be_named(tmp_path):
    write_parquet(tmp_path / "a b.parquet", pa.table({"x": [1]}))
    assert rows_of(scan_source(f"file://{tmp_path}")) == [1]
    assert rows_of(scan_source(f"file://{tmp_path}/*")) == [1]


def test_folder_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    write_parquet(tmp_path / "sub" / "a.parquet", pa.table({"x": [1]}))
    scandir = os.scandir

    def denying(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denying)
    with pytest.raises(ConfigError, match="cannot be listed: PermissionError"):
        scan_source(str(tmp_path))


def test_source_without_files_names_the_endings(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("ends in .parquet, .pq, .jsonl")):
        scan_source(str(tmp_path))


def test_a_name_that_was_read_as_a_pattern_is_said_to_be_one(tmp_path):
    with pytest.raises(ConfigError, match="read as a pattern, since no such file"):
        scan_source(str(tmp_path / "data[1]"))
    with pytest.raises(ConfigError, match=r"(?<!exists\)) has no file") as caught:
        scan_source(str(tmp_path))
    assert "pattern" not in str(caught.value)
