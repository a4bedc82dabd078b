"""Engines that have to share the cores of their host."""

import pytest

from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.explanation import query
from raybatch.explanation.query import core_share_in


@pytest.mark.parametrize(
    ("kind", "device", "gpus", "share"),
    [
        ("native", "auto", 0, 0.25),
        ("native", "auto", 1, 1.0),
        ("native", "cpu", 1, 0.25),
        ("fake", "cpu", 0, 1.0),
    ],
)
def test_engines_on_cpus_share_the_cores_of_a_host(monkeypatch, kind, device, gpus, share):
    monkeypatch.setattr(query, "usable_cores", lambda: 2)
    monkeypatch.setattr(query, "gpus_of_host", lambda: gpus)
    engine = EngineConfig(device=device, num_threads=2)
    spec = PoolSpec(model="m", backend=BackendConfig(kind=kind), engine=engine, pool=PoolConfig())
    placement = Placement(num_replicas=4, num_cpus=0, num_gpus=0, num_engines_on_host=4)
    assert share == core_share_in(placement, spec)
