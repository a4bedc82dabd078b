"""The door for mechanisms of a pool: who loads which, and what is left without them."""

import json
import pkgutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors import ext
from raybatch.actors.coordinator.rebalancer import Empty, Kill, Rebalancer, Snapshot, Wait
from raybatch.actors.ext import extensions_of
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from tests.stages.support import write_parquet

FOLDERS = sorted(module.name for module in pkgutil.iter_modules(ext.__path__))

HIDING = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if any(name.startswith(f"raybatch.actors.ext.{folder}") for folder in sys.argv[2].split()):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
import raybatch.actors, raybatch.policy
for package in (raybatch.actors, raybatch.policy):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not (".ext." in module.name or module.name.endswith("__main__")):
            importlib.import_module(module.name)
from raybatch.job.job import Job
Job.from_yaml(sys.argv[1]).run(progress=lambda *_: None)
print(*(name for name in sys.modules if ".actors.ext." in name and name.count(".") > 3))
"""


def test_a_job_that_asks_for_no_extension_runs_without_their_folders(tmp_path, model):
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
        [sys.executable, "-c", HIDING, str(path), " ".join(FOLDERS)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert FOLDERS == ["duplicates", "sharing", "teams"]
    assert "" == done.stdout.strip()
    results = pq.read_table(tmp_path / "out")
    assert set(texts) == set(results["text"].to_pylist())
    assert {""} == set(results["__inference_error__"].to_pylist())


@pytest.mark.parametrize(
    ("kind", "options", "num_replicas", "expected"),
    [
        ("fake", {}, 2, []),
        ("native", {}, 1, []),
        ("native", {}, 2, ["Teams"]),
        (
            "native",
            {"share_group": 2, "duplicate_last_rows": True},
            2,
            ["Teams", "Sharing", "Duplicates"],
        ),
        ("fake", {"duplicate_last_rows": True}, 2, ["Duplicates"]),
    ],
)
def test_options_decide_which_extensions_a_pool_has(kind, options, num_replicas, expected):
    backend, pool = BackendConfig(kind=kind), PoolConfig(replicas=num_replicas, **options)
    spec = PoolSpec(model="m", backend=backend, engine=EngineConfig(), pool=pool)
    placement = Placement(
        num_replicas=num_replicas, num_cpus=0, num_gpus=0, num_engines_on_host=num_replicas
    )
    assert expected == [make.__name__ for make in extensions_of(spec, placement)]


def test_a_plan_of_a_pool_is_made_of_its_snapshot_alone():
    rebalancer = object.__new__(Rebalancer)
    rebalancer.extensions = ()
    snapshot = Snapshot(hung={3: "no step"}, leaving={1: "host a leaves"}, wait=Wait(2, 31.0))
    expected = [Kill(3, "no step"), Wait(2, 31.0), Empty(1, "host a leaves", is_replaced=True)]
    assert expected == rebalancer.plan(snapshot) == rebalancer.plan(snapshot)
