"""The series of a pool in OpenTelemetry: the same as Ray has, with the same values."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from raybatch import telemetry
from raybatch.actors.coordinator.counters import PoolMetrics, ReplicaMetrics
from raybatch.actors.pool import release_pools
from raybatch.records.types import ReplicaStats
from raybatch.telemetry import Metrics, metrics_of_process
from tests.actors.test_metrics import NO_COUNTS, Registry, counters
from tests.jobs import local_job
from tests.stages.support import fake_stage, write_parquet
from tests.telemetry.conftest import SWITCH


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    provider = MeterProvider([reader])
    yield provider.get_meter("raybatch")
    provider.shutdown()


def points(reader):
    """Return what was exported, by name and values of the tags."""
    data = reader.get_metrics_data()
    if data is None:
        return {}
    return {
        (metric.name, *point.attributes.values()): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_every_series_of_ray_is_there_with_its_value(meter, reader):
    beside = Registry()
    both = Metrics(meter, beside)
    pool, engine = PoolMetrics(both), ReplicaMetrics(3, both)
    found = counters(rows_done=5, prompt_tokens=50)
    found.errors["InvalidPrompt"] = 2
    for _ in range(2):
        pool.update({"s": found}, NO_COUNTS | {"restarts": 1, "hung": 1, "teams": 2})
    pool.unit("written", 7.0)
    engine.update(ReplicaStats(kv_used_fraction=0.25, num_running=4, num_preemptions=2))
    exported = points(reader)
    for key, value in beside.values.items():
        point = exported[key]
        assert [point.sum] == value if isinstance(value, list) else point.value == value, key
    assert set(exported) == set(beside.values)
    assert exported[("raybatch_unit_seconds",)].explicit_bounds[:3] == (1.0, 5.0, 15.0)


def test_without_a_meter_there_is_what_was_there(monkeypatch):
    beside = Registry()
    assert metrics_of_process(beside) is beside
    nobody = metrics_of_process()
    nobody.Counter("a").inc(2.0)
    assert (nobody.meter, nobody.beside) == (None, None)


def test_a_local_job_is_counted(monkeypatch, tmp_path, model, reader, locally):
    monkeypatch.setenv(SWITCH, "http://127.0.0.1:9")
    provider = MeterProvider([reader])
    monkeypatch.setattr(telemetry, "_provider", {"metrics": provider}.get)
    texts = pa.table({"text": [f"t{i}" for i in range(30)]})
    write_parquet(tmp_path / "in" / "a.parquet", texts)
    stage = fake_stage(model, prompt="{text}", replicas=1, fake={"max_num_seqs": 7})
    local_job(tmp_path / "in", tmp_path / "out", stage).run()
    release_pools()
    exported = points(reader)
    by_status = {
        key[-1]: point.value for key, point in exported.items() if key[0] == "raybatch_rows_total"
    }
    assert by_status == {"ok": 30}
    assert {"raybatch_units_total", "raybatch_kv_usage_ratio"} <= {key[0] for key in exported}
    provider.shutdown()


def test_the_meter_is_that_of_the_process(monkeypatch, meter):
    provider = SimpleNamespace(get_meter=lambda name: meter)
    monkeypatch.setattr(telemetry, "_provider", lambda signal: provider)
    assert isinstance(metrics_of_process(), Metrics)
