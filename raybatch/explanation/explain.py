"""Explains a source: plans it without running it, and forecasts savings, run time and cost."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from raybatch.actors.executors.local_pools import gpus_of_host
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import type_of
from raybatch.config import EngineConfig, PlanConfig
from raybatch.errors import CapacityError, ConfigError, error_text
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.explanation.outlook import UnitWork, outlook_of, work_of_units
from raybatch.explanation.query import (
    MAX_ROWS_EXPLAINED,
    JobQuery,
    core_share_in,
    cost_model_of,
    placement_of,
    work_of_plan,
)
from raybatch.explanation.record import PROBE, Explanation, KVSize
from raybatch.pictures.wording import full
from raybatch.planning.layout_lint import lint_source, why_layout_is_not_linted
from raybatch.planning.planned import LargePlan, PlannedInput
from raybatch.planning.run import fit_units, gather, is_small, plan_gathered
from raybatch.policy.choose_engine import EngineInputs, choose_engine
from raybatch.policy.cost.estimate import estimate
from raybatch.policy.cost.layers import RowsAhead
from raybatch.policy.cost.work import WorkTotals
from raybatch.policy.memory_budget import MemoryBudget
from raybatch.prefix.forecast import CacheSize, OrderForecast, forecast_orders
from raybatch.prefix.histogram import histogram_bands, length_bands
from raybatch.prefix.profile import InputProfile, profile_rows
from raybatch.prefix.tree import SummaryBox, join_summaries, summarize_tree
from raybatch.records.types import TokenIds
from raybatch.rows.stage_model import find_model, load_tokenizer

_logger = logging.getLogger(__name__)

# tokens of a prefix that are shown as text
_TEXT_TOKENS = 48


def explain_source(query: JobQuery) -> Explanation:
    """Plan a source and explain it; nothing is generated, not even for a probe."""
    if (reason := type_of(query.spec.backend).why_unusable()) is not None:
        # the hosts of the engines may have another one
        _logger.warning("%s", reason)
    source = query.job.source
    if not source.num_rows:
        return explain_profile(
            InputProfile.merge([]),
            source=query.name,
            model=query.spec.model,
            plan=query.job.plan,
            is_reordered=False,
            no_time="the source has no rows",
            weights=query.weights,
            price_per_engine_hour=query.price_per_engine_hour,
        )
    job = replace(query.job, plan=fit_units(query.job.plan, source))
    query = replace(query, job=job)
    if is_small(source, job.plan):
        planned: PlannedInput | LargePlan = plan_gathered(gather(job), job.config, job.plan)
    else:
        from raybatch.planning.large import plan_large  # Ray is slow to load

        planned = plan_large(job)
    explanation = explain_planned(query, planned)
    work = partial(_work_of, query, planned, explanation)
    return replace(explanation, engine=engine_text(query, explanation, work))


def explain_planned(query: JobQuery, planned: PlannedInput | LargePlan) -> Explanation:
    job, spec = query.job, query.spec
    tokenizer = load_tokenizer(job.config, find_model(job.config))
    costs, why_not = cost_model_of(query)
    layout = ""
    if query.lint:
        hint = lint_source(job.source, job.config, tokenizer)
        layout = why_layout_is_not_linted(job.config) if hint is None else hint.text
    common: dict[str, Any] = {
        "source": query.name,
        "model": spec.model,
        "plan": job.plan,
        "no_time": why_not,
        "price_per_engine_hour": query.price_per_engine_hour,
        "layout": layout,
        "weights": query.weights,
    }
    kv = None
    if query.kv_tokens is not None:
        kv = KVSize(tokens=query.kv_tokens, origin="given")
    elif costs is not None:
        kv = KVSize(tokens=costs.limits.kv_tokens, origin="measured")
    elif query.measured_kv_tokens is not None:
        kv = KVSize(tokens=query.measured_kv_tokens, origin="of the engines")
    if isinstance(planned, LargePlan):
        explanation = _explain_large(query, planned, kv, common)
    else:
        explanation = explain_plan(
            planned,
            engine=spec.engine,
            kv=kv,
            decode=partial(tokenizer.decode, skip_special_tokens=False, after=()),
            max_rows=query.max_rows,
            **common,
        )
    explanation = replace(
        explanation,
        backend=spec.backend.kind,
        backend_reason=query.backend_reason,
        has_cache=spec.engine.enable_prefix_caching,
        ends_at_error=job.config.on_error == "raise",
        answer_cost=_answer_cost(spec, explanation.profile),
    )
    if query.deadline_s is not None:
        units = _units_of(query, planned, explanation)
        outlook = outlook_of(query, costs, units, query.deadline_s)
        explanation = replace(explanation, deadline=outlook)
    if costs is None:
        return explanation
    work = _work_of(query, planned, explanation)
    placement = placement_of(query)
    core_share = core_share_in(placement, query.spec)
    time = estimate(costs, work, placement.num_replicas, core_share=core_share)
    return replace(explanation, time=time)


def explain_plan(
    planned: PlannedInput,
    *,
    plan: PlanConfig,
    engine: EngineConfig,
    kv: KVSize | None = None,
    decode: Callable[[TokenIds], str] | None = None,
    max_rows: int = MAX_ROWS_EXPLAINED,
    **common: Any,  # noqa: ANN401
) -> Explanation:
    """Return the explanation of a plan.

    The time is near-linear in rows, plus that of three simulations of `max_rows` rows. Orders of
    rows are compared for a KV cache of size `kv`; None: not at all. `decode` turns tokens into the
    texts of drawn prefixes. `common` are further fields of `Explanation`, at least source and
    model.
    """
    keys, expected = planned.keys, planned.expected_tokens
    if len(expected):
        common["lengths"] = length_bands(expected)
    profile = profile_rows(
        keys,
        expected,
        planned.arrangement,
        num_rows=planned.num_rows,
        skipped=planned.skipped,
        limit_tokens=int(planned.max_tokens.sum()),
        num_units=planned.whole.num_units,
    )
    explanation = explain_profile(
        profile,
        plan=plan,
        is_reordered=planned.plan.is_reordered,
        is_probed=planned.is_probed,
        boxes=tuple(_boxes(planned, decode)),
        **common,
    )
    if kv is None:
        return explanation
    orders = forecast_orders(
        keys,
        planned.plan,
        planned.arrangement,
        output_tokens=expected,
        size=_cache_size(engine, kv.tokens, keys.block_size),
        max_rows=max_rows,
    )
    return _with_orders(explanation, orders, kv)


def explain_profile(
    profile: InputProfile,
    *,
    plan: PlanConfig,
    is_probed: bool = False,
    **common: Any,  # noqa: ANN401
) -> Explanation:
    """Return the explanation of a plan from sums over its rows, as for an input planned in parts.

    `is_probed`: output lengths were measured by a probe. `common`: further fields of
    `Explanation`, at least source, model and is_reordered.
    """
    lengths_from, outputs = "max_tokens", profile.output_tokens
    if plan.lengths == "probe" and is_probed:
        lengths_from = PROBE
    elif plan.expected_tokens_column is not None:
        lengths_from = f"column {plan.expected_tokens_column!r}"
    fields = {"lengths": histogram_bands(outputs) if outputs.num_values else None, **common}
    is_off = plan.mode == "off"
    return Explanation(
        profile=profile, order=plan.order, is_off=is_off, lengths_from=lengths_from, **fields
    )


def _explain_large(
    query: JobQuery, planned: LargePlan, kv: KVSize | None, common: dict[str, Any]
) -> Explanation:
    job, num_probed = query.job, len(planned.probed.row)
    profile, unit_rows = planned.profile, job.plan.unit_rows
    # rows of a probe come before those of the parts, skipped rows after them
    num_others = -(-num_probed // unit_rows) - (-sum(profile.skipped.values()) // unit_rows)
    boxes = join_summaries([(part.boxes, part.profile.num_requested) for part in planned.parts])
    explanation = explain_profile(
        replace(profile, num_units=profile.num_units + num_others),
        is_reordered=planned.is_reordered(job.plan),
        is_probed=num_probed > 0,
        boxes=tuple(boxes),
        **common,
    )
    if kv is None:
        return explanation
    if not planned.tables:
        why_not = "the plan index of a large plan is freed when it has run"
        return replace(explanation, kv=kv, no_orders=why_not)
    from raybatch.planning.large import forecast_large  # Ray is slow to load

    size = _cache_size(query.spec.engine, kv.tokens, planned.block_size)
    orders = forecast_large(job, planned, size, max_rows=query.max_rows)
    return _with_orders(explanation, orders, kv)


def _cache_size(engine: EngineConfig, kv_tokens: int, block_size: int) -> CacheSize:
    return CacheSize(
        num_blocks=kv_tokens // block_size,
        concurrency=min(engine.max_num_seqs, engine.token_budget),
        finds_blocks=engine.enable_prefix_caching,
    )


def _with_orders(
    explanation: Explanation, orders: tuple[OrderForecast, ...], kv: KVSize
) -> Explanation:
    if orders[0].prompt_tokens:
        return replace(explanation, kv=kv, orders=orders)
    why_not = "no row is sent to an engine"
    if num_rows := orders[0].num_rows_too_large:
        why_not = f"none of {full(num_rows)} rows fits a KV cache of {full(kv.tokens)} tokens"
    return replace(explanation, kv=kv, no_orders=why_not)


def _boxes(planned: PlannedInput, decode: Callable[[TokenIds], str] | None) -> list[SummaryBox]:
    boxes = summarize_tree(planned.arrangement.tree, planned.keys)
    if planned.prompts is None or decode is None:
        return boxes
    for i, box in enumerate(boxes):
        if box.num_nodes == 1:
            start, stop = round(box.token_start), round(box.token_stop)
            shown = min(stop, start + _TEXT_TOKENS)
            text = decode(planned.prompts[box.example_row][start:shown])
            boxes[i] = replace(box, text=text + (" ..." if stop > shown else ""))
    return boxes


def _answer_cost(spec: PoolSpec, profile: InputProfile) -> tuple[float, float] | None:
    """Return the cost of an endpoint's answers with all shared prefixes cached, and with none."""
    if (cost := type_of(spec.backend).cost(spec.backend)) is None:
        return None
    num_input, num_output = profile.tree.logical_tokens, profile.output_tokens.total
    saved = num_input - profile.computed_tokens
    return cost(num_input, saved, num_output), cost(num_input, 0, num_output)


def _work_of(
    query: JobQuery, planned: PlannedInput | LargePlan, explanation: Explanation
) -> WorkTotals:
    """Return the work of a plan, less the cache hits of rows in input order."""
    work = work_of_plan(query.job.plan, planned)
    if explanation.own_order is not None and not explanation.is_reordered:
        return work.with_cache(explanation.own_order.computed_tokens)
    return work


def _units_of(
    query: JobQuery, planned: PlannedInput | LargePlan, explanation: Explanation
) -> UnitWork:
    """Return the work of units, less the cache hits of rows in input order."""
    units = work_of_units(query.job.plan, planned)
    whole = work_of_plan(query.job.plan, planned).computed_tokens
    computed = _work_of(query, planned, explanation).computed_tokens

    def of_first(num_units: int) -> WorkTotals:
        work = units.of_first(num_units)
        return work.with_cache(work.computed_tokens * computed / max(1.0, whole))

    return replace(units, of_first=of_first)


def explain_run(
    query: JobQuery, planned: PlannedInput | LargePlan, actual: RunActual
) -> PlanOutcome | None:
    """Compare a run with its plan; None, with a warning, if the plan cannot be explained.

    The rows are already written, so no error here may fail the job.
    """
    try:
        likely = _likely_engine_s(query, planned, actual)
        plan = explain_planned(query, planned)
    except Exception as error:
        message = "the report lacks the plan, which could not be explained: %s"
        _logger.warning(message, error_text(error), exc_info=True)
        return None
    return PlanOutcome(plan=plan, actual=replace(actual, likely_engine_s=likely))


def _likely_engine_s(
    query: JobQuery, planned: PlannedInput | LargePlan, actual: RunActual
) -> tuple[float, float, float] | None:
    """Return the engine seconds forecast from a run's counts: expected, low and high."""
    costs, _ = cost_model_of(query)
    if costs is None or not actual.num_generated:
        return None
    done = work_of_plan(query.job.plan, planned).actual(
        computed_tokens=actual.computed_tokens,
        # copies have the tokens of their originals, which are alike on average
        generated_tokens=actual.generated_tokens * actual.num_generated / actual.num_rows,
        num_rows=actual.num_generated,
    )
    core_share = core_share_in(placement_of(query), query.spec)
    return estimate(costs, done, actual.num_replicas, core_share=core_share).engine_range()


def engine_text(query: JobQuery, explanation: Explanation, work: Callable[[], WorkTotals]) -> str:
    """Return the execution mode that engines will choose for these rows, and why, as a text.

    "" if engines of the backend do not choose. The choice uses cached measurements of the model's
    layers that an engine made. `work` returns the work of all rows; it is only called if there are
    such measurements.
    """
    spec = query.spec
    if not type_of(spec.backend).chooses_mode or not explanation.profile.num_generated:
        return ""
    engine = spec.engine
    is_gpu = engine.device != "cpu" and gpus_of_host() > 0
    budget = MemoryBudget.resolve(engine, is_gpu=is_gpu)
    if not is_gpu and not budget.may_choose:
        return budget.plain_reason()
    later = "is chosen by the first engine that runs, which measures its layers"
    folder = find_model(query.job.config)
    if find_spec("torch") is None or folder is None:
        return later
    from raybatch.engine.loading.prepared import known_budget  # torch is slow to load

    placement = placement_of(query)
    try:
        common, profile = known_budget(
            folder, engine, num_engines_on_host=placement.num_engines_on_host
        )
        if not common.may_choose:
            return common.plain_reason()
        if profile is None:
            return later
        lengths = (explanation.profile.prompt_tokens, explanation.profile.output_tokens)
        longest = sum(length.highest for length in lengths)
        rows = rows_of(work(), placement.num_replicas, longest)
        choice = choose_engine(EngineInputs.of(common, profile.model, profile.costs(), rows))
    except (ConfigError, CapacityError):
        # reported when engines start
        return later
    return choice.to_text()


def rows_of(work: WorkTotals, num_replicas: int, longest_tokens: float) -> RowsAhead:
    """Return the number and lengths of the rows that one of `num_replicas` engines will run."""
    num_rows, outputs = work.num_rows, np.array(work.output_lengths)
    prompt_tokens = read_tokens = work.computed_tokens / num_rows
    if (decodes := work.generated_tokens - num_rows) > 0:
        # KV read by decodes, without that of generated tokens
        own = num_rows * float((outputs * (outputs - 1) / 2).mean())
        read_tokens = (work.context_reads + work.shared_pairs - own) / decodes
    return RowsAhead.of(
        prompt_tokens,
        outputs,
        work.generated_tokens / num_rows,
        num_rows=-(-num_rows // num_replicas),
        longest_tokens=int(longest_tokens),
        prompt_reads=(work.pairs + work.past_pairs) / max(1.0, work.computed_tokens),
        shared_tokens=max(0.0, read_tokens - prompt_tokens),
        group_rows=work.shared_pairs / work.cascade_reads if work.cascade_reads else 1.0,
    )
