"""From a planned input to its explanation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raybatch.config import EngineConfig, PlanConfig
from raybatch.explanation.record import PROBE, Explanation, KVSize
from raybatch.pictures.wording import full
from raybatch.planning.planned import PlannedInput
from raybatch.prefix.forecast import OrderForecast, forecast_orders
from raybatch.prefix.histogram import histogram_bands, length_bands
from raybatch.prefix.hits import CacheSize
from raybatch.prefix.outline import TreeBox, outline_tree
from raybatch.prefix.profile import InputProfile, profile_rows
from raybatch.records.types import TokenIds

# rows of which an explanation simulates each order, by default
MAX_ROWS_EXPLAINED = 100_000
# tokens of a prefix whose text is shown
_TEXT_TOKENS = 48


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

    Without `kv`, the KV cache of one engine, no orders are compared. `decode` makes texts for the
    prefixes that are drawn. `known` are further fields of the explanation, source and model at
    least.
    """
    keys, expected = planned.keys, planned.expected_tokens
    if len(expected):
        known["lengths"] = length_bands(expected)
    profile = profile_rows(
        keys,
        expected,
        planned.found,
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
        planned.found,
        output_tokens=expected,
        size=cache_size(engine, kv.tokens, keys.block_size),
        max_rows=max_rows,
    )
    return with_orders(explanation, orders, kv)


def cache_size(engine: EngineConfig, kv_tokens: int, block_size: int) -> CacheSize:
    """Return the cache that one engine has, as a forecast sees it."""
    return CacheSize(
        num_blocks=kv_tokens // block_size,
        concurrency=min(engine.max_num_seqs, engine.max_batched_tokens),
        finds_blocks=engine.enable_prefix_caching,
    )


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
    outputs = profile.output_tokens
    lengths_from = "max_tokens"
    if plan.lengths == "probe" and is_probed:
        lengths_from = PROBE
    elif plan.expected_tokens_column is not None:
        lengths_from = f"column {plan.expected_tokens_column!r}"
    fields = {"lengths": histogram_bands(outputs) if outputs.num_values else None, **known}
    return Explanation(
        profile=profile,
        order=plan.order,
        is_off=plan.mode == "off",
        lengths_from=lengths_from,
        **fields,
    )


def with_orders(
    explanation: Explanation, orders: tuple[OrderForecast, ...], kv: KVSize
) -> Explanation:
    """Return the explanation with the forecast orders, where they differ by anything."""
    if orders[0].prompt_tokens:
        return replace(explanation, kv=kv, orders=orders)
    num_rows = orders[0].num_rows_too_large
    why_not = (
        f"none of {full(num_rows)} rows fits a KV cache of {full(kv.tokens)} tokens"
        if num_rows
        else "no engine sees a prompt"
    )
    return replace(explanation, kv=kv, no_orders=why_not)


def _boxes(planned: PlannedInput, decode: Callable[[TokenIds], str] | None) -> list[TreeBox]:
    boxes = outline_tree(planned.found.tree, planned.keys)
    prompts = planned.prompts
    if prompts is None or decode is None:
        return boxes
    labelled = []
    for box in boxes:
        if box.num_nodes != 1:
            labelled.append(box)
            continue
        start, stop = round(box.token_start), round(box.token_stop)
        text = decode(prompts[box.example_row][start : min(stop, start + _TEXT_TOKENS)])
        labelled.append(replace(box, text=text + (" ..." if stop > start + _TEXT_TOKENS else "")))
    return labelled
