"""Recipes for other systems: of the right form, with commands that raybatch takes.

Airflow, Dagster and SkyPilot are not installed here: their files were run with Airflow 3.3.2 and
Dagster 1.13.29, and checked by the schemas of SkyPilot 0.14.1, whose fields are stored below.
"""

import runpy
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from tests.test_docs import check_command

DEPLOY = Path(__file__).parents[2] / "deploy"
TASK_FIELDS = {
    *("name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs"),
    *("secrets", "config", "volumes", "inputs", "outputs", "service", "pool"),
}
RESOURCES_FIELDS = {
    *("accelerators", "accelerator_args", "any_of", "autostop", "cloud", "cpus", "disk_size"),
    *("disk_tier", "image_id", "infra", "instance_type", "job_recovery", "labels", "local_disk"),
    *("memory", "network_tier", "ordered", "ports", "priority", "region", "use_spot", "zone"),
}


def joined(script):
    """Return the lines of a script, continued ones as one."""
    return [line.strip() for line in script.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("name", ["ray_cluster.sh", "slurm.sbatch"])
def test_script_is_one(name):
    done = subprocess.run(["bash", "-n", DEPLOY / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cluster_without_a_secret_is_not_started():
    command = ["bash", DEPLOY / "ray_cluster.sh", "127.0.0.1:29990", "0", "1", "true"]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "RAY_AUTH_TOKEN: set it to a secret text" in done.stderr


def test_cluster_without_a_command_is_told_how_to_be_started():
    done = subprocess.run(["bash", DEPLOY / "ray_cluster.sh", "head:1"], capture_output=True)
    assert done.returncode == 2
    assert b"HEAD:PORT RANK NUM_HOSTS COMMAND..." in done.stderr


def test_other_hosts_join_the_head_and_end_with_it(tmp_path):
    """Their end is no failure of the job: the head has its exit code."""
    (tmp_path / "ray").write_text('#!/bin/bash\necho "$@" >"${0%/*}/arguments"\nexit 1\n')
    (tmp_path / "ray").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        command = ["bash", DEPLOY / "ray_cluster.sh", address, "1", "2", "false"]
        variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_AUTH_TOKEN": "x"}
        assert subprocess.run(command, env=variables).returncode == 0
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:2] == ["start", "--block"]
    assert arguments[-1] == f"--address={address}"


def skypilot():
    return yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())


def test_skypilot_knows_the_fields():
    task = skypilot()
    assert set(task) <= TASK_FIELDS
    assert set(task["resources"]) <= RESOURCES_FIELDS


def test_skypilot_asks_for_the_secret_and_has_none():
    assert skypilot()["secrets"] == {"RAY_AUTH_TOKEN": None}


@pytest.mark.parametrize("part", ["setup", "run"])
def test_skypilot_runs_scripts(part):
    done = subprocess.run(["bash", "-n"], input=skypilot()[part], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["skypilot.yaml", "slurm.sbatch"])
def test_script_starts_a_job_that_raybatch_takes(name):
    (line,) = [line for line in joined((DEPLOY / name).read_text()) if "-m raybatch" in line]
    words = line.removesuffix(" &").split("-m raybatch ")[1].split()
    check_command(["raybatch", *("job.yaml" if word.startswith('"$') else word for word in words)])
    # the cluster is there, and error rows are no reason to run it again
    assert {"--ray", "--allow-error-rows"} <= set(words)
    assert "deploy/ray_cluster.sh" in (DEPLOY / name).read_text()


def stub(monkeypatch, name, **names):
    """Put a module in the place of one that is not installed, with the packages above it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for key, value in names.items():
        monkeypatch.setattr(sys.modules[name], key, value, raising=False)


class Operator:
    """What a DAG needs of an operator."""

    made: list["Operator"]

    def __init__(self, *, task_id, bash_command):
        self.task_id, self.bash_command, self.after = task_id, bash_command, []
        Operator.made.append(self)

    def __rshift__(self, other):
        self.after.append(other.task_id)


class Dag:
    """What a file of DAGs needs of a DAG."""

    options = None

    def __init__(self, **options):
        Dag.options = options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_airflow_answers_and_then_proves_each_day(monkeypatch):
    Operator.made = []
    stub(monkeypatch, "airflow.providers.standard.operators.bash", BashOperator=Operator)
    stub(monkeypatch, "airflow.sdk", DAG=Dag)
    runpy.run_path(str(DEPLOY / "airflow_dag.py"))
    answer, verify = Operator.made
    for task in Operator.made:
        check_command(task.bash_command.replace("{{ ds }}", "2026-01-03").split())
    assert (answer.after, verify.after) == (["verify"], [])
    # both are about the output of the same day
    assert answer.bash_command.split("--output ")[1].startswith("s3://bucket/answers/{{ ds }}")
    assert verify.bash_command.endswith("s3://bucket/answers/{{ ds }}")
    # a retry resumes the run
    assert Dag.options["default_args"]["retries"] == 3
    assert Dag.options["start_date"] < datetime.now()


def test_dagster_answers_and_then_proves_each_day(monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        assert options["check"]
        return SimpleNamespace(stdout='{"rows": 3}')

    def record(**fields):
        return SimpleNamespace(**fields)

    stub(
        monkeypatch,
        "dagster",
        asset=lambda **options: lambda made: (made, options),
        DailyPartitionsDefinition=record,
        RetryPolicy=record,
        MaterializeResult=record,
        AssetExecutionContext=object,
    )
    monkeypatch.setattr(subprocess, "run", run)
    answers, options = runpy.run_path(str(DEPLOY / "dagster_asset.py"))["answers"]
    result = answers(SimpleNamespace(partition_key="2026-01-03"))
    for command in commands:
        check_command(command)
    assert [command[1] for command in commands] == ["submit", "verify", "report"]
    assert result.metadata == {"path": "s3://bucket/answers/2026-01-03", "report": {"rows": 3}}
    assert options["retry_policy"].max_retries == 3
