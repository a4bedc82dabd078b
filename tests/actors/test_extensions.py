"""The door for mechanisms of a pool: who loads which, and what is left without them."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors.coordinator import rebalancer
from raybatch.actors.coordinator.parts import PendingPulls, PoolExtension, PoolParts
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.coordinator.rebalancer import Drain, Rebalancer, Snapshot
from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.installed_extensions import extensions_of
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.starts import StuckWatch
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig, from_mapping
from raybatch.errors import ConfigError, MissingDependency
from raybatch.job.job import Job
from tests.stages.support import write_parquet

HIDING = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("raybatch_extensions"):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
import raybatch.actors, raybatch.policy
for package in (raybatch.actors, raybatch.policy):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not (".ext." in module.name or module.name.endswith("__main__")):
            importlib.import_module(module.name)
from raybatch.job.job import Job
Job.from_yaml(sys.argv[1]).run(progress=lambda *_: None)
print(*(name for name in sys.modules if name.startswith("raybatch_extensions")))
"""


def test_a_job_that_asks_for_no_extension_runs_without_them(tmp_path, model):
    texts = [f"t{i}" for i in range(20)]
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": texts}))
    job = {
        "source": str(tmp_path / "in"),
        "sink": str(tmp_path / "out"),
        "executor": "local",
        "stage": {
            "model": str(model),
            "prompt": "{text}",
            "sampling": {"max_tokens": 4},
            "backend": {"kind": "fake"},
            "pool": {"replicas": 2},
        },
    }
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-c", HIDING, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "" == done.stdout.strip()
    results = pq.read_table(tmp_path / "out")
    assert set(texts) == set(results["text"].to_pylist())
    assert {""} == set(results["__inference_error__"].to_pylist())


@pytest.mark.parametrize(
    ("kind", "options", "num_replicas", "expected"),
    [
        ("fake", {}, 2, []),
        ("native", {}, 1, []),
        ("native", {}, 2, ["TPGroups"]),
        (
            "native",
            {"share_group": 2, "duplicate_last_rows": True},
            2,
            ["TPGroups", "pool_extension", "SpeculativeExecution"],
        ),
        ("fake", {"duplicate_last_rows": True}, 2, ["SpeculativeExecution"]),
    ],
)
def test_options_decide_which_extensions_a_pool_has(kind, options, num_replicas, expected):
    backend, pool = BackendConfig(kind=kind), PoolConfig(replicas=num_replicas, **options)
    spec = PoolSpec(model="m", backend=backend, engine=EngineConfig(), pool=pool)
    placement = Placement(
        num_replicas=num_replicas, num_cpus=0, num_gpus=0, num_engines_on_host=num_replicas
    )
    assert expected == [make.__name__ for make in extensions_of(spec, placement)]


@pytest.fixture
def no_lab(monkeypatch):
    """An environment without raybatch-lab and raybatch-extensions."""
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())


def stage_with(**pool):
    return {
        "source": "in",
        "sink": "out",
        "stage": {"model": "m", "prompt": "{text}", "backend": "fake", "pool": pool},
    }


def test_stages_without_the_laboratory_are_refused_at_the_start(no_lab):
    with pytest.raises(MissingDependency, match=r"pool\.stages=2 .*pip install -e .* -e \./lab"):
        Job.from_mapping(stage_with(replicas=2, stages=2))


def test_automatic_stages_without_the_laboratory_are_none_and_say_so(no_lab, caplog):
    caplog.set_level("INFO", "raybatch")
    pool = PoolConfig(replicas=2, stages="auto")
    spec = PoolSpec(model="m", backend=BackendConfig(kind="fake"), engine=EngineConfig(), pool=pool)
    placement = Placement(num_replicas=2, num_cpus=0, num_gpus=0, num_engines_on_host=2)
    assert extensions_of(spec, placement) == ()
    (message,) = caplog.records
    assert message.levelname == "INFO"
    assert "pool.stages=auto needs raybatch-lab" in message.getMessage()


def test_copies_of_the_last_rows_without_raybatch_extensions_are_refused_at_the_start(no_lab):
    with pytest.raises(MissingDependency, match=r"pip install -e \./raybatch-extensions"):
        Job.from_mapping(stage_with(replicas=2, duplicate_last_rows=True))


@pytest.mark.parametrize("weights", ["shared", "auto"])
def test_shared_weights_without_raybatch_extensions_are_refused_at_the_start(no_lab, weights):
    job = stage_with(replicas=2, **({"share_group": 2} if weights == "shared" else {}))
    job["stage"] |= {"engine": {"weights": weights}, "backend": "native"}
    with pytest.raises(MissingDependency, match=r"pip install -e \./raybatch-extensions"):
        Job.from_mapping(job)


@pytest.mark.parametrize("value", ["off", False])
def test_without_stages_nobody_looks_for_the_laboratory(value, monkeypatch):
    def fail(**_):
        raise AssertionError("looked for")

    monkeypatch.setattr("importlib.metadata.entry_points", fail)
    assert from_mapping(PoolConfig, {"stages": value}, where="pool").stages == "off"
    Job.from_mapping(stage_with(stages=value))


@pytest.mark.parametrize("pool", [{"stages": 1}, {"stages": True}, {"stages": "on"}], ids=str)
def test_stages_that_cannot_be_are_refused(pool):
    with pytest.raises(ConfigError, match=r"pool.*stages"):
        Job.from_mapping(stage_with(**pool))


def test_a_plan_of_a_pool_is_made_of_its_snapshot_alone():
    pool = object.__new__(Rebalancer)
    pool.extensions = ()
    snapshot = Snapshot(draining={1: "host a leaves"})
    expected = [Drain(1, "host a leaves", is_replaced=True)]
    assert expected == pool.plan(snapshot) == pool.plan(snapshot)


class Watcher(PoolExtension):
    """Notes whether it got a snapshot of the pool's rows, and takes CPU time for it."""

    actions = ()

    def __init__(self, clock, cpu_s):
        self.looks, self._clock, self._cpu_s = [], clock, cpu_s

    def snapshot(self, pool, _):
        self.looks.append(pool is not None)
        self._clock.pass_s(self._cpu_s, cpu_s=self._cpu_s)

    def plan(self, snapshot, plan):
        return ()


class Clocks:
    """The clocks of a process, as a test sets them."""

    def __init__(self):
        self.now = self.cpu = 0.0

    def monotonic(self):
        return self.now

    def thread_time(self):
        return self.cpu

    def pass_s(self, seconds, *, cpu_s=0.0):
        self.now += seconds
        self.cpu += cpu_s


def looks_of_three_steps(monkeypatch, *, look_s=0.0, cpu_s=0.0, watcher_s=0.0):
    """Return whether each of three steps of a rebalancer, 0.5 s apart, looked at the rows."""
    clock = Clocks()
    monkeypatch.setattr(rebalancer, "time", clock)
    watcher = Watcher(clock, watcher_s)
    registry = BatchRegistry(RowQueue(3), on_drop=lambda *_: None)
    view = PoolView(registry.queue, registry.lengths)
    look = view.snapshot

    def slow_look(*args, **options):
        clock.pass_s(look_s, cpu_s=cpu_s)
        return look(*args, **options)

    monkeypatch.setattr(view, "snapshot", slow_look)
    parts = PoolParts(
        pool=PoolConfig(),
        plan=Placement(num_replicas=1, num_cpus=0, num_gpus=0, num_engines_on_host=1),
        runtime=SimpleNamespace(failed=()),
        registry=registry,
        replicas=SimpleNamespace(members={}),
        view=view,
        stuck=StuckWatch(PoolConfig()),
        pending_pulls=PendingPulls(),
        spawn=None,
        on_change=None,
    )
    pool = Rebalancer(parts, [lambda _: watcher])
    for _ in range(3):
        pool.step(0.5)
        clock.pass_s(0.5)
    return watcher.looks


def test_what_extensions_take_is_no_time_of_plans_for_rows(monkeypatch):
    """Rows move as often in a pool whose extensions look at each of them."""
    assert [True] * 3 == looks_of_three_steps(monkeypatch, watcher_s=60.0)


def test_a_host_that_stalls_during_a_look_at_the_rows_delays_no_other(monkeypatch):
    assert [True] * 3 == looks_of_three_steps(monkeypatch, look_s=0.4)
    assert [True, False, False] == looks_of_three_steps(monkeypatch, look_s=0.4, cpu_s=0.4)
