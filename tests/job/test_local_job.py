"""Jobs without Ray: what is theirs alone; that they do what others do is tested beside those."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.backends import registry
from raybatch.durable.fault_points import EXIT_CODE, POINTS
from raybatch.errors import ConfigError, MissingDependency, ReplicaError
from raybatch.job.job import Job
from raybatch.planning.store import read_plans
from raybatch.report import report_of
from tests.jobs import Hold, local_job
from tests.stages.support import fake_stage, write_parquet

# what a crash in the middle of a run must not cost; the others are tested where time is
FEW_POINTS = ("after_plan", "after_rows", "after_publish", "after_join", "before_success")
NUM_ROWS = 60
PLAN = {"unit_rows": 10, "max_unit_rows": 10}
# rows go to the journal while others of their unit still run; records commit an output by columns
ONE_UNIT = {"plan": {"unit_rows": NUM_ROWS, "max_unit_rows": NUM_ROWS}, "flush_every_s": 0.01}
JOINED = {"output_file_bytes": 9000}
WHAT_REACHES = {
    "before_fragment": ONE_UNIT,
    "after_fragment": ONE_UNIT,
    "before_done": {"partition_by": ["text"]},
    "before_join": JOINED,
    "after_join": JOINED,
    "after_join_record": JOINED,
}

pytestmark = pytest.mark.usefixtures("locally")


@pytest.fixture
def source(tmp_path):
    write_parquet(tmp_path / "in" / "a.parquet", texts(NUM_ROWS))
    return tmp_path / "in"


def texts(num_rows: int) -> pa.Table:
    return pa.table({"text": [f"t{i}" for i in range(num_rows)]})


def write_job(
    folder: Path, model: Path, job: dict[str, object] | None = None, **fake: object
) -> Path:
    """Write the file of a job on `folder / "in"` and return it; YAML reads JSON."""
    options = {
        "source": str(folder / "in"),
        "sink": str(folder / "out"),
        "executor": "local",
        "plan": PLAN,
        "flush_every_s": 0.1,
        "stage": {
            "model": str(model),
            "prompt": "{text}",
            "sampling": {"max_tokens": 4},
            "backend": {"kind": "fake", "options": fake},
            "pool": {"replicas": 1},
        },
        **(job or {}),
    }
    path = folder / "job.yaml"
    path.write_text(json.dumps(options))
    return path


def start(job_file: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Start the command on a job file in a new process."""
    environment = {**os.environ, **variables}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "raybatch", "run", str(job_file)]
    with open(job_file.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def ids_of(sink: Path) -> list[str]:
    return sorted(pq.read_table(sink, columns=["row_id"]).column(0).to_pylist())


def check_whole(folder: Path) -> None:
    """Every row is there once, and the report says so."""
    assert sorted(f"a.parquet:{i}" for i in range(NUM_ROWS)) == ids_of(folder / "out")
    report = report_of(str(folder / "out"))
    assert (report.rows_lost, report.rows_duplicated, report.exit_code()) == (0, 0, 0)


def wait_until(is_so, timeout_s=200.0):
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "what the test waits for does not happen"
        time.sleep(0.01)


def test_a_job_runs_and_ray_is_never_loaded(source, model, tmp_path):
    job_file = write_job(tmp_path, model, crash_on=300)
    program = (
        "import sys; from raybatch.job.job import Job\n"
        f"report = Job.from_yaml({str(job_file)!r}).run(progress=lambda *_: None)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(report.rows_out, report.executor, sorted(loaded & {'ray', 'torch'}))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env=environment, check=True
    )
    assert ended.stdout.decode().split("\n")[0] == f"{NUM_ROWS} local []"


def test_a_killed_run_leaves_no_engine_and_the_same_command_goes_on(source, model, tmp_path):
    hold = Hold(tmp_path, NUM_ROWS - 4)
    job_file = write_job(tmp_path, model, crash_on=300, max_num_seqs=4, **hold.options)
    driver = start(job_file)
    sink = tmp_path / "out"
    wait_until(lambda: len(list(sink.glob("data/*.parquet"))) >= 2)
    engines = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    hold.release()
    assert engines
    _, alive = psutil.wait_procs(engines, timeout=30)
    assert not alive
    before = {path.name: path.read_bytes() for path in sink.glob("data/*.parquet")}
    assert 2 <= len(before) < NUM_ROWS // 10
    assert start(job_file).wait() == 0
    check_whole(tmp_path)
    assert {name: (sink / "data" / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point in FEW_POINTS else pytest.mark.slow)
        for point in POINTS
        if not point.endswith("_table")  # tests/tables
    ],
)
def test_a_run_goes_on_after_a_driver_that_died(source, model, tmp_path, point):
    job_file = write_job(tmp_path, model, WHAT_REACHES.get(point), max_num_seqs=4, step_s=0.005)
    assert start(job_file, RAYBATCH_FAULT=point).wait() == EXIT_CODE
    Job.from_yaml(job_file).run(progress=lambda *_: None)
    check_whole(tmp_path)


def test_an_engine_that_is_killed_costs_no_row(source, model, tmp_path):
    hold = Hold(tmp_path, NUM_ROWS // 2)
    fake = {"crash_on": 300, "max_num_seqs": 4, **hold.options}
    stage = fake_stage(model, prompt="{text}", replicas=1, fake=fake)
    job = local_job(source, tmp_path / "out", stage, plan=PLAN)
    before, killed = set(psutil.Process().children()), []

    def kill_when_held(stats, num_rows):
        if stats.rows_done >= NUM_ROWS // 2 and not killed:
            killed.extend(set(psutil.Process().children()) - before)
            killed[0].send_signal(signal.SIGKILL)
            hold.release()

    report = job.run(progress=kill_when_held)
    assert (report.executor, len(killed), report.restarts) == ("local", 1, 1)
    check_whole(tmp_path)


def test_a_row_that_kills_its_engine_is_the_only_error(source, model, tmp_path):
    # "7" is token 55, which is in the prompts of six rows
    stage = fake_stage(
        model, prompt="{text}", replicas=1, fake={"raise_on": ord("7")}, on_error="row"
    )
    report = local_job(source, tmp_path / "out", stage).run(progress=lambda *_: None)
    crashed = [i for i in range(NUM_ROWS) if "7" in str(i)]
    assert report.statuses == {"truncated": NUM_ROWS - len(crashed), "crashed": len(crashed)}


def test_a_job_runs_where_the_caller_has_an_event_loop(source, model, tmp_path):
    job = local_job(source, tmp_path / "out", fake_stage(model, prompt="{text}"))

    async def main():
        return job.run(progress=lambda *_: None)

    assert asyncio.run(main()).rows_out == NUM_ROWS


def test_engines_that_do_not_start_end_the_run_with_their_cause(source, model, tmp_path):
    stage = fake_stage(model, prompt="{text}", replicas=1, fake={"refuse_start": True})
    with pytest.raises(ReplicaError, match="the fake backend refuses to start"):
        local_job(source, tmp_path / "out", stage).run(progress=lambda *_: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool": {"resources": {"disk": 1}}}, r"pool\.resources=.* needs Ray.*executor=ray"),
        ({"pool": {"num_cpus_per_replica": 1}}, r"pool\.num_cpus_per_replica=1.*executor=ray"),
        ({"plan": {"max_driver_bytes": 1}}, r"plan\.max_driver_bytes=1; raise it"),
    ],
    ids=["resources", "cpus", "a large plan"],
)
def test_what_only_ray_can_do_is_refused_before_any_work(source, model, tmp_path, options, message):
    job_file = write_job(tmp_path, model)
    mapping = json.loads(job_file.read_text())
    mapping["stage"]["pool"] |= options.pop("pool", {})
    with pytest.raises(ConfigError, match=message):
        Job.from_mapping(mapping | options).run(progress=lambda *_: None)
    assert not (tmp_path / "out" / "_raybatch").exists()


def test_the_report_says_where_engines_ran(source, model, tmp_path):
    job = local_job(source, tmp_path / "out", fake_stage(model, prompt="{text}", replicas=2))
    report = job.run(progress=lambda *_: None)
    assert "replicas: 2 on one host without Ray, 0 restarts" in report.to_text().splitlines()
    (tmp_path / "out" / "_raybatch" / "report.json").unlink()
    assert report_of(str(tmp_path / "out")).executor == "local"


def test_who_runs_a_job_is_not_told_how_to_map_a_stage(source, model, tmp_path, caplog):
    stage = fake_stage(model, prompt="{text}", replicas=1)
    local_job(source, tmp_path / "out", stage, plan=PLAN).run(progress=lambda *_: None)
    assert "rows at once" not in caplog.text


def test_explaining_a_local_job_measures_an_engine_beside_it(source, model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    stage = fake_stage(model, prompt="{text}", replicas=1, fake={"step_s": 0.0001})
    explanation = local_job(source, tmp_path / "out", stage).explain()
    assert explanation.time is not None
    assert explanation.time.num_replicas == 1
    assert "local, because the job sets it" in str(explanation)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("order", [("local", "ray"), ("ray", "local")], ids=["to ray", "from ray"])
def test_a_job_goes_on_with_another_executor(source, model, tmp_path, order):
    sink, ends, hold = tmp_path / "out", iter(["enough"]), Hold(tmp_path, NUM_ROWS - 2)

    def end_after_a_unit():
        return next(ends, None) if list(sink.glob("data/*.parquet")) else None

    def make(executor):
        fake = {"max_num_seqs": 2, **hold.options}
        stage = fake_stage(model, prompt="{text}", replicas=1, fake=fake)
        return Job(source, sink, stage, plan=PLAN, executor=executor)

    first = make(order[0]).run(progress=lambda *_: None, ending=end_after_a_unit)
    assert 0 < first.rows_todo < NUM_ROWS
    hold.release()
    report = make(order[1]).run(progress=lambda *_: None)
    assert [run.executor for run in report.history.runs] == list(order)
    check_whole(tmp_path)


def test_an_output_without_an_answer_is_begun_again_by_another_job(source, model, tmp_path, caplog):
    def run(**fake):
        stage = fake_stage(model, prompt="{text}", fake=fake)
        return local_job(source, tmp_path / "out", stage).run()

    with pytest.raises(ReplicaError, match="refuses to start"):
        run(refuse_start=True)
    assert len(read_plans(str(tmp_path / "out"))) == 1
    caplog.set_level("INFO", logger="raybatch")
    assert run(max_model_len=64).rows_out == NUM_ROWS
    assert "removing the plan of another job" in caplog.text
    with pytest.raises(ConfigError, match="belongs to another job: backend is"):
        run(max_model_len=65)


def test_a_package_that_engines_lack_here_is_named_before_anything_is_planned(
    source, tmp_path, model, monkeypatch
):
    kinds = registry.BACKENDS
    lacking = dataclasses.replace(kinds["fake"], package="nowhere", missing=lambda: "get nowhere")
    monkeypatch.setattr(registry, "BACKENDS", {**kinds, "fake": lacking})
    job = local_job(source, tmp_path / "out", fake_stage(model, prompt="{text}"))
    with pytest.raises(MissingDependency, match="get nowhere"):
        job.run()
    assert not list(tmp_path.glob("out/**/*plan*"))
