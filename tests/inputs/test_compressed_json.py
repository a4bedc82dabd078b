"""JSONL files in gzip and zstd: rows, limits on what they may grow to, and broken ones."""

import gzip
import io
import json

import fsspec
import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs import text_blocks
from raybatch.inputs.source import SkippedFile, scan_source
from raybatch.inputs.text_blocks import MAX_GROWTH, read_blocks
from raybatch.planning.fingerprint import input_files
from tests.s3 import bucket, s3_endpoint  # noqa: F401 - fixtures
from tests.stages.support import rows_of


def zstd(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


PACKED = {".gz": gzip.compress, ".zst": zstd}
ROWS = b"".join(b'{"x": %d}\n' % i for i in range(5000))


def refusal(path, **options):
    with pytest.raises(ConfigError) as caught:
        scan_source(str(path), **options)
    return str(caught.value)


def row_ids_of(table):
    return table.column("row_id").to_pylist()


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSON"])
def test_compressed_file_has_the_rows_of_the_plain_one(tmp_path, name, suffix):
    (tmp_path / f"{name}{suffix}").write_bytes(PACKED[suffix](ROWS))
    source = scan_source(str(tmp_path))
    assert (source.num_rows, rows_of(source)) == (5000, list(range(5000)))
    ids = [i for table in source.read(range(1), row_id_column="row_id") for i in row_ids_of(table)]
    assert ids == [f"{name}{suffix}:{i}" for i in range(5000)]


@pytest.mark.parametrize("suffix", PACKED)
def test_members_of_one_file_follow_each_other(tmp_path, suffix):
    lines = ROWS.splitlines(keepends=True)
    cuts = [b"".join(lines[at : at + 7]) for at in range(0, 700, 7)]
    cuts += [b"".join(lines[700:])[:40_001], b"".join(lines[700:])[40_001:]]
    (tmp_path / f"a.jsonl{suffix}").write_bytes(b"".join(map(PACKED[suffix], cuts)))
    assert rows_of(scan_source(str(tmp_path))) == list(range(5000))


def test_compressed_file_is_one_slice_and_read_a_block_at_a_time(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS))
    assert len(scan_source(str(path)).slices) == 1
    blocks = list(read_blocks(f"file://{path}", block_bytes=1000))
    assert b"".join(blocks) == ROWS
    assert len(blocks) > 50
    assert max(map(len, blocks)) <= 2000 + len(b'{"x": 4999}\n')


def test_source_may_hold_plain_and_compressed_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": 2, "y": 1.5}\n'))
    (tmp_path / "c.jsonl.zst").write_bytes(zstd(b'{"x": 3.5}\n'))
    source = scan_source(str(tmp_path))
    assert rows_of(source) == [1.0, 2.0, 3.5]


def test_other_end_is_another_input(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    digests = []
    for rows in (ROWS, ROWS, ROWS.replace(b'"x": 17}', b'"x": 18}')):
        path.write_bytes(gzip.compress(rows, mtime=0))
        digests.append(input_files(scan_source(str(path))))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.ray
@pytest.mark.parametrize("suffix", PACKED)
def test_compressed_file_is_read_from_a_bucket(bucket, s3_endpoint, suffix):  # noqa: F811
    fs = fsspec.filesystem("s3", endpoint_url=s3_endpoint, skip_instance_cache=True)
    fs.pipe(f"{bucket}/in/a.jsonl{suffix}", PACKED[suffix](ROWS))
    source = scan_source(f"s3://{bucket}/in")
    assert rows_of(source) == list(range(5000))


def bomb(num_times, line=b'{"x": "%s"}\n' % (b"a" * 1000)):
    """Return members of about 10 MiB each, one behind the other."""
    return gzip.compress(line * ((10 << 20) // len(line)), 6) * num_times


def test_file_that_grows_to_gigabytes_is_refused_with_the_limit_and_the_way_out(tmp_path):
    data = bomb(300)
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    message = refusal(tmp_path)
    assert len(data) < 10 << 20
    assert "max_decompressed_bytes=1,073,741,824" in message
    assert "by default (1,073,741,824 bytes, or 100 times" in message
    assert message.endswith("raise max_decompressed_bytes or decompress it")


def test_file_over_its_limit_is_refused_before_its_rows_are_parsed(tmp_path):
    """Millions of tiny rows take minutes to parse, and less than a second to decompress."""
    (tmp_path / "a.jsonl.gz").write_bytes(bomb(8, b"no json\n"))
    assert "max_decompressed_bytes=50,000,000" in refusal(
        tmp_path, max_decompressed_bytes=50_000_000
    )
    assert "line 1: not a complete JSON object" in refusal(tmp_path)


def test_bomb_of_zstd_is_refused(tmp_path):
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(b'{"x": 1}\n' * 5_000_000))
    message = refusal(tmp_path, max_decompressed_bytes=40_000_000)
    assert "max_decompressed_bytes=40,000,000" in message
    assert "by default" not in message


def test_limit_is_of_what_a_file_grows_to(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    assert scan_source(str(tmp_path), max_decompressed_bytes=len(ROWS)).num_rows == 5000
    assert "max_decompressed_bytes=" in refusal(tmp_path, max_decompressed_bytes=len(ROWS) - 1)


def test_file_over_its_limit_is_not_left_out_in_silence(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(ROWS))
    assert "b.jsonl.gz" in refusal(tmp_path, max_decompressed_bytes=9, skip_bad_files=True)


def test_larger_file_may_grow_in_proportion(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "LEAST_ALLOWED_BYTES", 100)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS))
    assert scan_source(str(path)).num_rows == 5000
    data = gzip.compress(b'{"x": 1}\n' * 5000)
    path.write_bytes(data)
    assert f"={MAX_GROWTH * len(data):,}" in refusal(path)


def test_line_of_a_compressed_file_has_a_limit(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"x": 1}\n' + b"a" * 5000))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz has a line of more than 2,000 bytes"):
        list(read_blocks(f"file://{path}", block_bytes=1000, max_line_bytes=2000))
    assert len(list(read_blocks(f"file://{path}", block_bytes=1000, max_line_bytes=5000))) == 2


BROKEN = {
    "empty": (".gz", lambda: b"", "it is empty (0 bytes)"),
    "cut gzip": (".gz", lambda: gzip.compress(ROWS)[:-9], "Truncated compressed stream"),
    "gzip cut in its last bytes": (".gz", lambda: gzip.compress(ROWS)[:-1], "Truncated"),
    "cut in the head of a member": (".gz", lambda: gzip.compress(ROWS) * 2 + b"\x1f", "Truncated"),
    "other sum": (".gz", lambda: gzip.compress(ROWS)[:-8] + bytes(8), "incorrect data check"),
    "no gzip": (".gz", lambda: b"noise", "incorrect header check"),
    "noise behind": (".gz", lambda: gzip.compress(ROWS) + b"noise", "incorrect header check"),
    "cut zstd": (".zst", lambda: zstd(ROWS)[:-1], "Truncated compressed stream"),
    "no zstd": (".zst", lambda: b"noise", "Unknown frame descriptor"),
    "parquet in gzip": (".gz", lambda: gzip.compress(b"PAR1"), "it is compressed Parquet"),
    "gzip in gzip": (".gz", lambda: gzip.compress(gzip.compress(ROWS)), "it is compressed twice"),
}


@pytest.mark.parametrize(
    ("suffix", "data"), [("", gzip.compress(ROWS)), (".gz", ROWS)], ids=["no name", "wrong name"]
)
def test_file_is_decompressed_as_its_content_says(tmp_path, suffix, data):
    (tmp_path / f"a.jsonl{suffix}").write_bytes(data)
    assert rows_of(scan_source(str(tmp_path))) == list(range(5000))


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_refused_or_left_out(tmp_path, kind):
    suffix, make, reason = BROKEN[kind]
    (tmp_path / f"bad.jsonl{suffix}").write_bytes(make())
    message = refusal(tmp_path)
    assert f"bad.jsonl{suffix} cannot be read; rewrite it, leave it out, or set" in message
    assert reason in message
    (tmp_path / "good.jsonl").write_text('{"x": 1}\n')
    source = scan_source(str(tmp_path), skip_bad_files=True)
    (skipped,) = source.skipped
    assert (skipped.name, source.num_rows) == (f"bad.jsonl{suffix}", 1)
    assert reason in SkippedFile(*skipped).reason


def test_broken_line_is_named_by_its_number_behind_the_blocks_before(tmp_path):
    lines = [json.dumps({"x": "a" * 1000})] * 20_000
    lines[18_000] = '{"x": 1}'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode(), 1))
    assert "a.jsonl.gz, line 18001: " in (message := refusal(tmp_path))
    assert '{"x": 1}' in message


class _Unplugged(io.BytesIO):
    """A file whose disk goes away after its first bytes."""

    def read(self, size=-1):
        if self.tell():
            raise OSError("the network is down")
        return super().read(10)


def test_file_that_cannot_be_read_on_is_not_taken_for_broken(tmp_path, monkeypatch):
    monkeypatch.setattr(fsspec, "open", lambda *_: _Unplugged(gzip.compress(ROWS)))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(ROWS))
    message = refusal(tmp_path, skip_bad_files=True)
    assert "a.jsonl.gz cannot be opened: OSError: the network is down" in message


def test_file_that_has_grown_since_it_was_scanned_ends_the_job(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(ROWS))
    source = scan_source(str(path))
    path.write_bytes(gzip.compress(ROWS * 100))
    with pytest.raises(ConfigError, match="it has at least 5120 rows and had 5000"):
        rows_of(source)
