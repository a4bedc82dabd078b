"""Explains a source: plans it without running it, and says how long it would take."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from raybatch.actors.executors.local_measure import measure_local
from raybatch.actors.executors.local_pools import plan_local_placement
from raybatch.actors.replicas.placement import cluster_now, connected_ray, plan_placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.cost_cache import NO_SPEED_OF_ENDPOINTS, cost_model_path, load_cost_model
from raybatch.backends.openai.options import openai_options
from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError, MeasureError, error_text
from raybatch.explanation.build import (
    MAX_ROWS_EXPLAINED,
    cache_size,
    explain_plan,
    explain_profile,
    with_orders,
)
from raybatch.explanation.facts import TimeEstimate
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.explanation.record import Explanation, KVSize
from raybatch.planning.layout_lint import lint_source, why_layout_is_not_linted
from raybatch.planning.planned import LargePlan, PlannedInput, PlannedRun, planned_work
from raybatch.planning.run import fit_units, is_small
from raybatch.planning.small import gather, plan_gathered
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import estimate, money
from raybatch.policy.cost.work import WorkTotals, merge_work
from raybatch.prefix.outline import join_outlines
from raybatch.prefix.profile import InputProfile
from raybatch.rows.stage_model import find_model, load_tokenizer
from raybatch.text.prompt_tokenizer import PromptTokenizer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is to be said of a job.

    Args:
        spec: of the pool that runs it, with a backend that is decided.
        backend_reason: why it is that one; "" where the user named it.
        kv_tokens: KV cache of one engine; None takes that of the cost model.
        kv_tokens_found: what an engine had that has run; taken where neither is known.
        measure: start an engine to measure its speed, where no cost model is kept.
        max_rows: rows of which each order is simulated.
        lint: look for a better order of the template's fields.
        is_local: engines run without Ray.

    Raises:
        ConfigError: the price is negative or not finite, or the KV cache no whole number above 0.
    """

    job: PlannedRun
    spec: PoolSpec
    name: str
    backend_reason: str = ""
    kv_tokens: int | None = None
    kv_tokens_found: int | None = None
    price_per_engine_hour: float | None = None
    measure: bool = True
    max_rows: int = MAX_ROWS_EXPLAINED
    lint: bool = True
    is_local: bool = False

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


def explain_source(question: Question) -> Explanation:
    """Plan a source and explain it; nothing is generated, also not for a probe."""
    source = question.job.source
    if not source.num_rows:
        return _explain_nothing(question)
    job = replace(question.job, plan=fit_units(question.job.plan, source))
    question = replace(question, job=job)
    if is_small(source, job.plan):
        return explain_planned(question, plan_gathered(gather(job), job.config, job.plan))
    from raybatch.planning.large import plan_large  # Ray is slow to load

    return explain_planned(question, plan_large(job))


def explain_planned(question: Question, planned: PlannedInput | LargePlan) -> Explanation:
    """Explain a source that has been planned."""
    job, spec = question.job, question.spec
    tokenizer = load_tokenizer(job.config, find_model(job.config))
    costs, why_not = _cost_model(question)
    common: dict[str, Any] = {
        "source": question.name,
        "model": spec.model,
        "plan": job.plan,
        "no_time": why_not,
        "price_per_engine_hour": question.price_per_engine_hour,
        "layout": _layout(job, tokenizer) if question.lint else "",
    }
    kv = _kv_size(question, costs)
    if isinstance(planned, PlannedInput):
        explanation = explain_plan(
            planned,
            engine=spec.engine,
            kv=kv,
            decode=partial(tokenizer.decode, skip_special_tokens=False),
            max_rows=question.max_rows,
            **common,
        )
    else:
        explanation = _explain_large(question, planned, kv, common)
    explanation = replace(
        explanation,
        backend=spec.backend.kind,
        backend_reason=question.backend_reason,
        has_cache=spec.engine.enable_prefix_caching,
        ends_at_error=job.config.on_error == "raise",
        answer_cost=_answer_cost(spec, explanation),
    )
    if costs is None:
        return explanation
    work = _work(question, planned)
    if explanation.own_order is not None and not explanation.is_reordered:
        work = work.with_cache(explanation.own_order.computed_tokens)
    return replace(explanation, time=_time(costs, work, _num_replicas(question)[0]))


def _answer_cost(spec: PoolSpec, explanation: Explanation) -> tuple[float, float] | None:
    """Return what an endpoint's answers cost, with all that is shared cached, and with nothing."""
    if not type_of(spec.backend).has_prices(spec.backend):
        return None
    options, profile = openai_options(spec.backend.options), explanation.profile
    num_input, num_output = profile.tree.logical_tokens, profile.output_tokens.total
    saved = num_input - profile.computed_tokens
    return options.cost(num_input, saved, num_output), options.cost(num_input, 0, num_output)


def _layout(job: PlannedRun, tokenizer: PromptTokenizer) -> str:
    """Return a better order of the template's fields, or why none is looked for."""
    hint = lint_source(job.source, job.config, tokenizer)
    return why_layout_is_not_linted(job.config) if hint is None else hint.text


def _kv_size(question: Question, costs: CostModel | None) -> KVSize | None:
    if question.kv_tokens is not None:
        return KVSize(tokens=question.kv_tokens, origin="given")
    if costs is not None:
        return KVSize(tokens=costs.limits.kv_tokens, origin="measured")
    if question.kv_tokens_found is not None:
        return KVSize(tokens=question.kv_tokens_found, origin="of the engines")
    return None


def _explain_large(
    question: Question, planned: LargePlan, kv: KVSize | None, common: dict[str, Any]
) -> Explanation:
    job, num_probed = question.job, len(planned.probed.row)
    profile, unit_rows = planned.profile, job.plan.unit_rows
    # rows of a probe come before those of the parts, rows that no engine sees behind them
    num_others = -(-num_probed // unit_rows) - (-sum(profile.unasked.values()) // unit_rows)
    explanation = explain_profile(
        replace(profile, num_units=profile.num_units + num_others),
        is_reordered=planned.is_reordered(job.plan),
        is_probed=num_probed > 0,
        boxes=tuple(
            join_outlines([(part.boxes, part.profile.num_asked) for part in planned.parts])
        ),
        **common,
    )
    if kv is None:
        return explanation
    if not planned.tables:
        why_not = "what was known of the rows of a large plan does not outlast their run"
        return replace(explanation, kv=kv, no_orders=why_not)
    from raybatch.planning.large import forecast_large  # Ray is slow to load

    size = cache_size(question.spec.engine, kv.tokens, planned.block_size)
    return with_orders(
        explanation, forecast_large(job, planned, size, max_rows=question.max_rows), kv
    )


def _explain_nothing(question: Question) -> Explanation:
    return explain_profile(
        InputProfile.merge([]),
        source=question.name,
        model=question.spec.model,
        plan=question.job.plan,
        is_reordered=False,
        no_time="the source has no rows",
        price_per_engine_hour=question.price_per_engine_hour,
    )


def _work(question: Question, planned: PlannedInput | LargePlan) -> WorkTotals:
    if isinstance(planned, LargePlan):
        is_grouped = planned.is_reordered(question.job.plan)
        return merge_work([part.work if is_grouped else part.work_alone for part in planned.parts])
    return planned_work(
        planned.keys, planned.expected_tokens, planned.found, is_grouped=planned.plan.is_reordered
    )


def explain_run(
    question: Question, planned: PlannedInput | LargePlan, actual: RunActual
) -> PlanOutcome | None:
    """Return a run beside its plan; None, with a warning, where the plan cannot be explained.

    The rows are generated and written: no text about them may end their job.
    """
    try:
        likely = _likely_engine_s(question, planned, actual)
        plan = explain_planned(question, planned)
    except Exception as error:
        _logger.warning(
            "the report leaves out the plan, which could not be explained: %s",
            error_text(error),
            exc_info=True,
        )
        return None
    return PlanOutcome(plan=plan, actual=replace(actual, likely_engine_s=likely))


def _likely_engine_s(
    question: Question, planned: PlannedInput | LargePlan, actual: RunActual
) -> tuple[float, float, float] | None:
    """Return the engine seconds that a run's counts lead to expect: expected, low and high."""
    costs, _ = _cost_model(question)
    if costs is None or not actual.num_generated:
        return None
    share = actual.num_generated / actual.num_rows
    done = _work(question, planned).actual(
        computed_tokens=actual.computed_tokens,
        # copies have the tokens of their originals, which are alike on average
        generated_tokens=actual.generated_tokens * share,
        num_rows=actual.num_generated,
    )
    band = estimate(costs, done, actual.num_replicas).engine_s
    return band.expected, band.low, band.high


def _num_replicas(question: Question) -> tuple[int, int]:
    """Return how many engines a pool would have, and how many of them on one host.

    They are those on the cluster that is connected, or on this host where there is none.
    """
    if question.is_local or connected_ray() is None:
        crew = plan_local_placement(question.spec)
    else:
        crew = plan_placement(question.spec, cluster_now())
    return crew.num_replicas, crew.num_engines_on_host


def _cost_model(question: Question) -> tuple[CostModel | None, str]:
    """Return the cost model of the pool's engines, or why there is none."""
    spec = question.spec
    if type_of(spec.backend).is_endpoint:
        return None, NO_SPEED_OF_ENDPOINTS
    if spec.backend.task != "generate":
        return None, "only engines that generate are measured"
    if question.measure:
        try:
            return _measured(question), ""
        except MeasureError as error:
            return None, str(error)
    path = cost_model_path(
        spec.model, spec.backend, spec.engine, num_engines_on_host=_num_replicas(question)[1]
    )
    costs = load_cost_model(path)
    return costs, "" if costs else "this model was not measured on this host yet"


def _measured(question: Question) -> CostModel:
    if question.is_local:
        return measure_local(question.spec)
    from raybatch.actors.executors.ray_measure import measure_pool  # Ray is slow to load

    return measure_pool(question.spec)


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
