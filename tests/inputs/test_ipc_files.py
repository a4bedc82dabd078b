"""Arrow IPC files and streams as sources."""

import struct

import fsspec
import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import file_slices
from raybatch.inputs.source import scan_source
from tests.stages.support import IPC_WRITERS, rows_of, write_ipc


@pytest.fixture(params=IPC_WRITERS)
def kind(request):
    return request.param


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("suffix", ["arrow", "feather", "ipc"])
def test_rows_come_out_in_order(tmp_path, kind, suffix, compression):
    table = pa.table({"x": list(range(5000)), "y": [f"text {i}" for i in range(5000)]})
    path = tmp_path / f"a.{suffix}"
    write_ipc(path, table, kind, batch_rows=700, compression=compression)
    source = scan_source(str(tmp_path))
    assert rows_of(source) == list(range(5000))
    assert source.schema == table.schema


def test_batches_are_read_in_small_tables(tmp_path, kind):
    write_ipc(tmp_path / "a.arrow", pa.table({"x": list(range(2500))}), kind)
    source = scan_source(str(tmp_path))
    assert [table.num_rows for table in source.read(range(1))] == [1024, 1024, 452]


def test_every_slice_can_be_read_alone_and_knows_its_positions(tmp_path, kind):
    table = pa.table({"x": list(range(50_000)), "y": ["text"] * 50_000})
    write_ipc(tmp_path / "a.arrow", table, kind, batch_rows=9000)
    source = scan_source(str(tmp_path))
    assert [part.first_row for part in source.slices] == [0, 9000, 18_000, 27_000, 36_000]
    for index, part in enumerate(source.slices):
        tables = list(source.read(range(index, index + 1), row_id_column="id"))
        rows = pa.concat_tables(tables)
        expected = list(range(part.first_row, part.first_row + part.num_rows))
        assert rows.column("x").to_pylist() == expected
        assert rows.column("id").to_pylist() == [f"a.arrow:{i}" for i in expected]


def test_stream_whose_dictionaries_change_is_one_slice(tmp_path):
    path = tmp_path / "a.arrow"
    schema = pa.schema([("x", pa.dictionary(pa.int32(), pa.string()))])
    expected = []
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as out:
        for start in range(0, 40_000, 10_000):
            texts = [f"t{i % 7 + start}" for i in range(10_000)]
            expected += texts
            out.write_batch(pa.record_batch([pa.array(texts).dictionary_encode()], schema))
    source = scan_source(str(tmp_path))
    assert len(source.slices) == 1
    assert rows_of(source) == expected


def test_file_with_dictionaries_is_cut_into_slices(tmp_path):
    texts = [f"t{i % 7}" for i in range(40_000)]
    table = pa.table({"x": pa.array(texts).dictionary_encode()})
    write_ipc(tmp_path / "a.arrow", table, batch_rows=10_000)
    source = scan_source(str(tmp_path))
    assert len(source.slices) == 4
    assert rows_of(source) == texts


def test_memory_of_compressed_batches_is_known_before_they_are_read(tmp_path, kind):
    table = pa.table({"x": ["y" * 1000] * 2000})
    path = write_ipc(tmp_path / "a.arrow", table, kind, compression="zstd")
    assert path.stat().st_size < table.nbytes / 50
    (part,) = scan_source(str(tmp_path)).slices
    assert part.num_bytes == pytest.approx(table.nbytes, rel=0.01)


def test_columns_that_are_not_chosen_are_not_read_from_a_file(tmp_path, monkeypatch):
    table = pa.table({"x": list(range(1000)), "wide": ["y" * 2000] * 1000})
    write_ipc(tmp_path / "a.arrow", table)
    source = scan_source(str(tmp_path), columns=["x"])
    num_bytes = 0
    open_file = fsspec.open

    def counting_open(path, mode):
        opened = open_file(path, mode)
        file = opened.open()
        read = file.f.read

        def counting_read(size=-1):
            nonlocal num_bytes
            data = read(size)
            num_bytes += len(data)
            return data

        file.f = Reader(file.f, counting_read)
        return file

    monkeypatch.setattr(fsspec, "open", counting_open)
    assert rows_of(source) == list(range(1000))
    assert 8000 < num_bytes < 20_000


class Reader:
    def __init__(self, file, read):
        self._file, self.read = file, read

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_files_without_rows_or_columns_are_read(tmp_path, kind):
    write_ipc(tmp_path / "a.arrow", pa.table({"x": pa.array([], pa.int64())}), kind)
    assert scan_source(str(tmp_path)).num_rows == 0


def refusal(tmp_path, **options):
    with pytest.raises(ConfigError) as caught:
        scan_source(str(tmp_path), **options)
    return str(caught.value)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.6, 0.999])
def test_cut_file_is_refused_wherever_it_is_cut(tmp_path, kind, share):
    table = pa.table({"x": list(range(3000)), "y": ["text"] * 3000})
    path = write_ipc(tmp_path / "a.arrow", table, kind, batch_rows=1000)
    data = path.read_bytes()
    path.write_bytes(data[: max(1, int(len(data) * share))])
    assert "a.arrow cannot be read" in refusal(tmp_path)


def test_stream_that_was_never_ended_is_cut(tmp_path):
    path = write_ipc(tmp_path / "a.arrow", pa.table({"x": [1, 2]}), "stream")
    path.write_bytes(path.read_bytes()[:-8])
    assert "no message and no end of a stream" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"FEA1" + b"\0" * 100, "Feather version 1"),
        (b"PAR1 and more", "does not begin like an Arrow IPC file or stream"),
        (b"\xff\xff\xff\xff" + b"\x10\0\0\0" + b"\xee" * 64, "cannot be read"),
        (b"ARROW1\0\0" + b"\xee" * 64 + struct.pack("<i", 32) + b"ARROW1", "cannot be read"),
    ],
    ids=["empty", "feather 1", "parquet", "stream of noise", "file of noise"],
)
def test_file_of_another_kind_is_refused(tmp_path, data, reason):
    (tmp_path / "a.arrow").write_bytes(data)
    assert reason in refusal(tmp_path)


def test_noise_in_headers_is_refused_and_nothing_else(tmp_path, kind, rng):
    """Whatever byte of a header changes, there is a ConfigError or there are rows."""
    table = pa.table({"x": list(range(20)), "y": ["a"] * 20})
    path = write_ipc(tmp_path / "a.arrow", table, kind, compression="lz4")
    data = path.read_bytes()
    num_refused = 0
    for _ in range(300):
        noisy = bytearray(data)
        noisy[rng.integers(len(data))] = rng.integers(256)
        path.write_bytes(bytes(noisy))
        try:
            rows_of(scan_source(str(tmp_path), columns=["x"]))
        except ConfigError:
            num_refused += 1
    assert 20 < num_refused < 300


def test_offsets_that_lead_out_of_a_buffer_are_never_followed(tmp_path, kind):
    offsets = pa.py_buffer(struct.pack("<4i", 0, 1 << 29, 2, 3))
    texts = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"abc")])
    write_ipc(tmp_path / "a.arrow", pa.table({"x": texts}), kind)
    source = scan_source(str(tmp_path))
    with pytest.raises(ConfigError, match=r"a\.arrow cannot be read.*offset"):
        rows_of(source)


@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_no_utf8_is_left_to_its_row(tmp_path, kind, nested):
    texts = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    column = pa.StructArray.from_arrays([texts], ["s"]) if nested else texts
    write_ipc(tmp_path / "a.arrow", pa.table({"x": column}), kind)
    (table,) = scan_source(str(tmp_path)).read(range(1))
    assert table.num_rows == 2


def test_batch_over_the_limit_is_refused_with_its_number(tmp_path, kind):
    table = pa.table({"x": ["y" * 1000] * 2000})
    write_ipc(tmp_path / "a.arrow", table, kind, batch_rows=1000, compression="zstd")
    message = refusal(tmp_path, max_row_group_bytes=500_000)
    assert "a.arrow: record batch 0 needs 1,004," in message
    assert "raise max_row_group_bytes" in message


@pytest.mark.parametrize("length", ["to itself", -(1 << 40), 1 << 40])
def test_body_that_leads_backwards_or_out_is_refused(tmp_path, length):
    table = pa.table({"x": list(range(1000)), "y": list(range(1000))})
    path = write_ipc(tmp_path / "a.arrow", table, "stream")
    data, body = path.read_bytes(), struct.pack("<q", table.nbytes)
    assert data.count(body) == 1
    if length == "to itself":
        start = data.rindex(b"\xff\xff\xff\xff", 0, data.index(body))
        length = -8 - struct.unpack("<i", data[start + 4 : start + 8])[0]
    path.write_bytes(data.replace(body, struct.pack("<q", length)))
    assert "is truncated" in refusal(tmp_path)


def test_row_count_that_no_array_has_is_refused(tmp_path):
    """A column of nulls takes no bytes, however many it claims."""
    path = write_ipc(tmp_path / "a.arrow", pa.table({"x": pa.nulls(77_777)}), "stream")
    data = path.read_bytes()
    count = struct.pack("<q", 77_777)
    assert data.count(count) > 1
    path.write_bytes(data.replace(count, struct.pack("<q", 1 << 60)))
    assert f"claims {1 << 60} rows" in refusal(tmp_path)


def test_tables_stay_small_where_rows_are_large(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(file_slices, "_TABLE_BYTES", 100_000)
    write_ipc(tmp_path / "a.arrow", pa.table({"x": ["y" * 10_000] * 50}), kind)
    sizes = [table.num_rows for table in scan_source(str(tmp_path)).read(range(1))]
    assert sum(sizes) == 50
    assert max(sizes) <= 10
