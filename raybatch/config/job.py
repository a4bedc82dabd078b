"""Options of a job: its plan, its limits, its waves."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le
from pydantic.dataclasses import dataclass

from raybatch.config.option import (
    CHECKED,
    Answers,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    Speed,
    options,
)
from raybatch.errors import ConfigError
from raybatch.records.types import Sampling

OrderName = Literal["ratio", "ascending", "shuffle", "depth_first", "dual_scan"]


@options("plan.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class PlanConfig:
    """Options of the plan that a job makes of its whole input before it generates."""

    mode: Speed[Literal["auto", "off"]] = "auto"
    """Either "auto", which makes the plan, or "off", which runs rows in input order."""

    order: Speed[OrderName] = "ratio"
    """Of the prefix groups: "ratio" (most output per computed prompt token first), "ascending"
    (the reverse), "shuffle", "depth_first" or "dual_scan"."""

    sharing: Speed[Literal["single_level", "multi_level"]] = "single_level"
    """Either of two: "single_level" computes one prefix for each group; "multi_level" runs whole
    subtrees in the order of the tree, so that prefixes of prefixes are found in the cache."""

    lengths: Speed[Literal["auto", "probe"]] = "auto"
    """Where expected output lengths come from: "auto" takes `expected_tokens_column` where it is
    set and `max_tokens` where not, "probe" generates some rows first."""

    expected_tokens_column: Speed[str | None] = None
    """A column of output lengths; null where nothing is known."""

    probe_fraction: Speed[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Share of the rows that a probe generates first; their results are kept."""

    min_saved_fraction: Speed[Fraction] = 0.01
    """Rows keep the order of the input where sharing saves a smaller share of the prompt
    tokens."""

    unit_rows: Speed[Positive] = 1024
    """Rows that are written together, if groups allow it."""

    max_unit_rows: Speed[Positive] = 4096
    """Groups with more rows are cut between two units."""

    max_driver_bytes: Speed[NonNegative] = 32 << 20
    """An input that takes less memory is planned by the driver alone; a larger one by Ray tasks,
    on hashes of its prompts."""

    seed: Speed[NonNegative] = 0
    """Of the order "shuffle" and of the probe."""

    def __post_init__(self) -> None:
        if self.max_unit_rows < self.unit_rows:
            raise ConfigError(
                f"plan.max_unit_rows is {self.max_unit_rows} and unit_rows "
                f"{self.unit_rows}, but a unit may not be larger than the largest; raise "
                "max_unit_rows or lower unit_rows"
            )
        if self.lengths == "probe" and self.expected_tokens_column is not None:
            raise ConfigError(
                "plan: a probe measures what expected_tokens_column says; give one of them"
            )


@options("limits.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class LimitConfig:
    """What ends a run early: no unit starts, and the finished rows of open ones are kept.

    A run that was stopped goes on when the job is started again, with the same limits afresh.
    """

    max_wall_s: Speed[NonNegativeFloat | None] = None
    """Seconds by the clock."""

    max_tokens: Speed[NonNegative | None] = None
    """Prompt tokens of finished rows and generated tokens, together."""

    max_engine_hours: Speed[NonNegativeFloat | None] = None
    """Hours that engines worked, summed over replicas."""

    max_cost: Speed[NonNegativeFloat | None] = None
    """Of engines by `price_per_engine_hour`, where all replicas count, idle or not, and of an
    endpoint's answers by the prices of its backend."""

    price_per_engine_hour: Speed[NonNegativeFloat | None] = None
    """Of one replica."""

    max_error_rate: Speed[Fraction | None] = None
    """Share of error rows among finished ones."""

    min_rows_for_error_rate: Speed[Positive] = 100
    """Finished rows before that share is looked at."""


# of rows that other sampling options may help
_ASKED_STATUSES = ("truncated", "too_long", "error", "crashed")


@options("waves.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class WaveConfig:
    """A rule by which rows of some status are asked once more, with other options."""

    on: Answers[tuple[str, ...]]
    """Statuses, such as "truncated" or "error"."""

    sampling: Answers[Mapping[str, Any]]
    """Options that win over those of the stage and the row, such as {"max_tokens": 2048}."""

    def __post_init__(self) -> None:
        if not self.on or not set(self.on) <= set(_ASKED_STATUSES):
            raise ConfigError(
                f"waves.on must name statuses of {', '.join(_ASKED_STATUSES)}, got "
                f"{list(self.on)!r}"
            )
        # one value of these decides the type of a column
        names = {f.name for f in dataclasses.fields(Sampling)} - {"n", "logprobs"}
        if not self.sampling or not set(self.sampling) <= names:
            raise ConfigError(
                f"waves.sampling must set sampling options other than n and logprobs, got "
                f"{dict(self.sampling)!r}"
            )
        dataclasses.replace(Sampling(), **self.sampling)
