"""The explanation of a job before it runs, as a record.

It is shown as text, in a notebook, as JSON, and as an HTML page with the prefix tree.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raybatch.backends.choice import backend_text
from raybatch.config import from_plain
from raybatch.errors import ConfigError
from raybatch.pictures.charts import ShareBar, draw_histogram, draw_icicle, draw_shares
from raybatch.pictures.document import Figure, Section, Table, to_fragment, to_page, to_text
from raybatch.pictures.wording import amount, count, duration, full, percent
from raybatch.planning.planned import FILTERED
from raybatch.policy.cost.estimate import TimeEstimate, money
from raybatch.policy.deadline import EngineChoice, amount_of_money
from raybatch.prefix.forecast import ForecastName, OrderForecast
from raybatch.prefix.histogram import LengthBands
from raybatch.prefix.profile import InputProfile
from raybatch.prefix.tree import SummaryBox

# origin of expected lengths from a probe
PROBE = "a probe"
_DERIVED = ("hit_rate", "saved_tokens")
# name of `InputProfile.skipped` in stored records
_STORED_SKIPPED = "unasked"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSize:
    """The size of the KV cache for which orders of rows are compared.

    `tokens` is the size; `origin` says where it is from, such as "given" or "measured".
    """

    tokens: int
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsInTime:
    """The rows predicted to be done by a deadline, on the engines of the job.

    Args:
        start_s: seconds until engines accept rows; all times count from the start of the run.
        done_after_s: seconds until all rows that are in time are done; if none is in time, until
            the first unit is done.
        num_possible: units that are in time if the run is as fast as it likely can be.
        row_s: seconds per row, with all engines working at the same time.
    """

    deadline_s: float
    start_s: float
    num_rows: int
    rows_in_time: int
    num_units: int
    units_in_time: int
    num_possible: int
    done_after_s: float
    first_unit_rows: int
    row_s: float

    def __str__(self) -> str:
        limit = duration(self.deadline_s)
        start = f", {duration(self.start_s)} of them before the first row"
        if not self.units_in_time:
            return (
                f"no row is predicted to be done within {limit}: the first unit of "
                f"{count(self.first_unit_rows, 'row')} needs {duration(self.done_after_s)}{start}"
            )
        after = f"after {duration(self.done_after_s)} of {limit}{start}"
        if self.rows_in_time == self.num_rows:
            return f"all {full(self.num_rows)} rows are predicted to be done {after}"
        return (
            f"{full(self.rows_in_time)} of {full(self.num_rows)} rows are predicted to be done "
            f"{after}; the others are left to the next run"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineOutlook:
    """The forecast for a job's deadline before it runs.

    Args:
        rows: the rows predicted to be done in time; None without a prediction.
        choices: the compared settings: numbers of engines and of concurrent rows.
        chosen: the cheapest of `choices` that finishes all rows in time; None if none does.
    """

    deadline_s: float
    rows: RowsInTime | None = None
    choices: tuple[EngineChoice, ...] = ()
    chosen: EngineChoice | None = None

    def section(self, no_time: str) -> Section:
        """Return the forecast as a section of a document.

        `no_time` is the reason why there is no prediction, if there is none.
        """
        if self.rows is None:
            text = f"{duration(self.deadline_s)}; no prediction: {no_time}"
            then = "a run starts units by its measured rate, and keeps finished rows"
            return Section(title="Deadline", facts=(("deadline", text), ("run", then)))
        header = ("replicas", "rows at once", "done after", "engine-hours", "")
        rows = tuple(
            (
                full(one.num_replicas),
                full(one.max_num_seqs),
                duration(one.done_after_s),
                f"{one.engine_hours:.3g}",
                self._mark(one),
            )
            for one in self.choices
        )
        note = "for all rows; engine-hours include engine starts"
        if self.chosen is None and self.choices:
            best = min(self.choices, key=lambda one: one.done_after_s)
            note += (
                f". None meets the deadline: the fastest needs {duration(best.done_after_s)} on "
                f"{count(best.num_replicas, 'replica')}"
            )
        return Section(
            title="Deadline",
            facts=(("deadline", str(self.rows)),),
            table=Table(header=header, rows=rows),
            notes=(note,),
        )

    def _mark(self, one: EngineChoice) -> str:
        if one == self.chosen:
            return "the cheapest in time"
        return "" if one.done_after_s <= self.deadline_s else "too late"


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The forecast savings, run time and cost of a plan: print it, or use `to_json`, `to_html`.

    Args:
        backend: kind of the backend; "" without rows.
        backend_reason: why it was chosen; "" if the user set it.
        is_reordered: rows run in another order than the input.
        has_cache: engines have a prefix cache; else only rows of one prefix group share KV.
        ends_at_error: the run ends at the first failed row.
        lengths: expected output lengths of requested rows; None without rows.
        lengths_from: origin of the lengths, such as "max_tokens".
        answer_cost: approximate costs of an endpoint's answers: (if each shared prefix is cached,
            if none is); None without prices.
        layout: advice for a better order of the template's fields; "" for none.
        executor: where a run would have its engines, and why; "" if unknown.
        engine: how engines run the rows, and why; "" if they do not choose.
        weights: how replicas hold weights, and why; "" if the job sets "replicated".
        deadline: forecast for the deadline; None without one.
    """

    source: str
    model: str
    order: str
    is_reordered: bool
    profile: InputProfile
    backend: str = ""
    backend_reason: str = ""
    is_off: bool = False
    has_cache: bool = True
    ends_at_error: bool = False
    lengths: LengthBands | None = None
    lengths_from: str = "max_tokens"
    kv: KVSize | None = None
    orders: tuple[OrderForecast, ...] = ()
    no_orders: str = "the size of the KV cache is unknown"
    time: TimeEstimate | None = None
    no_time: str = ""
    price_per_engine_hour: float | None = None
    answer_cost: tuple[float, float] | None = None
    layout: str = ""
    boxes: tuple[SummaryBox, ...] = ()
    executor: str = ""
    engine: str = ""
    weights: str = ""
    deadline: DeadlineOutlook | None = None

    @property
    def title(self) -> str:
        """Source and model in one line."""
        return f"raybatch explain: {self.source} with {self.model}"

    def forecast(self, name: ForecastName) -> OrderForecast | None:
        """Return the forecast of an order; None if orders are not compared."""
        return next((order for order in self.orders if order.name == name), None)

    @property
    def own_order(self) -> OrderForecast | None:
        """The forecast of the order in which rows will run; None if orders are not compared."""
        return self.forecast("input" if self.is_off else "planned")

    @property
    def shares(self) -> bool:
        """Whether rows share prefixes: in the groups of a plan, or by a prefix cache."""
        return self.is_reordered or self.has_cache

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that the run will not compute, because they are shared."""
        if self.own_order is not None:
            return self.own_order.hit_rate
        return self.saved_tokens / max(1, self.profile.tree.logical_tokens)

    @property
    def saved_tokens(self) -> int:
        """Number of prompt tokens that the run will not compute, because they are shared."""
        if self.own_order is not None:
            return self.own_order.saved_tokens
        computed_tokens = self.profile.computed_tokens
        return self.profile.tree.logical_tokens - computed_tokens if self.shares else 0

    def sections(self) -> tuple[Section, ...]:
        """Return the sections from which texts and pages are made."""
        makers = (_input_section, _sharing_section, _group_section, _time_section)
        sections = [section_of(self) for section_of in makers]
        if self.deadline is not None:
            sections.append(self.deadline.section(self.no_time))
        return (*sections, _order_section(self))

    def __str__(self) -> str:
        return to_text(self.title, self.sections())

    def _repr_html_(self) -> str:
        return to_fragment(self.title, self.sections())

    def to_html(self) -> str:
        """Return a self-contained HTML page."""
        return to_page(self.title, self.sections())

    def to_mapping(self) -> dict[str, Any]:
        """Return all fields and derived values as plain values."""
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in _DERIVED}
        return values | {"profile": _renamed(values["profile"], "skipped", _STORED_SKIPPED)}

    def to_json(self) -> str:
        """Return `to_mapping` as a JSON object."""
        return json.dumps(self.to_mapping(), indent=2, sort_keys=True)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, where: str) -> "Explanation":
        """Build an explanation from a result of `to_mapping`; `where` names it in messages.

        Raises:
            ConfigError: the mapping is from another version.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {mapping!r}")
        stored = {name: value for name, value in mapping.items() if name not in _DERIVED}
        if isinstance(stored.get("profile"), Mapping):
            stored["profile"] = _renamed(stored["profile"], _STORED_SKIPPED, "skipped")
        return from_plain(cls, stored, where=where)


def _renamed(mapping: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in mapping.items()}


def _input_section(explanation: Explanation) -> Section:
    profile, lengths = explanation.profile, explanation.lengths
    prompts, outputs = profile.prompt_tokens, profile.output_tokens
    rows = f"{full(profile.num_rows)} in the source, {full(profile.num_requested)} for the engines"
    num_saved = profile.num_requested - profile.num_generated
    if num_copies := num_saved or profile.tree.num_duplicates:
        rows += f", {count(num_copies, 'copy', 'copies')} of other rows among them"
    facts = [("rows", f"{rows} (not generated again)" if num_saved else rows)]
    if skipped := profile.skipped:
        kinds = ", ".join(f"{full(n)} {name}" for name, n in sorted(skipped.items()))
        text = f"{count(sum(skipped.values()), 'row')}: {kinds}"
        if explanation.ends_at_error and any(name != FILTERED for name in skipped):
            text += "; on_error is 'raise', so the run ends at the first row that fails"
        facts.append(("not sent", text))
    spread = ""
    if prompts.num_values:
        median, high = (amount(prompts.quantile(share)) for share in (0.5, 0.95))
        spread = (
            f", {full(prompts.mean)} a row (half of them up to {median}, 95 % up to {high}, "
            f"longest {full(prompts.highest)})"
        )
    facts.append(("prompts", f"{amount(prompts.total)} tokens{spread}"))
    figures = [Figure(title="Prompt length", svg=draw_histogram(prompts, x_name="prompt tokens"))]
    if profile.limit_tokens:
        expected = f"{amount(outputs.total)} tokens expected (from {explanation.lengths_from})"
        facts.append(("outputs", f"{expected}, at most {amount(profile.limit_tokens)}"))
        if lengths is not None and lengths.tokens[0] < lengths.tokens[-1]:
            bands = ", ".join(
                f"{100 * share:.0f} % up to {full(tokens)}"
                for share, tokens in zip(lengths.quantiles, lengths.tokens, strict=True)
            )
            top = percent(lengths.top_tenth, 0)
            facts.append(("spread", f"{bands}; the longest tenth has {top} of the tokens"))
        drawn = draw_histogram(outputs, x_name="output tokens")
        figures.append(Figure(title="Expected output length", svg=drawn))
    return Section(title="Input", facts=tuple(facts), figures=tuple(figures))


def _sharing_section(explanation: Explanation) -> Section:
    profile, tree = explanation.profile, explanation.profile.tree
    has_copies = profile.num_generated < profile.num_requested
    shared, drawn = "no two prompts share their first block of tokens", ""
    if tree.num_nodes:
        shared = (
            f"{count(tree.num_nodes, 'prefix', 'prefixes')}; a row has "
            f"{full(tree.mean_prefix_len)} tokens in them and {full(tree.mean_distinct_len)} "
            f"unshared; {tree.mean_sharing_degree:.1f} rows share a token"
            f"{', identical rows included' if has_copies else ''}"
        )
        drawn = draw_icicle(explanation.boxes, num_rows=tree.num_rows)
    facts = [("sharing", shared)]
    if explanation.layout:
        facts.append(("template", f"{explanation.layout}; raybatch does not change it"))
    caption = (
        "Area is prompt tokens. A blue box is a prefix shared by all rows of its width, which is "
        "computed once; shades are levels, and grey is not shared. Prefixes of few rows are drawn "
        "together, with their mean length. Point at a box for its numbers and its text."
    )
    if has_copies:
        caption += " Copies of a row are drawn like other rows, but cost nothing."
    figure = Figure(title="Prefix tree", svg=drawn, caption=caption, is_wide=True)
    return Section(title="Sharing", facts=tuple(facts), figures=(figure,))


def _group_section(explanation: Explanation) -> Section:
    profile, rows = explanation.profile, explanation.profile.group_rows
    if not explanation.is_reordered:
        off = (
            "the plan is off" if explanation.is_off else "sharing saves too little to reorder them"
        )
        return Section(
            title="Groups", facts=(("plan", f"rows keep the order of the input: {off}"),)
        )
    alone = count(profile.num_requested - rows.total, "row")
    # a group shares between rows that are generated
    if not profile.num_groups and profile.num_generated < profile.num_requested:
        alone += f", {full(profile.num_generated)} of them generated and the others copies,"
    sizes = "no groups"
    if rows.num_values:
        sizes = (
            f"{rows.mean:.1f} rows on average, half of the groups up to "
            f"{full(rows.quantile(0.5))}, largest {full(rows.highest)}"
        )
    plan = (
        f"{count(profile.num_groups, 'group')} in order {explanation.order!r}, "
        f"{count(profile.num_units, 'unit')} of commit, {alone} in no group"
    )
    prefixes = draw_histogram(
        profile.group_prefix, x_name="prefix tokens of a group", y_name="groups"
    )
    drawn = draw_histogram(rows, x_name="rows of a group", y_name="groups")
    return Section(
        title="Groups",
        facts=(("plan", plan), ("group size", sizes)),
        figures=(
            Figure(title="Group size", svg=drawn),
            Figure(title="Shared prefix", svg=prefixes),
        ),
    )


def _time_section(explanation: Explanation) -> Section:
    facts = []
    if explanation.backend:
        facts.append(("backend", backend_text(explanation.backend, explanation.backend_reason)))
    if explanation.weights:
        facts.append(("weights", explanation.weights))
    time, price = explanation.time, explanation.price_per_engine_hour
    if time is None:
        why = f": {explanation.no_time}" if explanation.no_time else ""
        facts.append(("time", f"no cost model{why}"))
        if explanation.answer_cost is not None:
            least, most = map(amount_of_money, explanation.answer_cost)
            facts.append(("money", f"answers cost about {least} to {most}, by shared prefixes"))
    else:
        replicas = count(time.num_replicas, "replica")
        likely = f"likely {duration(time.low_s)} to {duration(time.high_s)}"
        origin = f", {time.origin}" if time.origin else ""
        hours = f"{time.engine_s / 3600:,.3g} engine-hours ({duration(time.engine_s)})"
        facts.append(("time", f"{duration(time.wall_s)} on {replicas}, {likely}{origin}"))
        facts.append(("engine time", hours))
        if price is not None:
            cost = money(time.wall_s, time.num_replicas, price)
            rounded = f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"
            rate = f"{rounded} at {price:,.2f} per engine-hour"
            facts.append(("money", f"{rate}, {replicas} for all of the time"))
    if explanation.executor:
        facts.append(("executor", explanation.executor))
    if explanation.engine:
        facts.append(("engine", explanation.engine))
    return Section(title="Time", facts=tuple(facts))


def _order_section(explanation: Explanation) -> Section:
    if not explanation.orders:
        return _uncompared_section(explanation)
    main = "input" if explanation.is_off else "planned"
    orders = [o for o in explanation.orders if o.name != "planned" or not explanation.is_off]
    # with a prefix cache, rows also hit blocks of earlier rows
    cache = "prefix cache only" if explanation.has_cache else "prefix caching is off"
    in_input = f"input order, {cache}"
    in_groups = "prefixes pinned for their groups, identical rows once"
    meanings = {
        "input": f"will run: {in_input}" if explanation.is_off else in_input,
        "sorted": f"sorted by prompt, {cache}",
        "planned": in_groups if explanation.is_reordered else f"{in_input}, identical rows once",
        "bound": "every shared prefix once, at all depths",
    }
    header = ("order", "computed", "saved", "hit rate", "of the prompt tokens")
    rows, bars = [], []
    for order in orders:
        name, rate, error = order.name, order.hit_rate, order.error
        computed, saved = amount(order.computed_tokens), amount(order.saved_tokens)
        sign = ">= " if order.is_lower_bound else ""
        shown = f"{sign}{percent(rate)}" + (f" +- {100 * error:.1f}" if error else "")
        rows.append((name, computed, saved, shown, meanings[name]))
        note, is_main = f"{computed} computed", name == main
        bars.append(ShareBar(name=name, share=rate, error=error, note=note, is_main=is_main))
    drawn = draw_shares(bars, label="hit rate, share of all prompt tokens")
    figure = Figure(title="Prompt tokens that need no computing", svg=drawn, is_wide=True)
    notes, kv = [], explanation.kv
    if kv is not None:
        notes.append(f"KV cache: {kv.tokens:,} tokens of one engine ({kv.origin})")
    if num_too_large := orders[0].num_rows_too_large:
        notes.append(f"{count(num_too_large, 'row')} too large for this cache left out")
    if any(order.error or order.is_lower_bound for order in orders):
        notes.append("from a sample of the rows: +- is a 95 % interval, >= a lower bound")
    table = Table(header=header, rows=tuple(rows))
    return Section(title="Orders", table=table, notes=tuple(notes), figures=(figure,))


def _uncompared_section(explanation: Explanation) -> Section:
    profile = explanation.profile
    total = max(1, profile.tree.logical_tokens)
    at_most = f"{percent(1 - profile.bound_tokens / total)} at most"
    once = percent(1 - profile.computed_tokens / total)
    text = (
        f"{once} of the prompt tokens need no computing when each prefix runs once, {at_most}"
        if explanation.shares
        else "nothing is shared: prefix caching is off, and rows keep the order of the input "
        f"({at_most} with a plan)"
    )
    why_not = f"{explanation.no_orders}, so orders are not compared"
    return Section(title="Orders", facts=(("hit rate", text),), notes=(why_not,))
