"""Errors of a job are reported before Ray starts, in one line that says what to do."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.models.source import resolve_model
from tests.jobs import store_plan


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a", "b"]}), folder / "a.parquet")
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the demo model."""
    return shutil.copytree(resolve_model("demo"), tmp_path / "model")


def job_of(source, sink, executor="ray", **stage):
    options = {"model": "demo", "prompt": "{text}", **stage}
    paths = {"source": str(source), "sink": str(sink)}
    return Job.from_mapping({**paths, "stage": options, "executor": executor})


def refusal(call, *args, **options):
    """Return what a job is refused with before Ray starts."""
    with pytest.raises(ConfigError) as found:
        call(*args, start_ray=lambda: pytest.fail("Ray was to start"), **options)
    assert "\n" not in str(found.value)
    return str(found.value)


def cut_header(folder, change):
    """Change the header of a safetensors file without a change of its length."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(data[:8] + text.ljust(length) + data[8 + length :])


def swap_shape(header):
    shape = header["model.layers.0.mlp.gate.weight"]["shape"]
    shape.reverse()


def rename(header):
    header["model.layers.0.mlp.gone.weight"] = header.pop("model.layers.0.mlp.gate.weight")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap_shape, "tensor 'model.layers.0.mlp.gate.weight' has shape [192, 8]"),
        (rename, "has no tensor 'model.layers.0.mlp.gate.weight' of shape [8, 192]"),
    ],
)
def test_weights_that_are_not_those_of_the_config(source, tmp_path, checkpoint, change, message):
    cut_header(checkpoint, change)
    job = job_of(source, tmp_path / "out", model=str(checkpoint))
    found = refusal(job.run)
    assert message in found
    assert str(checkpoint / "model.safetensors") in found
    assert message in refusal(job.explain)
    assert not (tmp_path / "out").exists()


def test_a_chat_template_that_cannot_be_parsed(source, tmp_path, checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{% for message in messages %}")
    job = job_of(source, tmp_path / "out", model=str(checkpoint))
    assert "chat_template.jinja, line 1: the chat template cannot be parsed" in refusal(job.run)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no *.safetensors file"),
    ],
)
@pytest.mark.parametrize("backend", ["native", "transformers", "vllm"])
def test_a_folder_that_lacks_a_file(source, tmp_path, checkpoint, backend, missing, message):
    (checkpoint / missing).unlink()
    # hosts of a cluster may have weights that this one has not
    where = "local" if missing == "model.safetensors" else "ray"
    job = job_of(source, tmp_path / "out", where, model=str(checkpoint), backend=backend)
    assert message in refusal(job.run)


def test_a_column_that_is_not_there(source, tmp_path):
    job = job_of(source, tmp_path / "out", prompt="{txt}")
    assert "no column 'txt' (did you mean 'text'?)" in refusal(job.run)


def test_a_source_that_is_not_there(tmp_path):
    assert "does not exist" in refusal(job_of(tmp_path / "no", tmp_path / "out").run)


def test_an_output_inside_of_the_source(source):
    assert "is inside the source" in refusal(job_of(source, source / "out").run)


def test_a_folder_with_other_files(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert "notes.txt" in refusal(job_of(source, tmp_path / "out").run)


def test_the_output_of_another_job(source, tmp_path):
    job = job_of(source, tmp_path / "out", backend={"kind": "native"})
    store_plan(job)
    journal = tmp_path / "out" / "_raybatch" / "frag" / "000000"
    journal.mkdir(parents=True)
    (journal / "000000-1-x.arrow").touch()
    answers = {"backend": {"kind": "native"}, "sampling": {"max_tokens": 7}}
    other = job_of(source, tmp_path / "out", **answers)
    assert "belongs to another job: sampling.max_tokens is 7" in refusal(other.run)


def test_new_answers_to_error_rows_in_the_output(source, tmp_path):
    job = job_of(source, tmp_path / "out")
    assert "is inside the output" in refusal(job.retry_errors, tmp_path / "out" / "new")
