"""Explains a source: plans it without running it, and says how long it would take."""

import os
from dataclasses import dataclass, replace

import ray

from raybatch.actors.measure import measure_pool
from raybatch.actors.pool import plan_crew
from raybatch.actors.records import PoolSpec
from raybatch.backends.cost_cache import cost_model_path, load_cost_model
from raybatch.engine.tokenizer import Tokenizer
from raybatch.errors import MeasureError
from raybatch.explanation.build import SpeedAndPrice, explain_plan
from raybatch.explanation.record import Explanation
from raybatch.explanation.time import TimeEstimate
from raybatch.policy.cost_model import CostModel
from raybatch.policy.estimate import estimate
from raybatch.policy.work import WorkTotals
from raybatch.stages.layout_lint import lint_source
from raybatch.stages.plan import gather, plan_gathered
from raybatch.stages.planned import PlannedInput, PlannedRun
from raybatch.stages.planner import fit_units
from raybatch.stages.prepare import find_model
from raybatch.stages.work import planned_work

__all__ = ["Question", "explain_planned", "explain_source"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be said of a job.

    Args:
        job: its source and options.
        spec: of the pool that runs it.
        name: of the source.
        kv_tokens: KV cache of one engine; None takes that of the cost model.
        price_per_engine_hour: of one replica, in any currency.
        measure: start an engine to measure its speed, where no cost model is kept.
        max_rows: rows of which each order is simulated.
    """

    job: PlannedRun
    spec: PoolSpec
    name: str
    kv_tokens: int | None = None
    price_per_engine_hour: float | None = None
    measure: bool = True
    max_rows: int = 100_000


def explain_source(question: Question) -> Explanation:
    """Plan a source and explain it; nothing is generated."""
    job = replace(question.job, plan=fit_units(question.job.plan, question.job.source))
    planned = plan_gathered(gather(job), job.config, job.plan)
    return explain_planned(question, planned)


def explain_planned(question: Question, planned: PlannedInput) -> Explanation:
    """Explain a source that has been planned."""
    job, spec = question.job, question.spec
    tokenizer = Tokenizer.load(find_model(job.config))
    hint = lint_source(job.source, job.config, tokenizer)
    costs, why_not = _cost_model(question)
    work = planned_work(
        planned.keys,
        planned.expected_tokens,
        planned.found,
        is_grouped=planned.plan.is_reordered,
    )
    kv_tokens, origin = question.kv_tokens, "given"
    if kv_tokens is None and costs is not None:
        kv_tokens, origin = costs.limits.kv_tokens, "measured"
    return explain_plan(
        planned,
        source=question.name,
        model=spec.model,
        plan=job.plan,
        engine=spec.engine,
        kv_tokens=kv_tokens,
        kv_origin=origin,
        speed=SpeedAndPrice(
            time=None if costs is None else _time(costs, work, num_replicas(spec)),
            no_time=why_not,
            price_per_engine_hour=question.price_per_engine_hour,
        ),
        layout="" if hint is None else hint.text,
        decode=lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=False),
        max_rows=question.max_rows,
    )


def num_replicas(spec: PoolSpec) -> int:
    """Return how many engines a pool would have, here or on the cluster that is connected."""
    if ray.is_initialized():
        return plan_crew(spec).num_replicas
    here = max(1, len(os.sched_getaffinity(0)) // spec.engine.num_threads)
    return spec.pool.replicas or here


def _cost_model(question: Question) -> tuple[CostModel | None, str]:
    """Return the cost model of the pool's engines, or why there is none."""
    spec = question.spec
    if question.measure:
        try:
            return measure_pool(spec), ""
        except MeasureError as error:
            return None, str(error)
    found = load_cost_model(cost_model_path(spec.model, spec.backend, spec.engine))
    return found, "" if found else "this model was not measured on this host yet"


def _time(costs: CostModel, work: WorkTotals, replicas: int) -> TimeEstimate:
    cost = estimate(costs, work, replicas)
    return TimeEstimate(
        engine_s=cost.engine_s.expected,
        wall_s=cost.wall_s.expected,
        low_s=cost.wall_s.low,
        high_s=cost.wall_s.high,
        num_replicas=replicas,
        origin="from measured steps of this model",
    )
