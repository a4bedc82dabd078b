"""Counters and gauges on the metrics ports of Ray, as `ray_raybatch_*`; no decision reads them."""

from collections.abc import Mapping
from typing import Any

from raybatch.actors.coordinator.counters import ClientCounters
from raybatch.records.types import ReplicaStats

_UNIT_SECONDS = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0]


class _Rising:
    """A counter that follows a figure which only grows; one that falls back is waited for."""

    def __init__(self, registry: Any, name: str, description: str, *tags: str) -> None:  # noqa: ANN401
        self._counter = registry.Counter(name, description=description, tag_keys=tags)
        self._highest: dict[tuple[str, ...], float] = {}

    def follow(self, total: float, **tags: str) -> None:
        key = tuple(tags.values())
        more = total - self._highest.get(key, 0)
        if more > 0:
            self._highest[key] = total
            self._counter.inc(more, tags=tags)


class PoolMetrics:
    """What the coordinator of a pool knows: rows, tokens, units, restarts."""

    def __init__(self, registry: Any) -> None:  # noqa: ANN401 - a module, or a fake of it
        self._rows = _Rising(registry, "raybatch_rows_total", "Rows back.", "stage", "status")
        self._tokens = {
            name: _Rising(registry, f"raybatch_{name}_total", description, "stage")
            for name, description in (
                ("prompt_tokens", "Prompt tokens of the rows that are back."),
                ("cached_tokens", "Prompt tokens with KV from another request."),
                ("generated_tokens", "Generated tokens of the rows that are back."),
            )
        }
        self._cost = _Rising(
            registry, "raybatch_cost_total", "What an endpoint's answers have cost.", "stage"
        )
        self._restarts = _Rising(
            registry, "raybatch_replica_restarts_total", "Engines started again after a death."
        )
        self._units = registry.Counter(
            "raybatch_units_total", description="Units of commit.", tag_keys=("state",)
        )
        self._unit_seconds = registry.Histogram(
            "raybatch_unit_seconds",
            description="From the first row of a unit to its part.",
            boundaries=_UNIT_SECONDS,
            tag_keys=(),
        )

    def update(self, clients: Mapping[str, ClientCounters], num_restarts: int) -> None:
        for stage, counters in clients.items():
            failed = sum(counters.errors.values())
            self._rows.follow(counters.rows_done - failed, stage=stage, status="ok")
            self._rows.follow(failed, stage=stage, status="error")
            self._tokens["prompt_tokens"].follow(counters.prompt_tokens_done, stage=stage)
            self._tokens["cached_tokens"].follow(counters.cached_tokens, stage=stage)
            self._tokens["generated_tokens"].follow(counters.generated_tokens, stage=stage)
            self._cost.follow(counters.cost, stage=stage)
        self._restarts.follow(num_restarts)

    def unit(self, state: str, seconds: float | None) -> None:
        """Count a unit that came into a state; `seconds` it took, where that is known."""
        self._units.inc(1, tags={"state": state})
        if state == "written" and seconds is not None:
            self._unit_seconds.observe(seconds)


class ReplicaMetrics:
    """What one engine knows of itself."""

    def __init__(self, replica_id: int, registry: Any) -> None:  # noqa: ANN401
        self._replica = str(replica_id)
        self._gauges = {
            name: registry.Gauge(f"raybatch_{name}", description=description, tag_keys=("replica",))
            for name, description in (
                ("kv_usage_ratio", "Share of the KV cache that is in use."),
                ("running_requests", "Requests that generate."),
                ("waiting_requests", "Requests that wait in the engine."),
                ("endpoint_concurrency", "Samples that may be in flight at an endpoint."),
                ("captured_graphs", "CUDA graphs of decode steps."),
            )
        }
        self._retries = _Rising(
            registry, "raybatch_endpoint_retries_total", "Requests sent again.", "replica"
        )
        self._preemptions = _Rising(
            registry, "raybatch_preemptions_total", "Requests that gave up their KV.", "replica"
        )
        self._eager_steps = _Rising(
            registry,
            "raybatch_eager_steps_total",
            "Steps without a CUDA graph, by why, where there are graphs.",
            "replica",
            "reason",
        )
        self._counted = {
            name: _Rising(registry, f"raybatch_{name}_total", description, "replica")
            for name, description in (
                ("swapped_tokens", "Tokens whose KV came back from host memory."),
                ("swapped_bytes", "KV copied to host memory and back."),
                ("checkpoint_bytes", "Of these, copied ahead of a preemption."),
                ("checkpoint_used_bytes", "KV that a preemption found copied already."),
                ("weight_copies", "Layers whose weights were copied to the device."),
                ("weight_copy_bytes", "Weights copied to the device."),
                ("weight_stalls", "Layers whose weights were waited for."),
                ("failed_copies", "Copies of KV or weights that failed."),
                ("drafted_tokens", "Tokens guessed ahead."),
                ("accepted_tokens", "Of these, the right ones."),
                ("graph_steps", "Steps that were repeated from a CUDA graph."),
            )
        }

    def update(self, stats: ReplicaStats) -> None:
        tags = {"replica": self._replica}
        self._gauges["kv_usage_ratio"].set(stats.kv_used_fraction, tags=tags)
        self._gauges["running_requests"].set(stats.num_running, tags=tags)
        self._gauges["waiting_requests"].set(stats.num_waiting, tags=tags)
        if stats.concurrency:
            self._gauges["endpoint_concurrency"].set(stats.concurrency, tags=tags)
        if stats.num_graphs:
            self._gauges["captured_graphs"].set(stats.num_graphs, tags=tags)
        for reason, count in stats.eager_steps.items():
            self._eager_steps.follow(count, replica=self._replica, reason=reason)
        self._retries.follow(stats.num_retries, replica=self._replica)
        self._preemptions.follow(stats.num_preemptions, replica=self._replica)
        for name, count in (
            ("swapped_tokens", stats.num_swapped_tokens),
            ("swapped_bytes", stats.swapped_bytes),
            ("checkpoint_bytes", stats.checkpoint_bytes),
            ("checkpoint_used_bytes", stats.checkpoint_used_bytes),
            ("weight_copies", stats.num_weight_copies),
            ("weight_copy_bytes", stats.weight_copy_bytes),
            ("weight_stalls", stats.num_weight_stalls),
            ("failed_copies", stats.num_failed_copies),
            ("drafted_tokens", stats.num_drafted_tokens),
            ("accepted_tokens", stats.num_accepted_tokens),
            ("graph_steps", stats.num_graph_steps),
        ):
            self._counted[name].follow(count, replica=self._replica)
