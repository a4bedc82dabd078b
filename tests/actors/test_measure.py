"""Cost models measured in an actor like a replica."""

import dataclasses
import time

import pytest
import ray

from raybatch.actors.executors.ray_pools import measure_pool
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import MeasureError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def spec_of(num_cpus=0, **options):
    return PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake", options=options),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=1, num_cpus_per_replica=num_cpus),
    )


def test_a_pool_is_measured_once_and_then_read(tmp_path):
    first = measure_pool(spec_of(step_s=0.001), folder=tmp_path)
    assert first.step_s > 0.0005
    assert first == measure_pool(spec_of(step_s=0.001), folder=tmp_path)


def test_an_engine_that_does_not_start_says_why(tmp_path):
    with pytest.raises(MeasureError, match="RuntimeError: the fake backend fails"):
        measure_pool(spec_of(fail_start=True), folder=tmp_path)


def test_an_engine_that_dies_is_an_error(tmp_path):
    with pytest.raises(MeasureError, match="none could not be measured: "):
        measure_pool(spec_of(crashes=True), folder=tmp_path)


def test_an_engine_that_takes_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("raybatch.actors.executors.local_pools.MEASURE_S", 0.0)
    pool = PoolConfig(replicas=1, num_cpus_per_replica=0, start_timeout_s=0.1)
    spec = dataclasses.replace(spec_of(start_s=60), pool=pool)
    with pytest.raises(MeasureError, match=r"within 0\.1 s"):
        measure_pool(spec, folder=tmp_path)


def hold(**resources):
    """Return an actor that does nothing but hold what it asked for."""

    # workers do not find the modules of tests
    class Holder:
        def ready(self):
            return True

    actor = ray.remote(Holder).options(**resources).remote()
    ray.get(actor.ready.remote())
    return actor


@pytest.fixture
def all_cpus(ray_cluster):
    """An actor that holds all CPUs."""

    num_cpus = ray.cluster_resources()["CPU"]
    actor = hold(num_cpus=num_cpus)
    yield
    ray.kill(actor)
    while ray.available_resources().get("CPU", 0) < num_cpus:
        time.sleep(0.05)


@pytest.mark.usefixtures("all_cpus")
def test_a_measurement_that_would_wait_for_engines_is_an_error(tmp_path):
    with pytest.raises(MeasureError, match=r"2 CPUs, of which 0 are free; explain the job before"):
        measure_pool(spec_of(num_cpus=2, step_s=0.001), folder=tmp_path)


def test_a_measurement_that_would_wait_for_a_resource_that_is_held_is_an_error(tmp_path):
    head = "node:__internal_head__"
    holder = hold(num_cpus=0, resources={head: 1})
    spec = dataclasses.replace(spec_of(), pool=PoolConfig(replicas=1, resources={head: 1}))
    try:
        with pytest.raises(MeasureError, match=r"__internal_head__s, of which 0 are free"):
            measure_pool(spec, folder=tmp_path)
    finally:
        ray.kill(holder)


def test_a_pool_without_reserved_cpus_is_measured_on_a_busy_cluster(all_cpus, tmp_path):
    assert measure_pool(spec_of(step_s=0.001), folder=tmp_path).step_s > 0.0005
