"""What is counted for Prometheus: with a registry that keeps it, and on a port of Ray."""

import time
import urllib.request

import pytest
import ray
from ray.util import metrics

from raybatch.actors.coordinator.counters import ClientCounters, PoolMetrics, ReplicaMetrics
from raybatch.records.pool_stats import POOL_COUNTS
from raybatch.records.types import ReplicaStats
from tests.actors.pools import SAMPLING, generate, prompts_of, table_of, wait_until

COUNTERS = {
    "raybatch_rows_total",
    "raybatch_prompt_tokens_total",
    "raybatch_cached_tokens_total",
    "raybatch_generated_tokens_total",
    "raybatch_units_total",
    "raybatch_preemptions_total",
    "raybatch_swapped_tokens_total",
    "raybatch_rounded_tokens_total",
    "raybatch_swapped_bytes_total",
    "raybatch_weight_copies_total",
    "raybatch_weight_copy_bytes_total",
    "raybatch_weight_stalls_total",
    "raybatch_rounds_total",
    "raybatch_dummy_rounds_total",
    "raybatch_served_rows_total",
    "raybatch_round_bytes_total",
    "raybatch_failed_copies_total",
    "raybatch_drafted_tokens_total",
    "raybatch_accepted_tokens_total",
    "raybatch_graph_steps_total",
    "raybatch_eager_steps_total",
    "raybatch_replica_hung_total",
    "raybatch_replica_restarts_total",
    "raybatch_moved_rows_total",
    "raybatch_moved_kv_bytes_total",
    "raybatch_teams_total",
    "raybatch_team_steps_total",
    "raybatch_duplicated_rows_total",
    "raybatch_won_duplicates_total",
    "raybatch_endpoint_retries_total",
    "raybatch_cost_total",
}


# of a pool, as its coordinator counts
NO_COUNTS = dict.fromkeys(POOL_COUNTS, 0)


class Registry:
    """Keeps what is counted by name and tags."""

    def __init__(self):
        self.names, self.values = set(), {}

    def _make(self, name, *, description, tag_keys, boundaries=()):
        self.names.add(name)
        return Series(self.values, name, tag_keys)

    Counter = Gauge = Histogram = _make


class Series:
    def __init__(self, values, name, tag_keys):
        self.values, self.name, self.tag_keys = values, name, tag_keys

    def _key(self, tags):
        assert set(tags or {}) == set(self.tag_keys)
        return (self.name, *(tags or {}).values())

    def inc(self, value, tags=None):
        assert value > 0
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0) + value

    def set(self, value, tags=None):
        self.values[self._key(tags)] = value

    def observe(self, value, tags=None):
        self.values.setdefault(self._key(tags), []).append(value)


@pytest.fixture
def registry():
    return Registry()


def counters(**values):
    return ClientCounters(**values)


def test_series_have_the_documented_names(registry):
    PoolMetrics(registry)
    ReplicaMetrics(1, registry)
    of_engines = (
        "kv_usage_ratio",
        "running_requests",
        "waiting_requests",
        "endpoint_concurrency",
        "captured_graphs",
    )
    gauges = {f"raybatch_{name}" for name in of_engines}
    assert COUNTERS | gauges | {"raybatch_unit_seconds"} == registry.names


def test_rows_and_tokens_are_counted_once(registry):
    pool = PoolMetrics(registry)
    found = counters(rows_done=5, prompt_tokens=50, cached_tokens=20, generated_tokens=10)
    found.errors["InvalidPrompt"] = 2
    for _ in range(2):
        pool.update({"s": found}, NO_COUNTS | {"restarts": 1})
    found.rows_done = 7
    pool.update({"s": found}, NO_COUNTS | {"restarts": 1, "moved": 3})
    assert registry.values == {
        ("raybatch_rows_total", "s", "ok"): 5,
        ("raybatch_rows_total", "s", "error"): 2,
        ("raybatch_prompt_tokens_total", "s"): 50,
        ("raybatch_cached_tokens_total", "s"): 20,
        ("raybatch_generated_tokens_total", "s"): 10,
        ("raybatch_replica_restarts_total",): 1,
        ("raybatch_moved_rows_total",): 3,
    }


def test_an_error_found_later_takes_nothing_back(registry):
    pool, found = PoolMetrics(registry), counters(rows_done=5)
    pool.update({"s": found}, NO_COUNTS)
    found.errors["X"] = 1
    pool.update({"s": found}, NO_COUNTS)
    assert 5 == registry.values["raybatch_rows_total", "s", "ok"]


def test_units_are_counted_by_state_with_their_seconds(registry):
    pool = PoolMetrics(registry)
    pool.unit("started", None)
    pool.unit("written", 3.0)
    pool.unit("left", 9.0)
    assert {1} == {
        registry.values["raybatch_units_total", s] for s in ("started", "written", "left")
    }
    assert [3.0] == registry.values[("raybatch_unit_seconds",)]


def test_gauges_of_an_engine_follow_it(registry):
    engine = ReplicaMetrics(3, registry)
    engine.update(ReplicaStats(num_running=4, num_waiting=2, kv_used_fraction=0.5))
    engine.update(
        ReplicaStats(
            num_running=1,
            kv_used_fraction=0.25,
            num_preemptions=2,
            num_drafted_tokens=9,
            num_accepted_tokens=5,
        )
    )
    assert registry.values == {
        ("raybatch_kv_usage_ratio", "3"): 0.25,
        ("raybatch_running_requests", "3"): 1,
        ("raybatch_waiting_requests", "3"): 0,
        ("raybatch_preemptions_total", "3"): 2,
        ("raybatch_drafted_tokens_total", "3"): 9,
        ("raybatch_accepted_tokens_total", "3"): 5,
    }


def test_kv_that_was_moved_to_the_host_and_back_is_told(registry):
    engine = ReplicaMetrics(3, registry)
    for num_tokens in (50, 80):
        engine.update(ReplicaStats(num_swapped_tokens=num_tokens, swapped_bytes=100 * num_tokens))
    assert registry.values["raybatch_swapped_tokens_total", "3"] == 80
    assert registry.values["raybatch_swapped_bytes_total", "3"] == 8000


def test_copies_that_failed_are_told(registry):
    engine = ReplicaMetrics(3, registry)
    for count in (2, 5):
        engine.update(ReplicaStats(num_failed_copies=count))
    assert registry.values["raybatch_failed_copies_total", "3"] == 5


def test_weights_that_were_copied_to_the_device_are_told(registry):
    engine = ReplicaMetrics(3, registry)
    for count in (5, 9):
        engine.update(
            ReplicaStats(
                num_weight_copies=count, weight_copy_bytes=1000 * count, num_weight_stalls=count - 1
            )
        )
    assert registry.values["raybatch_weight_copies_total", "3"] == 9
    assert registry.values["raybatch_weight_copy_bytes_total", "3"] == 9000
    assert registry.values["raybatch_weight_stalls_total", "3"] == 8


def test_steps_with_and_without_a_graph_are_told(registry):
    engine = ReplicaMetrics(3, registry)
    for steps in (4, 9):
        eager = {"prompts": steps, "shared prefix": 2}
        engine.update(ReplicaStats(num_graphs=12, num_graph_steps=steps, eager_steps=eager))
    assert registry.values["raybatch_captured_graphs", "3"] == 12
    assert registry.values["raybatch_graph_steps_total", "3"] == 9
    assert registry.values["raybatch_eager_steps_total", "3", "prompts"] == 9
    assert registry.values["raybatch_eager_steps_total", "3", "shared prefix"] == 2


def test_an_endpoint_tells_its_concurrency_and_its_retries(registry):
    ReplicaMetrics(3, registry).update(ReplicaStats(concurrency=16, num_retries=2))
    assert registry.values["raybatch_endpoint_concurrency", "3"] == 16
    assert registry.values["raybatch_endpoint_retries_total", "3"] == 2


def test_the_oldest_of_the_open_units_is_told():
    found = counters()
    found.unit_opened(3, "h", 7, 10.0)
    found.unit_opened(4, "h", 8, 12.0)
    assert 3.5 == found.unit_closed(3, 13.5)
    assert found.unit_closed(3, 14.0) is None
    assert [4] == list(found.open_units)


def test_ray_takes_what_is_counted():
    pool, engine, found = PoolMetrics(metrics), ReplicaMetrics(1, metrics), counters(rows_done=5)
    pool.update({"s": found}, NO_COUNTS | {"restarts": 1})
    pool.unit("written", 2.0)
    engine.update(ReplicaStats(num_preemptions=1))


def scrape():
    texts = []
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            texts.append(answer.read().decode())
    return "\n".join(texts)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_series_appear_on_the_port_of_ray(own):
    pytest.importorskip("opencensus", reason="the metrics agent needs pip install 'ray[default]'")
    handle = own()
    generate(handle, table_of(prompts_of(8)), (SAMPLING,))
    handle.note_unit(0, "started")
    handle.note_unit(0, "written")
    series = (
        "rows_total{",
        "generated_tokens_total{",
        "kv_usage_ratio{",
        "units_total{",
        "unit_seconds_count{",
    )

    def missing():
        text = scrape()
        return [name for name in series if f"ray_raybatch_{name}" not in text]

    wait_until(lambda: time.sleep(0.5) or not missing())
