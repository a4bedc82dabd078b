"""Fingerprints of jobs, and messages about differences to a stored one."""

import os
import shutil

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.planning.fingerprint import check_same, fingerprint, input_files, output_schema
from tests.stages.support import fake_stage, make_tokenizer, write_parquet

SCHEMA = pa.schema([("text", pa.string())])


def fingerprint_of(model, **options):
    config = fake_stage(model, **{"prompt": "{text}", **options}).config
    return fingerprint(config, output_schema(SCHEMA, config))


def ask(row):
    return [{"role": "user", "content": row["text"]}]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"prompt": "{text}?"}, "prompt"),
        ({"sampling": {"max_tokens": 5}}, "sampling.max_tokens"),
        ({"seed": 3}, "sampling.seed"),
        ({"system": "be brief"}, "system"),
        ({"prompt": None, "messages": ask}, "messages"),
        ({"id_column": "text"}, "id_column"),
        ({"on_too_long": "drop"}, "on_too_long"),
        ({"engine": {"dtype": "bfloat16"}}, "engine.dtype"),
    ],
)
def test_what_decides_answers_is_there_by_name(model, changes, name):
    before, after = fingerprint_of(model), fingerprint_of(model, **changes)
    assert before[name] != after[name]


def test_a_number_that_is_written_otherwise_is_the_same(model):
    before = fingerprint_of(model, sampling={"temperature": 0})
    now = fingerprint_of(model, sampling={"temperature": 0.0})
    check_same("out", stored=before, stored_files=[], now=now, files=[])
    other = fingerprint_of(model, sampling={"temperature": 0.5})
    with pytest.raises(ConfigError, match=r"sampling\.temperature is 0\.5 and was 0\b"):
        check_same("out", stored=before, stored_files=[], now=other, files=[])


@pytest.mark.parametrize("option", ["kv_cache_dtype", "host_kv_dtype", "quantization"])
def test_8_bits_are_there_by_name_and_the_default_is_not(model, option):
    changed = fingerprint_of(model, engine={option: "int8", "host_kv_bytes": 1 << 30})
    assert {**fingerprint_of(model), f"engine.{option}": '"int8"'} == changed
    with pytest.raises(ConfigError, match=rf"engine\.{option}"):
        check_same("out", stored=fingerprint_of(model), stored_files=[], now=changed, files=[])


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"block_size_tokens": 16}},
        {"pool": None, "replicas": 5},
        {"dedup": False},
        {"on_error": "raise"},
    ],
)
def test_what_decides_speed_alone_is_not_there(model, changes):
    changes.pop("pool", None)
    assert fingerprint_of(model) == fingerprint_of(model, **changes)


def test_the_same_model_elsewhere_is_the_same(tmp_path, model):
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint_of(model) == fingerprint_of(tmp_path / "copy")
    other = make_tokenizer(tmp_path / "other", has_bos=True)
    assert fingerprint_of(model)["model.tokenizer"] != fingerprint_of(other)["model.tokenizer"]


def test_long_texts_are_there_as_digests(model):
    one, other = (
        fingerprint_of(model, prompt="{text}" + "x" * 999),
        fingerprint_of(model, prompt="{text}" + "x" * 998 + "y"),
    )
    assert one["prompt"] != other["prompt"]
    assert len(one["prompt"]) < 250


def files_of(folder):
    return input_files(scan_source(str(folder)))


def write_files(folder, **tables):
    for name, values in tables.items():
        write_parquet(folder / f"{name}.parquet", pa.table({"text": values}))


def refused(stored, files):
    with pytest.raises(ConfigError) as caught:
        check_same("out", stored={}, stored_files=stored, now={}, files=files)
    return str(caught.value)


def test_an_extension_is_proposed_only_where_it_would_do(tmp_path):
    write_files(tmp_path, a=["x"])
    before = files_of(tmp_path)
    write_files(tmp_path, b=["y"])
    assert "extend=True" in refused(before, files_of(tmp_path))
    (tmp_path / "a.parquet").rename(tmp_path / "c.parquet")
    assert "extend=True" not in refused(before, files_of(tmp_path))


def test_changed_new_and_missing_files_are_named(tmp_path):
    write_files(tmp_path, a=["x"], b=["y"])
    before = files_of(tmp_path)
    os.utime(tmp_path / "a.parquet", (1, 1))
    assert files_of(tmp_path) == before
    write_files(tmp_path, a=["z"], c=["y"])
    (tmp_path / "b.parquet").unlink()
    message = refused(before, files_of(tmp_path))
    for part in ("b.parquet is missing", "c.parquet is new", "a.parquet has changed"):
        assert part in message


def test_another_order_of_the_files_is_told(tmp_path):
    write_files(tmp_path, a=["x"], b=["y"])
    files = files_of(tmp_path)
    assert "in another order" in refused(files, files[::-1])
