"""Sentences, tables and drawings about an input and its plan; each function makes one section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raybatch.pictures.charts import ShareBar, draw_histogram, draw_shares
from raybatch.pictures.document import Figure, Section, Table
from raybatch.pictures.icicle import draw_icicle
from raybatch.pictures.wording import amount, count, duration, full, percent
from raybatch.planning.sidecar import FILTERED
from raybatch.policy.cost.estimate import money
from raybatch.policy.limits import amount_of_money
from raybatch.prefix.forecast import OrderForecast
from raybatch.prefix.histogram import Histogram, LengthBands
from raybatch.prefix.outline import TreeBox
from raybatch.prefix.profile import InputProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Time that engines need; their start, reading and writing come on top.

    Args:
        engine_s: seconds of work, summed over replicas.
        low_s: `wall_s` at the lower end of the likely range.
        num_replicas: that share the work.
        origin: what the estimate rests on, such as "measured on this host".
    """

    engine_s: float
    wall_s: float
    low_s: float
    high_s: float
    num_replicas: int
    origin: str = ""


def order_meanings(*, is_off: bool, is_reordered: bool, has_cache: bool) -> dict[str, str]:
    """Return what each order stands for; `has_cache`: rows find blocks that others have left."""
    cache = "prefix cache alone" if has_cache else "prefix caching is off"
    in_input = f"rows as they come, {cache}"
    in_groups = "prefixes held for their groups, identical rows once"
    return {
        "input": f"what will run: {in_input}" if is_off else in_input,
        "sorted": f"sorted by prompt, {cache}",
        "planned": in_groups if is_reordered else f"{in_input}, identical rows once",
        "bound": "every shared prefix once, at all depths",
    }


def input_section(
    profile: InputProfile,
    lengths: LengthBands | None,
    lengths_from: str,
    *,
    ends_at_error: bool = False,
) -> Section:
    """Say what goes in and what is expected to come out."""
    prompts, outputs = profile.prompt_tokens, profile.output_tokens
    facts = [("rows", _rows(profile))]
    if profile.unasked:
        facts.append(("not asked", _unasked(profile, ends_at_error=ends_at_error)))
    facts.append(("prompts", f"{amount(prompts.total)} tokens{_spread(prompts)}"))
    figures: tuple[Figure, ...] = (
        Figure(title="Prompt length", svg=draw_histogram(prompts, x_name="prompt tokens")),
    )
    if not profile.limit_tokens:
        return Section(title="Input", facts=tuple(facts), figures=figures)
    facts.append(
        (
            "outputs",
            f"{amount(outputs.total)} tokens expected (from {lengths_from}), "
            f"at most {amount(profile.limit_tokens)}",
        )
    )
    if lengths is not None and lengths.tokens[0] < lengths.tokens[-1]:
        facts.append(("spread", _bands(lengths)))
    figures += (
        Figure(title="Expected output length", svg=draw_histogram(outputs, x_name="output tokens")),
    )
    return Section(title="Input", facts=tuple(facts), figures=figures)


def sharing_section(profile: InputProfile, boxes: Sequence[TreeBox], layout: str) -> Section:
    """Say what prompts have in common, and draw their prefix tree."""
    tree, has_copies = profile.tree, profile.num_generated < profile.num_asked
    if tree.num_nodes:
        shared = (
            f"{count(tree.num_nodes, 'prefix', 'prefixes')}; a row has "
            f"{full(tree.mean_prefix_len)} tokens in them and {full(tree.mean_distinct_len)} of "
            f"its own; {tree.mean_sharing_degree:.1f} rows share a token"
            f"{', copies counted' if has_copies else ''}"
        )
    else:
        shared = "no two prompts begin with the same block of tokens"
    facts = [("sharing", shared)]
    if layout:
        facts.append(("template", f"{layout}; it is yours to change"))
    caption = (
        "Area is prompt tokens. A blue box is a prefix that all rows of its width begin with, so "
        "one computation serves them all, with a shade for each level; grey is what rows have "
        "for themselves. Prefixes of few rows are drawn together, with their mean length. Point at "
        "a box for its numbers and its text."
    )
    if has_copies:
        caption += " Copies of a row are drawn like other rows, and nothing of them is computed."
    drawn = draw_icicle(boxes, num_rows=tree.num_rows) if tree.num_nodes else ""
    figure = Figure(title="Prefix tree", svg=drawn, caption=caption, is_wide=True)
    return Section(title="Sharing", facts=tuple(facts), figures=(figure,))


def group_section(
    profile: InputProfile, order: str, *, is_reordered: bool, is_off: bool
) -> Section:
    """Say how rows are grouped and in what order they run."""
    rows = profile.group_rows
    if not is_reordered:
        why = "the plan is off" if is_off else "sharing saves too little to reorder them"
        reason = f"rows keep the order of the input: {why}"
        return Section(title="Groups", facts=(("plan", reason),))
    alone = count(profile.num_asked - rows.total, "row")
    # a group shares between rows that are generated
    if not profile.num_groups and profile.num_generated < profile.num_asked:
        alone += f", {full(profile.num_generated)} of them generated and the others copies,"
    facts = (
        (
            "plan",
            f"{count(profile.num_groups, 'group')} in order {order!r}, "
            f"{count(profile.num_units, 'unit')} of commit, {alone} in no group",
        ),
        ("group size", _sizes(rows)),
    )
    figures = (
        Figure(
            title="Group size", svg=draw_histogram(rows, x_name="rows of a group", y_name="groups")
        ),
        Figure(
            title="Shared prefix",
            svg=draw_histogram(
                profile.group_prefix, x_name="prefix tokens of a group", y_name="groups"
            ),
        ),
    )
    return Section(title="Groups", facts=facts, figures=figures)


def order_section(
    orders: Sequence[OrderForecast], meanings: Mapping[str, str], kv: str, *, main: str
) -> Section:
    """Compare orders by the prompt tokens that they compute.

    `kv` is the KV cache for which they are compared, in words, `main` the order in which rows will
    run.
    """
    header = ("order", "computed", "saved", "hit rate", "of the prompt tokens")
    rows = tuple(
        (
            order.name,
            amount(order.computed_tokens),
            amount(order.saved_tokens),
            _rate(order),
            meanings[order.name],
        )
        for order in orders
    )
    bars = [
        ShareBar(
            name=order.name,
            share=order.hit_rate,
            error=order.error,
            note=f"{amount(order.computed_tokens)} computed",
            is_main=order.name == main,
        )
        for order in orders
    ]
    figure = Figure(
        title="Prompt tokens that need no computing",
        svg=draw_shares(bars, label="hit rate, share of all prompt tokens"),
        is_wide=True,
    )
    notes = [f"KV cache: {kv}"] if kv else []
    if num_too_large := orders[0].num_rows_too_large:
        notes.append(f"{count(num_too_large, 'row')} too large for this cache are left out")
    if any(order.error or order.is_lower_bound for order in orders):
        notes.append("from a sample of the rows: +- is a 95 % interval, >= a lower bound")
    return Section(
        title="Orders", table=Table(header=header, rows=rows), notes=tuple(notes), figures=(figure,)
    )


def uncompared_section(profile: InputProfile, why_not: str, *, shares: bool) -> Section:
    """Say what can be said of the prompt tokens to compute where orders are not compared.

    `shares` is whether anything that is computed serves another row.
    """
    total = max(1, profile.tree.logical_tokens)
    at_most = f"{percent(1 - profile.bound_tokens / total)} at most"
    once = percent(1 - profile.computed_tokens / total)
    text = (
        f"{once} of the prompt tokens need no computing when each prefix runs once, {at_most}"
        if shares
        else "nothing is shared: prefix caching is off, and rows keep the order of the input "
        f"({at_most} with a plan)"
    )
    return Section(
        title="Orders",
        facts=(("hit rate", text),),
        notes=(f"{why_not}, so orders are not compared",),
    )


def time_facts(
    time: TimeEstimate | None,
    why_not: str,
    price_per_engine_hour: float | None,
    answer_cost: tuple[float, float] | None,
) -> list[tuple[str, str]]:
    """Say how long and how much, or why that is not known."""
    if time is None:
        reason = f"no cost model: {why_not}" if why_not else "no cost model"
        facts = [("time", reason)]
        if answer_cost is not None:
            least, most = map(amount_of_money, answer_cost)
            facts.append(("money", f"answers cost about {least} to {most}, by shared prefixes"))
        return facts
    origin = f", {time.origin}" if time.origin else ""
    facts = [
        (
            "time",
            f"{duration(time.wall_s)} on {count(time.num_replicas, 'replica')}, likely "
            f"{duration(time.low_s)} to {duration(time.high_s)}{origin}",
        ),
        ("engine time", f"{time.engine_s / 3600:,.3g} engine-hours ({duration(time.engine_s)})"),
    ]
    if price_per_engine_hour is not None:
        price = money(time.wall_s, time.num_replicas, price_per_engine_hour)
        rounded = f"{price:,.2f}" if price >= 1 else f"{price:.3g}"
        rate = f"{rounded} at {price_per_engine_hour:,.2f} per engine-hour"
        held = f"{count(time.num_replicas, 'replica')} for all of the time"
        facts.append(("money", f"{rate}, {held}"))
    return facts


def _unasked(profile: InputProfile, *, ends_at_error: bool) -> str:
    kinds = ", ".join(f"{full(n)} {name}" for name, n in sorted(profile.unasked.items()))
    text = f"{count(sum(profile.unasked.values()), 'row')}: {kinds}"
    if ends_at_error and any(name != FILTERED for name in profile.unasked):
        return f"{text}; on_error is 'raise', so the run ends at the first row that fails"
    return text


def _rows(profile: InputProfile) -> str:
    text = f"{full(profile.num_rows)} in the source, {full(profile.num_asked)} for the engines"
    num_saved = profile.num_asked - profile.num_generated
    if num_copies := num_saved or profile.tree.num_duplicates:
        text += f", {count(num_copies, 'copy', 'copies')} of other rows among them"
    return f"{text} (not generated again)" if num_saved else text


def _bands(lengths: LengthBands) -> str:
    """Say which share of the rows is expected to stay below which length."""
    bands = ", ".join(
        f"{100 * share:.0f} % up to {full(tokens)}"
        for share, tokens in zip(lengths.quantiles, lengths.tokens, strict=True)
    )
    top = percent(lengths.top_tenth, 0)
    return f"{bands}; the longest tenth has {top} of the tokens"


def _spread(histogram: Histogram) -> str:
    if not histogram.num_values:
        return ""
    median, high = (amount(histogram.quantile(share)) for share in (0.5, 0.95))
    return (
        f", {full(histogram.mean)} a row (half of them up to {median}, 95 % up to {high}, "
        f"longest {full(histogram.highest)})"
    )


def _sizes(rows: Histogram) -> str:
    if not rows.num_values:
        return "no groups"
    return (
        f"{rows.mean:.1f} rows on average, half of the groups up to {full(rows.quantile(0.5))}, "
        f"largest {full(rows.highest)}"
    )


def _rate(order: OrderForecast) -> str:
    sign = ">= " if order.is_lower_bound else ""
    error = f" +- {100 * order.error:.1f}" if order.error else ""
    return f"{sign}{percent(order.hit_rate)}{error}"
