"""The reference of options, and the schema of job files, are those of the code."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from raybatch.errors import ConfigError
from raybatch.job.job import Job

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import write_reference  # noqa: E402

REFERENCE = ROOT / "docs" / "reference"
SCHEMA = json.loads((REFERENCE / "job.schema.json").read_text())
JOB = {"source": "in", "sink": "out", "stage": {"model": "demo", "prompt": "{text}"}}


def test_the_written_reference_is_that_of_the_code():
    again = "run: python scripts/write_reference.py"
    assert write_reference.reference() == (REFERENCE / "options.md").read_text(), again
    assert write_reference.schema() == (REFERENCE / "job.schema.json").read_text(), again


def test_every_option_has_a_meaning():
    rows = [line for line in write_reference.reference().split("\n") if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def errors_of(job):
    return [e.message for e in jsonschema.Draft202012Validator(SCHEMA).iter_errors(job)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plan": "off"},
        {"plan": {"unit_rows": 8}},
        {"columns": "id,text", "partition_by": ["lang"], "limits": {"max_tokens": 10}},
        {"waves": [{"on": "truncated", "sampling": {"max_tokens": 9}}], "executor": "local"},
        {"stage": {**JOB["stage"], "backend": "vllm", "seed": 3, "task": "generate"}},
        {"stage": {**JOB["stage"], "backend": {"kind": "fake", "options": {"step_s": 0.1}}}},
        {"stage": {**JOB["stage"], "sampling": {"stop": ["x"], "top_k": None}}},
        {"stage": {"model": "demo", "messages": [{"role": "user", "content": "{text}"}]}},
    ],
    ids=str,
)
def test_a_job_that_is_built_is_one_of_the_schema(options):
    job = {**JOB, **options}
    Job.from_mapping(yaml.safe_load(yaml.safe_dump(job)))
    assert errors_of(job) == []


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "on"},
        {"flush_every_s": 0},
        {"executor": "slurm"},
        {"colums": ["id"]},
        {"stage": {**JOB["stage"], "engine": {"max_num_seqs": 0}}},
        {"stage": {**JOB["stage"], "row_logprobs": 3}},
        {"stage": {"prompt": "{text}"}},
    ],
    ids=str,
)
def test_a_job_that_is_refused_is_none_of_the_schema(options):
    job = {**JOB, **options}
    with pytest.raises(ConfigError):
        Job.from_mapping(job)
    assert errors_of(job) != []
