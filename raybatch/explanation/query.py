"""The query of an explanation, and the placement, cost model and work that follow from it."""

from dataclasses import dataclass

from raybatch.actors.executors.local_pools import (
    cached_model,
    gpus_of_host,
    measure_local,
    plan_local_placement,
)
from raybatch.actors.replicas.placement import (
    Placement,
    cluster_now,
    connected_ray,
    plan_placement,
    usable_cores,
)
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.cost_cache import NO_SPEED_OF_ENDPOINTS
from raybatch.backends.registry import type_of
from raybatch.config import PlanConfig
from raybatch.errors import ConfigError, MeasureError
from raybatch.planning.planned import LargePlan, PlannedInput, RunSpec, planned_work
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import core_share_of, money
from raybatch.policy.cost.work import WorkTotals, merge_work

# default number of rows for which an explanation simulates each order
MAX_ROWS_EXPLAINED = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class JobQuery:
    """Options for explaining a job.

    Args:
        spec: spec of the job's pool, with a decided backend.
        kv_tokens: KV cache tokens of one engine; None uses those of the cost model.
        measured_kv_tokens: KV cache tokens of an engine that has run; used if `kv_tokens` is None
            and there is no cost model.
        measure: start an engine to measure its speed if no cost model is cached.
        weights: how replicas hold weights, and why; "" if the job sets "replicated".
        lint: look for an order of the template's fields that shares more of the prompts.
        deadline_s: deadline in seconds from the start of a run; None: no deadline.

    Raises:
        ConfigError: the price is negative or not finite, or kv_tokens is not a whole number above
            0.
    """

    job: RunSpec
    spec: PoolSpec
    name: str
    backend_reason: str = ""
    weights: str = ""
    kv_tokens: int | None = None
    measured_kv_tokens: int | None = None
    price_per_engine_hour: float | None = None
    measure: bool = True
    max_rows: int = MAX_ROWS_EXPLAINED
    lint: bool = True
    is_local: bool = False
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        kv_tokens = self.kv_tokens
        if kv_tokens is not None and (not isinstance(kv_tokens, int) or kv_tokens < 1):
            raise ConfigError(
                f"kv_tokens must be a whole number of at least 1, got {kv_tokens!r}; leave it out "
                "to use the size of the engine's KV cache"
            )
        if self.price_per_engine_hour is not None:
            # report a wrong price before the work
            money(0.0, 1, self.price_per_engine_hour)


def placement_of(query: JobQuery) -> Placement:
    """Return the number of replicas and where they are placed: on the connected cluster or here."""
    if query.is_local or connected_ray() is None:
        return plan_local_placement(query.spec)
    return plan_placement(query.spec, cluster_now())


def core_share_in(placement: Placement, spec: PoolSpec) -> float:
    """Return the share of a CPU core that each thread of the pool's engines gets, at most 1.

    Hosts are assumed to have as many cores as this one. It is 1 for engines on GPUs and for
    endpoints.
    """
    is_on_gpu = spec.engine.device != "cpu" and (placement.num_gpus or gpus_of_host())
    if is_on_gpu or not type_of(spec.backend).has_weights:
        return 1.0
    return core_share_of(usable_cores(), placement.num_engines_on_host, spec.engine.num_threads)


def cost_model_of(query: JobQuery) -> tuple[CostModel | None, str]:
    spec = query.spec
    if type_of(spec.backend).is_endpoint:
        return None, NO_SPEED_OF_ENDPOINTS
    if spec.backend.task != "generate":
        return None, "only the task generate is measured"
    if not query.measure:
        costs = cached_model(spec, placement_of(query).num_engines_on_host)
        return costs, "" if costs else "this model has not been measured on this host"
    try:
        if query.is_local:
            return measure_local(spec), ""
        from raybatch.actors.executors.ray_pools import measure_pool  # Ray is slow to load

        return measure_pool(spec), ""
    except MeasureError as error:
        return None, str(error)


def work_of_plan(plan: PlanConfig, planned: PlannedInput | LargePlan) -> WorkTotals:
    """Return the work (rows and tokens) of all rows of a plan."""
    if isinstance(planned, LargePlan):
        is_grouped = planned.is_reordered(plan)
        return merge_work([part.work if is_grouped else part.work_alone for part in planned.parts])
    return planned_work(
        planned.keys,
        planned.expected_tokens,
        planned.arrangement,
        is_grouped=planned.plan.is_reordered,
    )
