"""How long a plan will take, and what that costs."""

from dataclasses import dataclass, replace

from raybatch.backends.choice import told_backend
from raybatch.pictures.document import Section
from raybatch.pictures.wording import count, duration
from raybatch.policy.cost.estimate import money
from raybatch.policy.limits import amount_of_money


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Time that engines need; their start, reading and writing come on top.

    Args:
        engine_s: seconds of work, summed over replicas.
        wall_s: by the clock.
        low_s: `wall_s` at the lower end of the likely range.
        high_s: `wall_s` at the upper end.
        num_replicas: that share the work.
        origin: what the estimate rests on, such as "measured on this host".
    """

    engine_s: float
    wall_s: float
    low_s: float
    high_s: float
    num_replicas: int
    origin: str = ""


def time_section(
    time: TimeEstimate | None,
    why_not: str,
    price_per_engine_hour: float | None,
    answer_cost: tuple[float, float] | None = None,
) -> Section:
    """Say how long and how much, or why that is not known."""
    if time is None:
        reason = f"no cost model: {why_not}" if why_not else "no cost model"
        facts = [("time", reason)]
        if answer_cost is not None:
            least, most = map(amount_of_money, answer_cost)
            facts.append(("money", f"answers cost about {least} to {most}, by shared prefixes"))
        return Section(title="Time", facts=tuple(facts))
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
        amount = f"{price:,.2f}" if price >= 1 else f"{price:.3g}"
        said = f"{amount} at {price_per_engine_hour:,.2f} per engine-hour"
        held = f"{count(time.num_replicas, 'replica')} for all of the time"
        facts.append(("money", f"{said}, {held}"))
    return Section(title="Time", facts=tuple(facts))


def with_backend(section: Section, kind: str, reason: str) -> Section:
    """Return a section that begins with what the engines run, and why where nobody named it."""
    if not kind:
        return section
    return replace(section, facts=(("backend", told_backend(kind, reason)), *section.facts))
