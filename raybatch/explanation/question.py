"""What is asked of a job, and what is known of the engines that would run it."""

from dataclasses import dataclass

from raybatch.actors.executors.local_measure import cached_model, measure_local
from raybatch.actors.executors.local_pools import gpus_of_host, plan_local_placement
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
from raybatch.errors import ConfigError, MeasureError
from raybatch.planning.planned import PlannedRun
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import core_share_of, money

# rows of which an explanation simulates each order, by default
MAX_ROWS_EXPLAINED = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be said of a job.

    Args:
        spec: of the pool that runs it, with a backend that is decided.
        kv_tokens: KV cache of one engine; None takes that of the cost model.
        measured_kv_tokens: what an engine had that has run; taken where neither is known.
        measure: start an engine to measure its speed, where no cost model is kept.
        weights: whether replicas share weights, and why; "" where the job says that they do not.
        lint: look for a better order of the template's fields.
        deadline_s: of a run, in seconds; None where it has none.

    Raises:
        ConfigError: the price is negative or not finite, or the KV cache no whole number above 0.
    """

    job: PlannedRun
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
                "for the KV cache of the engine"
            )
        if self.price_per_engine_hour is not None:
            # a wrong price is reported before the work, not when it is shown
            money(0.0, 1, self.price_per_engine_hour)


def placement_of(question: Question) -> Placement:
    """Return a pool's engines on the cluster that is connected, or on this host without one."""
    if question.is_local or connected_ray() is None:
        return plan_local_placement(question.spec)
    return plan_placement(question.spec, cluster_now())


def core_share_in(placement: Placement, spec: PoolSpec) -> float:
    """Return the share of a core that each thread of a pool's engines has; hosts are like this one.

    It is 1 where engines compute on GPUs, or elsewhere.
    """
    is_on_gpu = spec.engine.device != "cpu" and (placement.num_gpus or gpus_of_host())
    if is_on_gpu or not type_of(spec.backend).has_weights:
        return 1.0
    return core_share_of(usable_cores(), placement.num_engines_on_host, spec.engine.num_threads)


def cost_model_of(question: Question) -> tuple[CostModel | None, str]:
    spec = question.spec
    if type_of(spec.backend).is_endpoint:
        return None, NO_SPEED_OF_ENDPOINTS
    if spec.backend.task != "generate":
        return None, "only engines that generate are measured"
    if not question.measure:
        costs = cached_model(spec, placement_of(question).num_engines_on_host)
        return costs, "" if costs else "this model was not measured on this host yet"
    try:
        if question.is_local:
            return measure_local(spec), ""
        from raybatch.actors.executors.ray_measure import measure_pool  # Ray is slow to load

        return measure_pool(spec), ""
    except MeasureError as error:
        return None, str(error)
