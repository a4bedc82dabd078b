"""From a planned input to its explanation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raybatch.config import EngineConfig, PlanConfig
from raybatch.explanation.facts import TimeEstimate
from raybatch.explanation.record import PROBE, Explanation, KVSize
from raybatch.pictures.wording import full
from raybatch.planning.planned import PlannedInput
from raybatch.prefix.forecast import OrderForecast, forecast_orders
from raybatch.prefix.hits import CacheSize
from raybatch.prefix.lengths import histogram_bands, length_bands
from raybatch.prefix.outline import TreeBox, outline_tree
from raybatch.prefix.profile import InputProfile, profile_rows
from raybatch.records.types import TokenIds

# rows of which an explanation simulates each order, unless told otherwise
MAX_ROWS_EXPLAINED = 100_000
# tokens of a prefix whose text is shown
_TEXT_TOKENS = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedAndPrice:
    """What the explanation says about time; `no_time` is why nothing is known of the speed."""

    time: TimeEstimate | None = None
    no_time: str = ""
    price_per_engine_hour: float | None = None


def explain_plan(
    planned: PlannedInput,
    *,
    source: str,
    model: str,
    plan: PlanConfig,
    engine: EngineConfig,
    kv: KVSize | None = None,
    speed: SpeedAndPrice | None = None,
    layout: str = "",
    decode: Callable[[TokenIds], str] | None = None,
    max_rows: int = MAX_ROWS_EXPLAINED,
) -> Explanation:
    """Explain a plan; near-linear in rows, plus the simulation of `max_rows` rows three times.

    Without `kv`, the KV cache of one engine, no orders are compared. `layout` is what another order
    of the template's fields would share; `decode` makes texts for the prefixes that are drawn.
    """
    keys, expected = planned.keys, planned.expected_tokens
    explanation = explain_profile(
        _profile(planned),
        source=source,
        model=model,
        plan=plan,
        is_reordered=planned.plan.is_reordered,
        is_probed=planned.is_probed,
        speed=speed,
        layout=layout,
        boxes=_boxes(planned, decode),
    )
    if len(expected):
        explanation = replace(explanation, lengths=length_bands(expected))
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


def _profile(planned: PlannedInput) -> InputProfile:
    return profile_rows(
        planned.keys,
        planned.expected_tokens,
        planned.found,
        num_rows=planned.num_rows,
        unasked=planned.unasked,
        limit_tokens=int(planned.max_tokens.sum()),
        num_units=planned.whole.num_units,
    )


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
    source: str,
    model: str,
    plan: PlanConfig,
    is_reordered: bool,
    is_probed: bool = False,
    speed: SpeedAndPrice | None = None,
    layout: str = "",
    boxes: Sequence[TreeBox] = (),
) -> Explanation:
    """Explain what sums over the rows tell, as for an input that was planned in parts.

    `is_probed`: where the plan asks for a probe, it has been run.
    """
    known, outputs = speed or SpeedAndPrice(), profile.output_tokens
    return Explanation(
        source=source,
        model=model,
        order=plan.order,
        is_reordered=is_reordered,
        is_off=plan.mode == "off",
        profile=profile,
        lengths=histogram_bands(outputs) if outputs.num_values else None,
        lengths_from=_lengths_from(plan, is_probed=is_probed),
        time=known.time,
        no_time=known.no_time,
        price_per_engine_hour=known.price_per_engine_hour,
        layout=layout,
        boxes=tuple(boxes),
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


def _lengths_from(plan: PlanConfig, *, is_probed: bool) -> str:
    if plan.lengths == "probe" and is_probed:
        return PROBE
    column = plan.expected_tokens_column
    return "max_tokens" if column is None else f"column {column!r}"


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
