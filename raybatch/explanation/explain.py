"""Explains a source: plans it without running it, and says how long it would take."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from raybatch.actors.executors.local_pools import gpus_of_host
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.openai.options import openai_options
from raybatch.backends.registry import type_of
from raybatch.config import EngineConfig, PlanConfig
from raybatch.errors import CapacityError, ConfigError, error_text
from raybatch.explanation.deadline import UnitWork, outlook_of, work_of_plan, work_of_units
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.explanation.question import (
    MAX_ROWS_EXPLAINED,
    Question,
    core_share_in,
    cost_model_of,
    placement_of,
)
from raybatch.explanation.record import PROBE, Explanation, KVSize
from raybatch.pictures.wording import full
from raybatch.planning.layout_lint import lint_source, why_layout_is_not_linted
from raybatch.planning.planned import LargePlan, PlannedInput
from raybatch.planning.run import fit_units, is_small
from raybatch.planning.small import gather, plan_gathered
from raybatch.policy.choose_engine import EngineFacts, choose_engine
from raybatch.policy.cost.estimate import estimate
from raybatch.policy.cost.layers import RowsAhead
from raybatch.policy.cost.work import WorkTotals
from raybatch.policy.memory_budget import MemoryBudget
from raybatch.prefix.forecast import CacheSize, OrderForecast, forecast_orders
from raybatch.prefix.histogram import histogram_bands, length_bands
from raybatch.prefix.outline import TreeBox, join_outlines, outline_tree
from raybatch.prefix.profile import InputProfile, profile_rows
from raybatch.records.types import TokenIds
from raybatch.rows.stage_model import find_model, load_tokenizer

_logger = logging.getLogger(__name__)

# tokens of a prefix whose text is shown
_TEXT_TOKENS = 48


def explain_source(question: Question) -> Explanation:
    """Plan a source and explain it; nothing is generated, also not for a probe."""
    if (reason := type_of(question.spec.backend).why_unusable()) is not None:
        # the hosts of the engines may have another one
        _logger.warning("%s", reason)
    source = question.job.source
    if not source.num_rows:
        return explain_profile(
            InputProfile.merge([]),
            source=question.name,
            model=question.spec.model,
            plan=question.job.plan,
            is_reordered=False,
            no_time="the source has no rows",
            weights=question.weights,
            price_per_engine_hour=question.price_per_engine_hour,
        )
    job = replace(question.job, plan=fit_units(question.job.plan, source))
    question = replace(question, job=job)
    if is_small(source, job.plan):
        planned: PlannedInput | LargePlan = plan_gathered(gather(job), job.config, job.plan)
    else:
        from raybatch.planning.large import plan_large  # Ray is slow to load

        planned = plan_large(job)
    explanation = explain_planned(question, planned)
    work = partial(_work_of, question, planned, explanation)
    return replace(explanation, engine=engine_text(question, explanation, work))


def explain_planned(question: Question, planned: PlannedInput | LargePlan) -> Explanation:
    job, spec = question.job, question.spec
    tokenizer = load_tokenizer(job.config, find_model(job.config))
    costs, why_not = cost_model_of(question)
    layout = ""
    if question.lint:
        hint = lint_source(job.source, job.config, tokenizer)
        layout = why_layout_is_not_linted(job.config) if hint is None else hint.text
    known: dict[str, Any] = {
        "source": question.name,
        "model": spec.model,
        "plan": job.plan,
        "no_time": why_not,
        "price_per_engine_hour": question.price_per_engine_hour,
        "layout": layout,
        "weights": question.weights,
    }
    kv = None
    if question.kv_tokens is not None:
        kv = KVSize(tokens=question.kv_tokens, origin="given")
    elif costs is not None:
        kv = KVSize(tokens=costs.limits.kv_tokens, origin="measured")
    elif question.measured_kv_tokens is not None:
        kv = KVSize(tokens=question.measured_kv_tokens, origin="of the engines")
    if isinstance(planned, LargePlan):
        explanation = _explain_large(question, planned, kv, known)
    else:
        explanation = explain_plan(
            planned,
            engine=spec.engine,
            kv=kv,
            decode=partial(tokenizer.decode, skip_special_tokens=False, after=()),
            max_rows=question.max_rows,
            **known,
        )
    explanation = replace(
        explanation,
        backend=spec.backend.kind,
        backend_reason=question.backend_reason,
        has_cache=spec.engine.enable_prefix_caching,
        ends_at_error=job.config.on_error == "raise",
        answer_cost=_answer_cost(spec, explanation.profile),
    )
    if question.deadline_s is not None:
        units = _units_of(question, planned, explanation)
        outlook = outlook_of(question, costs, units, question.deadline_s)
        explanation = replace(explanation, deadline=outlook)
    if costs is None:
        return explanation
    work = _work_of(question, planned, explanation)
    placement = placement_of(question)
    core_share = core_share_in(placement, question.spec)
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
    **known: Any,  # noqa: ANN401
) -> Explanation:
    """Explain a plan; near-linear in rows, plus the simulation of `max_rows` rows three times.

    Without `kv` no orders are compared. `decode` makes texts for the prefixes that are drawn.
    `known` are further fields of the explanation, source and model at least.
    """
    keys, expected = planned.keys, planned.expected_tokens
    if len(expected):
        known["lengths"] = length_bands(expected)
    profile = profile_rows(
        keys,
        expected,
        planned.arrangement,
        num_rows=planned.num_rows,
        unasked=planned.unasked,
        limit_tokens=int(planned.max_tokens.sum()),
        num_units=planned.whole.num_units,
    )
    explanation = explain_profile(
        profile,
        plan=plan,
        is_reordered=planned.plan.is_reordered,
        is_probed=planned.is_probed,
        boxes=tuple(_boxes(planned, decode)),
        **known,
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
    **known: Any,  # noqa: ANN401
) -> Explanation:
    """Explain what sums over the rows tell, as for an input that was planned in parts.

    `is_probed`: where the plan asks for a probe, it has been run. `known` are further fields of the
    explanation: source, model and is_reordered at least.
    """
    lengths_from, outputs = "max_tokens", profile.output_tokens
    if plan.lengths == "probe" and is_probed:
        lengths_from = PROBE
    elif plan.expected_tokens_column is not None:
        lengths_from = f"column {plan.expected_tokens_column!r}"
    fields = {"lengths": histogram_bands(outputs) if outputs.num_values else None, **known}
    is_off = plan.mode == "off"
    return Explanation(
        profile=profile, order=plan.order, is_off=is_off, lengths_from=lengths_from, **fields
    )


def _explain_large(
    question: Question, planned: LargePlan, kv: KVSize | None, known: dict[str, Any]
) -> Explanation:
    job, num_probed = question.job, len(planned.probed.row)
    profile, unit_rows = planned.profile, job.plan.unit_rows
    # rows of a probe come before those of the parts, rows that no engine sees behind them
    num_others = -(-num_probed // unit_rows) - (-sum(profile.unasked.values()) // unit_rows)
    boxes = join_outlines([(part.boxes, part.profile.num_asked) for part in planned.parts])
    explanation = explain_profile(
        replace(profile, num_units=profile.num_units + num_others),
        is_reordered=planned.is_reordered(job.plan),
        is_probed=num_probed > 0,
        boxes=tuple(boxes),
        **known,
    )
    if kv is None:
        return explanation
    if not planned.tables:
        why_not = "what was known of the rows of a large plan does not outlast their run"
        return replace(explanation, kv=kv, no_orders=why_not)
    from raybatch.planning.large import forecast_large  # Ray is slow to load

    size = _cache_size(question.spec.engine, kv.tokens, planned.block_size)
    orders = forecast_large(job, planned, size, max_rows=question.max_rows)
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
    why_not = "no engine sees a prompt"
    if num_rows := orders[0].num_rows_too_large:
        why_not = f"none of {full(num_rows)} rows fits a KV cache of {full(kv.tokens)} tokens"
    return replace(explanation, kv=kv, no_orders=why_not)


def _boxes(planned: PlannedInput, decode: Callable[[TokenIds], str] | None) -> list[TreeBox]:
    boxes = outline_tree(planned.arrangement.tree, planned.keys)
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
    """Return what an endpoint's answers cost, with all that is shared cached, and with nothing."""
    if not type_of(spec.backend).has_prices(spec.backend):
        return None
    options = openai_options(spec.backend.options)
    num_input, num_output = profile.tree.logical_tokens, profile.output_tokens.total
    saved = num_input - profile.computed_tokens
    return options.cost(num_input, saved, num_output), options.cost(num_input, 0, num_output)


def _work_of(
    question: Question, planned: PlannedInput | LargePlan, explanation: Explanation
) -> WorkTotals:
    """Return the work of a plan, less what rows as they come find in the prefix cache."""
    work = work_of_plan(question.job.plan, planned)
    if explanation.own_order is not None and not explanation.is_reordered:
        return work.with_cache(explanation.own_order.computed_tokens)
    return work


def _units_of(
    question: Question, planned: PlannedInput | LargePlan, explanation: Explanation
) -> UnitWork:
    """Return the work of units, less what rows as they come find in the prefix cache."""
    units = work_of_units(question.job.plan, planned)
    whole = work_of_plan(question.job.plan, planned).computed_tokens
    computed = _work_of(question, planned, explanation).computed_tokens

    def of_first(num_units: int) -> WorkTotals:
        work = units.of_first(num_units)
        return work.with_cache(work.computed_tokens * computed / max(1.0, whole))

    return replace(units, of_first=of_first)


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
        message = "the report leaves out the plan, which could not be explained: %s"
        _logger.warning(message, error_text(error), exc_info=True)
        return None
    return PlanOutcome(plan=plan, actual=replace(actual, likely_engine_s=likely))


def _likely_engine_s(
    question: Question, planned: PlannedInput | LargePlan, actual: RunActual
) -> tuple[float, float, float] | None:
    """Return the engine seconds that a run's counts lead to expect: expected, low and high."""
    costs, _ = cost_model_of(question)
    if costs is None or not actual.num_generated:
        return None
    done = work_of_plan(question.job.plan, planned).actual(
        computed_tokens=actual.computed_tokens,
        # copies have the tokens of their originals, which are alike on average
        generated_tokens=actual.generated_tokens * actual.num_generated / actual.num_rows,
        num_rows=actual.num_generated,
    )
    core_share = core_share_in(placement_of(question), question.spec)
    return estimate(costs, done, actual.num_replicas, core_share=core_share).engine_range()


def engine_text(
    question: Question, explanation: Explanation, work: Callable[[], WorkTotals]
) -> str:
    """Return how engines run these rows, and why; "" where engines choose nothing.

    Layers are measured by an engine or by `raybatch bench plan`, and read here. `work` is called
    where they were.
    """
    spec = question.spec
    if not type_of(spec.backend).chooses_way or not explanation.profile.num_generated:
        return ""
    engine = spec.engine
    is_gpu = engine.device != "cpu" and gpus_of_host() > 0
    budget = MemoryBudget.resolve(engine, is_gpu=is_gpu)
    if not is_gpu and not budget.may_choose:
        return budget.plain_reason()
    later = (
        "is chosen when an engine has measured its layers; "
        f"`raybatch bench plan {spec.model}` measures them now"
    )
    folder = find_model(question.job.config)
    if find_spec("torch") is None or folder is None:
        return later
    from raybatch.engine.loading.prepared import known_budget  # torch is slow to load

    placement = placement_of(question)
    try:
        known, profile = known_budget(
            folder, engine, num_engines_on_host=placement.num_engines_on_host
        )
        if not known.may_choose:
            return known.plain_reason()
        if profile is None:
            return later
        lengths = (explanation.profile.prompt_tokens, explanation.profile.output_tokens)
        longest = sum(length.highest for length in lengths)
        rows = rows_of(work(), placement.num_replicas, longest)
        choice = choose_engine(EngineFacts.of(known, profile.model, profile.costs(), rows))
    except (ConfigError, CapacityError):
        # said where engines start
        return later
    return choice.to_text()


def rows_of(work: WorkTotals, num_replicas: int, longest_tokens: float) -> RowsAhead:
    """Return the rows of a plan as one of its engines gets them."""
    num_rows, outputs = work.num_rows, np.array(work.output_lengths)
    prompt_tokens = read_tokens = work.computed_tokens / num_rows
    if (decodes := work.generated_tokens - num_rows) > 0:
        # of what decodes read, all but what their rows have generated
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
        group_rows=work.shared_pairs / work.shared_reads if work.shared_reads else 1.0,
    )
