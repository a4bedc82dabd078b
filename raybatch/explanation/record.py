"""What is known of a job before it runs, as a record that shows itself.

As text, in a notebook, as JSON, and as an HTML page with the prefix tree drawn.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raybatch.backends.choice import backend_text
from raybatch.errors import ConfigError
from raybatch.explanation.facts import (
    TimeEstimate,
    group_section,
    input_section,
    order_meanings,
    order_section,
    sharing_section,
    time_facts,
    uncompared_section,
)
from raybatch.explanation.plain import from_plain
from raybatch.pictures.document import Section, to_fragment, to_page, to_text
from raybatch.prefix.forecast import ForecastName, OrderForecast
from raybatch.prefix.histogram import LengthBands
from raybatch.prefix.outline import TreeBox
from raybatch.prefix.profile import InputProfile

# where expected lengths come from that rows had when they were generated before the plan
PROBE = "a probe"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSize:
    """The KV cache for which orders are compared; `origin` is such as "given" or "measured"."""

    tokens: int
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What a plan will do, save and cost.

    Args:
        backend: kind of the backend that runs it; "" where there are no rows.
        backend_reason: why it is that one; "" where the user named it.
        is_reordered: rows run in another order than that of the input.
        has_cache: rows find blocks that others have left; else only the groups of a plan share.
        ends_at_error: the run ends at the first row that fails.
        lengths: expected outputs of the rows that engines see; None without rows.
        lengths_from: where they come from, such as "max_tokens".
        kv: None where the size of the cache is not known.
        orders: the orders compared; empty where they are not.
        time: None where nothing is known of the speed.
        answer_cost: of an endpoint's answers, about: where each shared prefix is cached, and where
            none is; None where answers have no prices.
        layout: what another order of the template's fields would share; "" for nothing.
        executor: where a run would have its engines, and why; "" where that is not known.
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
    no_orders: str = "the size of the KV cache is not known"
    time: TimeEstimate | None = None
    no_time: str = ""
    price_per_engine_hour: float | None = None
    answer_cost: tuple[float, float] | None = None
    layout: str = ""
    boxes: tuple[TreeBox, ...] = ()
    executor: str = ""

    @property
    def title(self) -> str:
        """Source and model in one line."""
        return f"raybatch explain: {self.source} with {self.model}"

    def forecast(self, name: ForecastName) -> OrderForecast | None:
        """Return what an order would compute; None where orders are not compared."""
        return next((order for order in self.orders if order.name == name), None)

    @property
    def own_order(self) -> OrderForecast | None:
        """What the order in which rows will run computes; None where orders are not compared."""
        return self.forecast("input" if self.is_off else "planned")

    @property
    def shares(self) -> bool:
        """Whether anything is shared: by the groups of a plan, or in a prefix cache."""
        return self.is_reordered or self.has_cache

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the run does not compute."""
        if self.own_order is not None:
            return self.own_order.hit_rate
        return self.saved_tokens / max(1, self.profile.tree.logical_tokens)

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that the run does not compute."""
        if self.own_order is not None:
            return self.own_order.saved_tokens
        if not self.shares:
            return 0
        return self.profile.tree.logical_tokens - self.profile.computed_tokens

    def sections(self) -> tuple[Section, ...]:
        """Return what there is to say, for any kind of document."""
        profile = self.profile
        return (
            input_section(
                profile, self.lengths, self.lengths_from, ends_at_error=self.ends_at_error
            ),
            sharing_section(profile, self.boxes, self.layout),
            group_section(profile, self.order, is_reordered=self.is_reordered, is_off=self.is_off),
            self._time_section(),
            self._order_section(),
        )

    def _time_section(self) -> Section:
        backend = backend_text(self.backend, self.backend_reason)
        facts = (
            *((("backend", backend),) if self.backend else ()),
            *time_facts(self.time, self.no_time, self.price_per_engine_hour, self.answer_cost),
            *((("executor", self.executor),) if self.executor else ()),
        )
        return Section(title="Time", facts=facts)

    def _order_section(self) -> Section:
        if not self.orders:
            return uncompared_section(self.profile, self.no_orders, shares=self.shares)
        kv = (
            "" if self.kv is None else f"{self.kv.tokens:,} tokens of one engine ({self.kv.origin})"
        )
        orders = [order for order in self.orders if not self.is_off or order.name != "planned"]
        meanings = order_meanings(
            is_off=self.is_off, is_reordered=self.is_reordered, has_cache=self.has_cache
        )
        return order_section(orders, meanings, kv, main="input" if self.is_off else "planned")

    def __str__(self) -> str:
        return to_text(self.title, self.sections())

    def _repr_html_(self) -> str:
        return to_fragment(self.title, self.sections())

    def to_html(self) -> str:
        """Return a page that holds all it needs."""
        return to_page(self.title, self.sections())

    def to_mapping(self) -> dict[str, Any]:
        """Return every field, and what is derived from them, as plain values."""
        return dataclasses.asdict(self) | {
            "hit_rate": self.hit_rate,
            "saved_tokens": self.saved_tokens,
        }

    def to_json(self) -> str:
        """Return `to_mapping` as a JSON object."""
        return json.dumps(self.to_mapping(), indent=2, sort_keys=True)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, where: str) -> "Explanation":
        """Return what `to_mapping` has written.

        Raises:
            ConfigError: the mapping is not that of this version.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {mapping!r}")
        stored = {k: v for k, v in mapping.items() if k not in ("hit_rate", "saved_tokens")}
        return from_plain(cls, stored, where=where)
