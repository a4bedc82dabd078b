"""Counters and gauges on the metrics ports of Ray, as `ray_raybatch_*`; no decision reads them."""

from collections.abc import Mapping
from typing import Any

from raybatch.actors.coordinator.counters import ClientCounters
from raybatch.records.types import ReplicaStats

_UNIT_SECONDS = [1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0]
# field of `ReplicaStats`, name of the metric, description
_REPLICA_GAUGES = (
    ("kv_used_fraction", "kv_usage_ratio", "Share of the KV cache that is in use."),
    ("num_running", "running_requests", "Requests that generate."),
    ("num_waiting", "waiting_requests", "Requests that wait in the engine."),
    ("concurrency", "endpoint_concurrency", "Samples that may be in flight at an endpoint."),
    ("num_graphs", "captured_graphs", "CUDA graphs of decode steps."),
)
# 0 where an engine has no such thing
_SHOWN_ABOVE_ZERO = ("concurrency", "num_graphs")
_REPLICA_COUNTERS = (
    ("num_retries", "endpoint_retries", "Requests sent again."),
    ("num_preemptions", "preemptions", "Requests that gave up their KV."),
    ("num_swapped_tokens", "swapped_tokens", "Tokens whose KV came back from host memory."),
    ("swapped_bytes", "swapped_bytes", "KV copied to host memory and back."),
    ("checkpoint_bytes", "checkpoint_bytes", "Of these, copied ahead of a preemption."),
    (
        "checkpoint_used_bytes",
        "checkpoint_used_bytes",
        "KV that a preemption found copied already.",
    ),
    ("num_weight_copies", "weight_copies", "Layers whose weights were copied to the device."),
    ("weight_copy_bytes", "weight_copy_bytes", "Weights copied to the device."),
    ("num_weight_stalls", "weight_stalls", "Layers whose weights were waited for."),
    ("num_failed_copies", "failed_copies", "Copies of KV or weights that failed."),
    ("num_drafted_tokens", "drafted_tokens", "Tokens guessed ahead."),
    ("num_accepted_tokens", "accepted_tokens", "Of these, the right ones."),
    ("num_graph_steps", "graph_steps", "Steps that were repeated from a CUDA graph."),
)
_CLIENT_TOKENS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of the rows that are back."),
    ("cached_tokens", "cached_tokens", "Prompt tokens with KV from another request."),
    ("generated_tokens", "generated_tokens", "Generated tokens of the rows that are back."),
    ("cost", "cost", "What an endpoint's answers have cost."),
)


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
            field: _Rising(registry, f"raybatch_{name}_total", text, "stage")
            for field, name, text in _CLIENT_TOKENS
        }
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
            for field, counter in self._tokens.items():
                counter.follow(getattr(counters, field), stage=stage)
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
            field: registry.Gauge(f"raybatch_{name}", description=text, tag_keys=("replica",))
            for field, name, text in _REPLICA_GAUGES
        }
        self._counters = {
            field: _Rising(registry, f"raybatch_{name}_total", text, "replica")
            for field, name, text in _REPLICA_COUNTERS
        }
        self._eager_steps = _Rising(
            registry,
            "raybatch_eager_steps_total",
            "Steps without a CUDA graph, by why, where there are graphs.",
            "replica",
            "reason",
        )

    def update(self, stats: ReplicaStats) -> None:
        for field, gauge in self._gauges.items():
            value = getattr(stats, field)
            if value or field not in _SHOWN_ABOVE_ZERO:
                gauge.set(value, tags={"replica": self._replica})
        for field, counter in self._counters.items():
            counter.follow(getattr(stats, field), replica=self._replica)
        for reason, count in stats.eager_steps.items():
            self._eager_steps.follow(count, replica=self._replica, reason=reason)
