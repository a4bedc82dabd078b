"""Files that are cut, empty or of another kind, and row groups that would fill the memory."""

import errno
import logging
import subprocess
import sys

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import file_errors, file_slices
from raybatch.inputs.source import SkippedFile, scan_source
from tests.stages.support import rows_of, write_ipc, write_parquet

GOOD = pa.table({"x": [1, 2, 3]})


@pytest.fixture
def parquet(tmp_path):
    """The bytes of a good file."""
    pq.write_table(GOOD, tmp_path / "good.bin")
    return (tmp_path / "good.bin").read_bytes()


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "in" / "good.parquet", GOOD)
    return tmp_path / "in"


def refusal(folder, **options):
    with pytest.raises(ConfigError) as caught:
        scan_source(str(folder), **options)
    return str(caught.value)


BAD = {
    "empty": (lambda good: b"", "it is empty (0 bytes)"),
    "cut at the end": (lambda good: good[:-1], "does not end like a Parquet file"),
    "cut in the middle": (lambda good: good[: len(good) // 2], "does not end like a Parquet file"),
    "text": (lambda good: b"hello, world", "does not end like a Parquet file"),
    "short": (lambda good: b"PAR1", "does not end like a Parquet file"),
    "encrypted": (lambda good: good[:-4] + b"PARE", "its footer is encrypted"),
    "footer longer than the file": (
        lambda good: good[:-8] + b"\xff\xff\xff\x7fPAR1",
        "does not end like a Parquet file",
    ),
    "footer of noise": (lambda good: good[:-200] + b"\xee" * 192 + good[-8:], "cannot be read"),
    "beginning is missing": (lambda good: good[-8:], "does not end like a Parquet file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_file_is_refused_with_name_reason_and_way_out(folder, parquet, kind):
    spoil, reason = BAD[kind]
    (folder / "bad.parquet").write_bytes(spoil(parquet))
    message = refusal(folder)
    assert "/in/bad.parquet cannot be read; rewrite it, leave it out, or set" in message
    assert "skip_bad_files: " in message
    assert reason in message


@pytest.mark.parametrize("kind", BAD)
def test_bad_file_is_left_out_where_the_user_says_so(folder, parquet, kind, caplog):
    spoil, reason = BAD[kind]
    (folder / "bad.parquet").write_bytes(spoil(parquet))
    with caplog.at_level(logging.WARNING):
        source = scan_source(str(folder), skip_bad_files=True)
    assert rows_of(source) == [1, 2, 3]
    (skipped,) = source.skipped
    assert skipped.name == "bad.parquet"
    assert reason in skipped.reason or reason == "cannot be read"
    assert len(caplog.records) == 1
    assert "skipped" in caplog.text


def test_bad_files_of_every_kind_are_left_out_in_their_order(folder):
    (folder / "c.jsonl").write_text('{"x": 1}\n{"x": secret\n')
    (folder / "a.arrow").write_bytes(b"no arrow")
    write_ipc(folder / "b.arrow", GOOD, "stream")
    (folder / "b.arrow").write_bytes((folder / "b.arrow").read_bytes()[:-30])
    source = scan_source(str(folder), skip_bad_files=True)
    assert [skipped.name for skipped in source.skipped] == ["a.arrow", "b.arrow", "c.jsonl"]
    assert source.skipped[2] == SkippedFile(
        "c.jsonl",
        "line 2: not a complete JSON object, which every line must be; fix or remove the line",
    )
    assert rows_of(source) == [1, 2, 3]


def test_good_source_has_left_out_nothing(folder):
    assert scan_source(str(folder), skip_bad_files=True).skipped == ()


def test_source_of_bad_files_alone_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    message = refusal(tmp_path, skip_bad_files=True)
    assert "has no readable file: a.parquet: it is empty (0 bytes)" in message


def test_file_that_cannot_be_opened_is_never_left_out(folder, monkeypatch):
    """A network that is down for a moment must not cost rows."""
    (folder / "other.parquet").symlink_to("nowhere.parquet")
    assert "other.parquet cannot be opened" in refusal(folder, skip_bad_files=True)


def test_file_whose_reading_fails_is_never_left_out(folder, monkeypatch):
    write_parquet(folder / "good.parquet", pa.table({"x": ["some text"] * 1000}))
    open_file = fsspec.open

    def failing_open(path, mode):
        opened = open_file(path, mode).open()
        read = opened.read

        def read_no_pages(size=-1):
            if opened.tell() < 100:
                raise TimeoutError(errno.ETIMEDOUT, "the network is down")
            return read(size)

        opened.read = read_no_pages
        return opened

    monkeypatch.setattr(fsspec, "open", failing_open)
    message = refusal(folder, skip_bad_files=True)
    assert "good.parquet cannot be opened: TimeoutError" in message


def test_pages_that_do_not_decode_are_found_where_rows_are_sampled(folder):
    texts = pa.table({"x": ["some text"] * 1000})
    path = folder / "good.parquet"
    write_parquet(path, texts)
    data = bytearray(path.read_bytes())
    data[4:40] = b"\xee" * 36
    (folder / "bad.parquet").write_bytes(bytes(data))
    assert "bad.parquet cannot be read" in refusal(folder)
    source = scan_source(str(folder), skip_bad_files=True)
    assert [skipped.name for skipped in source.skipped] == ["bad.parquet"]
    assert source.num_rows == 1000


def test_pages_that_do_not_decode_end_a_run_with_the_name_of_the_file(folder):
    path = folder / "good.parquet"
    source = scan_source(str(folder))
    data = bytearray(path.read_bytes())
    data[4:30] = b"\xee" * 26
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=r"good\.parquet can no longer be read"):
        rows_of(source)


def test_file_that_changes_after_it_was_scanned_is_refused(folder):
    source = scan_source(str(folder))
    write_parquet(folder / "good.parquet", pa.table({"x": [1, 2]}))
    with pytest.raises(ConfigError, match="changed while it was read: it has 2 rows and had 3"):
        rows_of(source)


def test_file_that_gets_a_dangerous_type_after_it_was_scanned_is_refused(folder):
    source = scan_source(str(folder))
    metadata = {"ARROW:extension:name": "some.type"}
    schema = pa.schema([pa.field("x", pa.int64(), metadata=metadata)])
    write_parquet(folder / "good.parquet", GOOD.cast(schema))
    with pytest.raises(ConfigError, match=r"extension type 'some\.type'"):
        rows_of(source)


def test_row_group_over_the_limit_is_refused_with_file_and_number(tmp_path):
    texts = [f"{i}" * 500 for i in range(300)]
    write_parquet(
        tmp_path / "a.parquet", pa.table({"x": texts, "n": range(300)}), row_group_size=100
    )
    message = refusal(tmp_path, max_row_group_bytes=120_000)
    assert "a.parquet: row group 1 needs 1" in message
    for way_out in ("smaller row groups", "(columns)", "raise max_row_group_bytes"):
        assert way_out in message


def test_columns_that_are_not_chosen_may_be_over_the_limit(tmp_path):
    texts = [f"{i}" * 500 for i in range(300)]
    write_parquet(tmp_path / "a.parquet", pa.table({"x": range(300), "text": texts}))
    source = scan_source(str(tmp_path), columns=["x"], max_row_group_bytes=20_000)
    assert rows_of(source) == list(range(300))


def test_row_group_over_the_limit_is_not_left_out(tmp_path):
    """It is whole, so leaving it out would lose rows that can be read."""
    write_parquet(tmp_path / "a.parquet", pa.table({"x": ["y" * 1000] * 300}))
    assert "row group 0" in refusal(tmp_path, max_row_group_bytes=100, skip_bad_files=True)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_piece_that_grows_out_of_next_to_nothing_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(file_errors, "HARMLESS_BYTES", 1 << 20)
    monkeypatch.setattr("raybatch.inputs.parquet_files.HARMLESS_BYTES", 1 << 20)
    monkeypatch.setattr(file_errors, "_MAX_RATIO", 1000)
    table = pa.table({"x": pa.array(["y" * (4 << 20)])})
    if kind == "parquet":
        options = {"compression": "zstd", "use_dictionary": False}
        write_parquet(tmp_path / "a.parquet", table, write_statistics=False, **options)
    else:
        write_ipc(tmp_path / "a.arrow", table, kind, compression="zstd")
    assert "would grow from" in refusal(tmp_path)


def test_texts_that_repeat_a_document_do_not_look_like_an_attack(tmp_path):
    document = "".join(chr(97 + i * 7919 % 26) for i in range(4000))
    table = pa.table({"x": [document] * 20_000})
    write_parquet(
        tmp_path / "a.parquet", table, compression="zstd", use_dictionary=False, version="2.6"
    )
    footer = pq.read_metadata(tmp_path / "a.parquet").row_group(0)
    assert footer.total_byte_size > file_errors.HARMLESS_BYTES
    assert scan_source(str(tmp_path)).num_rows == 20_000


def test_texts_over_the_range_of_an_offset_are_read_in_tables_below_it(tmp_path, monkeypatch):
    """As if an array held 200 kB at most, and a row group has 2 MB of text."""
    monkeypatch.setattr(file_slices, "_TABLE_BYTES", 100_000)
    table = pa.table({"x": [f"{i}".zfill(2000) for i in range(1000)]})
    write_parquet(tmp_path / "a.parquet", table)
    tables = list(scan_source(str(tmp_path)).read(range(1)))
    assert max(table.nbytes for table in tables) < 200_000
    assert pa.concat_tables(tables).equals(table)


_SPOIL_EACH_BYTE = """
import sys
from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source

path = sys.argv[1]
data = bytearray(open(path, "rb").read())
size = int.from_bytes(data[-8:-4], "little")
for place in range(len(data) - 8 - size, len(data) - 8):
    kept, data[place] = data[place], 0x7F
    open(path, "wb").write(data)
    try:
        scan_source(path, columns=["x"])
    except ConfigError:
        print(place)
    data[place] = kept
"""


def test_no_byte_of_a_footer_ends_the_process(tmp_path):
    """Looking at a column of some broken row groups calls std::terminate (pyarrow 26)."""
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [["a"], ["b"]]}))
    command = [sys.executable, "-c", _SPOIL_EACH_BYTE, str(tmp_path / "a.parquet")]
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert len(ended.stdout.splitlines()) > 50
