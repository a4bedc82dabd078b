"""What is known of a job before it runs, as a record that shows itself.

As text, in a notebook, as JSON, and as an HTML page with the prefix tree drawn.
"""

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from raybatch.config import from_mapping
from raybatch.errors import ConfigError
from raybatch.explanation.facts import (
    group_section,
    input_section,
    order_section,
    sharing_section,
    time_section,
)
from raybatch.pictures.document import Section, to_fragment, to_page, to_text
from raybatch.prefix.forecast import ForecastName, OrderForecast
from raybatch.prefix.histogram import LengthBands
from raybatch.prefix.outline import TreeBox
from raybatch.prefix.profile import InputProfile

# where expected lengths come from that rows had when they were generated before the plan
PROBE = "a probe"
_DERIVED = ("hit_rate", "saved_tokens")
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class KVSize:
    """The KV cache for which orders are compared; `origin` is such as "given" or "measured"."""

    tokens: int
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """Time that engines need; their start, reading and writing come on top.

    Args:
        engine_s: seconds of work, summed over replicas.
        low_s: `wall_s` at the lower end of the likely range.
        origin: what the estimate rests on, such as "measured on this host".
    """

    engine_s: float
    wall_s: float
    low_s: float
    high_s: float
    num_replicas: int
    origin: str = ""


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
        computed_tokens = self.profile.computed_tokens
        return self.profile.tree.logical_tokens - computed_tokens if self.shares else 0

    def sections(self) -> tuple[Section, ...]:
        """Return what there is to say, for any kind of document."""
        makers = (input_section, sharing_section, group_section, time_section, order_section)
        return tuple(section_of(self) for section_of in makers)

    def __str__(self) -> str:
        return to_text(self.title, self.sections())

    def _repr_html_(self) -> str:
        return to_fragment(self.title, self.sections())

    def to_html(self) -> str:
        """Return a page that holds all it needs."""
        return to_page(self.title, self.sections())

    def to_mapping(self) -> dict[str, Any]:
        """Return every field, and what is derived from them, as plain values."""
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in _DERIVED}

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
        stored = {name: value for name, value in mapping.items() if name not in _DERIVED}
        return from_plain(cls, stored, where=where)


def from_plain(cls: type[_T], value: Mapping[str, Any], *, where: str) -> _T:
    """Build the dataclass `cls` from nested mappings and lists, as `dataclasses.asdict` gives them.

    Fields may be plain values, other such dataclasses, tuples, and any of these or None.

    Raises:
        ConfigError: the value does not have the shape of the record.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold the fields of {cls.__name__}, got {value!r}")
    hints = get_type_hints(cls)
    fields = {
        key: _convert(hints[key], inner, f"{where}.{key}") if key in hints else inner
        for key, inner in value.items()
    }
    return from_mapping(cls, fields, where=where)


def _convert(hint: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - data of a file
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, where=where)
    if get_origin(hint) is not tuple:
        return value
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, got {value!r}")
    item, *rest = get_args(hint)
    if rest != [...] and len(value) != len(get_args(hint)):
        raise ConfigError(f"{where} must have {len(get_args(hint))} values, got {value!r}")
    return tuple(_convert(item, inner, f"{where}[{i}]") for i, inner in enumerate(value))
