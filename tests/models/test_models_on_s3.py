"""Models in a bucket: ranges of large files, their identity, and jobs with them."""

from collections.abc import Iterator

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from safetensors.numpy import save

from raybatch.errors import ConfigError, UnreachableError
from raybatch.job.job import Job
from raybatch.models import store
from raybatch.models.source import (
    model_identity,
    pin,
    resolve_config,
    resolve_model,
    resolve_tokenizer,
)
from tests.models.test_hub import demo_files
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

pytestmark = [pytest.mark.fetch, pytest.mark.usefixtures("locally", "warm_processes")]

RANGE_BYTES = 256 << 10


@pytest.fixture(autouse=True)
def small_ranges(own_cache, monkeypatch):
    monkeypatch.setattr(store, "RANGE_BYTES", RANGE_BYTES)


@pytest.fixture
def reads(monkeypatch, s3_endpoint) -> Iterator[list[tuple[str, int, int]]]:
    """Reads of objects by this process: name, start and end."""
    read, calls = s3fs.S3FileSystem._cat_file, []

    async def noted(self, path, version_id=None, start=None, end=None, **options):
        calls.append((path.rpartition("/")[2], start, end))
        return await read(self, path, version_id=version_id, start=start, end=end, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", noted)
    # each one has methods that are bound at creation
    s3fs.S3FileSystem.clear_instance_cache()
    yield calls
    s3fs.S3FileSystem.clear_instance_cache()


def put(bucket: str, name: str, files: dict[str, bytes]) -> str:
    fs = fsspec.filesystem("s3")
    for file, data in files.items():
        fs.pipe_file(f"{bucket}/{name}/{file}", data)
    return f"s3://{bucket}/{name}"


def weights(seed: int) -> bytes:
    return save({"a": np.random.default_rng(seed).random(250_000)})


def test_weights_come_in_ranges(bucket, reads):
    data = weights(0)
    uri = put(bucket, "model", {"config.json": b"{}", "model.safetensors": data})
    assert data == (resolve_model(uri) / "model.safetensors").read_bytes()
    ranges = sorted(call[1:] for call in reads if call[0] == "model.safetensors")
    assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), len(data)]
    assert RANGE_BYTES == max(stop - start for start, stop in ranges)


def test_a_model_that_is_replaced_while_it_is_fetched_is_refused(bucket, reads, monkeypatch):
    uri = put(bucket, "model", {"config.json": b"{}", "model.safetensors": weights(0)})
    folder, read = resolve_config(uri), store._Fetch._fetch_range
    fs = fsspec.filesystem("s3")

    def replaced(self, fd, file, index):
        read(self, fd, file, index)
        if index == 3:
            fs.pipe_file(file.path, weights(1))

    monkeypatch.setattr(store._Fetch, "_fetch_range", replaced)
    with pytest.raises(UnreachableError, match=r"model\.safetensors was replaced during the fetch"):
        resolve_model(uri)
    monkeypatch.setattr(store._Fetch, "_fetch_range", read)
    assert not (folder / "model.safetensors").exists()
    assert weights(1) == (resolve_model(uri) / "model.safetensors").read_bytes()


def test_the_etags_of_weights_name_a_model(bucket, reads):
    files = {"config.json": b"{}", "model.safetensors": weights(0)}
    one, other = put(bucket, "one", files), put(bucket, "other", {**files, "merges.txt": b"x"})
    names = {model_identity(uri, resolve_config(uri)) for uri in (one, other)}
    assert 1 == len(names)
    put(bucket, "one", {"model.safetensors": weights(1)})
    assert model_identity(one, resolve_config(one)) not in names
    assert {"config.json", "merges.txt"} == {name for name, *_ in reads}


def test_a_pinned_uri_has_its_weights_or_none(bucket):
    uri = put(bucket, "model", {"config.json": b"{}", "model.safetensors": weights(0)})
    pinned = pin(uri)
    put(bucket, "model", {"tokenizer.json": b"{}"})
    assert pinned == pin(pinned.partition("#")[0])
    assert (resolve_model(pinned) / "tokenizer.json").exists()
    put(bucket, "model", {"model.safetensors": weights(1)})
    for resolve in (resolve_model, resolve_config):
        with pytest.raises(ConfigError, match=rf"weights in '{uri}' were replaced since"):
            resolve(pinned)


def test_a_tokenizer_comes_from_a_bucket_alone(bucket):
    files = {name: data for name, data in demo_files().items() if name.startswith("tok")}
    folder = resolve_tokenizer(put(bucket, "tokenizer", files))
    assert files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_only_engines_read_weights_of_a_bucket(bucket, reads, own_cache, tmp_path):
    uri = put(bucket, "model", demo_files())
    pq.write_table(pa.table({"text": ["Question:"] * 8}), tmp_path / "in.parquet")
    job = Job.from_mapping(
        {
            "source": str(tmp_path / "in.parquet"),
            "sink": str(tmp_path / "out"),
            "executor": "local",
            "stage": {
                "model": uri,
                "prompt": "{text}",
                "sampling": {"max_tokens": 2},
                "pool": {"replicas": 2},
            },
        }
    )
    job.explain()
    assert [] == list(own_cache.rglob("*.safetensors"))
    report = job.run(progress=lambda *_: None)
    assert (8, pin(uri)) == (report.rows_out, report.model)
    assert "tokenizer.json" in {name for name, *_ in reads}
    assert "model.safetensors" not in {name for name, *_ in reads}
    # one from the bucket, and one that engines prepare from it
    copies = [path.parent.parent.name for path in own_cache.rglob("*.safetensors")]
    assert 1 == copies.count("models")
    assert [] == list(own_cache.rglob("*.partial"))


def test_a_bucket_with_pickled_weights_alone_is_refused_before_they_are_fetched(bucket, tmp_path):
    files = {name: data for name, data in demo_files().items() if "safetensors" not in name}
    uri = put(bucket, "model", {**files, "pytorch_model.bin": b"x"})
    pq.write_table(pa.table({"text": ["Question:"]}), tmp_path / "in.parquet")
    stage = {"model": uri, "prompt": "{text}"}
    job = Job.from_mapping(
        {"source": str(tmp_path / "in.parquet"), "sink": str(tmp_path / "out"), "stage": stage}
    )
    with pytest.raises(ConfigError, match=rf"{uri} has only pickled weights"):
        job.run()
