"""Paths that hosts of a cluster would not find are refused before anything is sent."""

from dataclasses import replace

import pytest

from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch_submit.checks import check_paths, fixed_part, is_uri, paths_on_hosts


def job(source="/data/in", sink="s3://b/out", model="demo"):
    stage = {"model": model, "prompt": "{a}"}
    return Job.from_mapping({"source": source, "sink": sink, "stage": stage}).config


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with prompts and a model, and one beside it."""
    (tmp_path / "work" / "prompts").mkdir(parents=True)
    (tmp_path / "work" / "prompts" / "a.parquet").write_bytes(b"")
    (tmp_path / "work" / "models" / "oak").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("path", ["s3://b/k", "gs://b", "file:///x", "zip://a::s3://b/c.zip"])
def test_uri_means_the_same_everywhere(path):
    assert is_uri(path)


@pytest.mark.parametrize("source", ["/data/in", "s3://bucket/in", "/data/*.parquet"])
def test_absolute_path_and_uri_pass(source):
    check_paths(job(source=source), working_dir=None)


def test_a_job_that_uses_no_cluster_is_not_sent_to_one():
    with pytest.raises(ConfigError, match="executor=local runs engines only on the driver's host"):
        check_paths(replace(job(), executor="local"), working_dir=None)


def test_relative_sink_is_refused_with_the_absolute_path(here):
    with pytest.raises(ConfigError, match=rf"lost; use a path .*'{here}/answers', or a URI"):
        check_paths(job(sink="answers"), working_dir=here)


def test_relative_source_is_refused_with_both_ways_out(here):
    with pytest.raises(ConfigError, match=rf"'{here}/prompts'.*--working-dir"):
        check_paths(job(source="prompts"), working_dir=None)


@pytest.mark.parametrize("source", ["prompts", "prompts/", "./prompts/*.parquet", "prompts/a*"])
def test_relative_source_in_the_working_directory_passes(here, source):
    check_paths(job(source=source), working_dir=here)


@pytest.mark.parametrize("source", ["../beside", "missing", "~/prompts", "missing/*.parquet"])
def test_relative_source_outside_of_the_working_directory_is_refused(here, source):
    with pytest.raises(ConfigError, match="the hosts of the cluster do not have it"):
        check_paths(job(source=source), working_dir=here)


def test_relative_model_folder_is_refused(here):
    with pytest.raises(ConfigError, match="model 'models/oak' is relative"):
        check_paths(job(model="models/oak"), working_dir=None)


@pytest.mark.parametrize("model", ["demo", "Qwen/Qwen3-8B", "s3://b/model", "/models/oak"])
def test_model_that_every_host_finds_passes(here, model):
    check_paths(job(model=model), working_dir=None)


def test_password_in_the_sink_is_refused():
    with pytest.raises(ConfigError, match="sink: the URI contains a password"):
        check_paths(job(sink="ftp://me:pw@host/out"), working_dir=None)


def test_local_paths_are_those_to_mount():
    named = paths_on_hosts(job(sink="s3://b/out", model="/models/oak"))
    assert named == [("source", "/data/in"), ("model", "/models/oak")]


@pytest.mark.parametrize(
    ("path", "fixed"), [("a/b", "a/b"), ("a/*.x", "a"), ("a?/b", ""), ("a/b[1]/c*", "a")]
)
def test_fixed_part_ends_before_the_first_wildcard(path, fixed):
    assert fixed_part(path) == fixed
