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
    """How a job groups and orders its whole input before it generates."""

    mode: Speed[Literal["auto", "off"]] = "auto"
    """Either "auto" makes the plan, "off" runs rows in input order."""

    order: Speed[OrderName] = "ratio"
    """Order of the prefix groups: "ratio" (most output per computed prompt token first),
    "ascending" (the reverse), "shuffle" (random), "depth_first" (as in the prefix tree) or
    "dual_scan" (compute-heavy and memory-heavy ones mixed)."""

    sharing: Speed[Literal["single_level", "multi_level"]] = "single_level"
    """Either "single_level" shares one prefix per group; "multi_level" also shares prefixes of
    prefixes, by running subtrees of the prefix tree one after the other."""

    lengths: Speed[Literal["auto", "probe"]] = "auto"
    """Source of expected output lengths: "auto" takes `expected_tokens_column` if set, else
    `max_tokens`; "probe" generates some rows first."""

    expected_tokens_column: Speed[str | None] = None
    """A column with the expected output tokens of each row; null where unknown."""

    probe_fraction: Speed[Annotated[float, Gt(0), Le(1)]] = 0.01
    """Share of the rows that a probe generates first; their results are kept."""

    min_saved_fraction: Speed[Fraction] = 0.01
    """Rows keep input order if sharing saves a smaller share of the prompt tokens than this and
    output lengths are unknown."""

    unit_rows: Speed[Positive] = 1024
    """Target size of a unit: rows written together as one file."""

    max_unit_rows: Speed[Positive] = 4096
    """A prefix group with more rows is split over several units."""

    max_driver_bytes: Speed[NonNegative] = 32 << 20
    """Inputs up to this size in memory are planned by the driver alone; larger ones by Ray tasks,
    on hashes of their prompts."""

    seed: Speed[NonNegative] = 0
    """Random seed of the order "shuffle" and of the probe."""

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
    """What ends a run early: no further unit starts, and finished rows are kept.

    The same job started again continues, and its limits count from zero.
    """

    max_wall_s: Speed[NonNegativeFloat | None] = None
    """Wall-clock seconds of the run."""

    max_tokens: Speed[NonNegative | None] = None
    """Prompt tokens of finished rows plus all generated tokens."""

    max_engine_hours: Speed[NonNegativeFloat | None] = None
    """Hours of engine work, summed over replicas."""

    max_cost: Speed[NonNegativeFloat | None] = None
    """Money: `price_per_engine_hour` for all replicas, idle ones too, plus the answers of an
    endpoint at its prices."""

    price_per_engine_hour: Speed[NonNegativeFloat | None] = None
    """Price of one replica per hour, in any currency."""

    max_error_rate: Speed[Fraction | None] = None
    """Share of error rows among finished rows."""

    min_rows_for_error_rate: Speed[Positive] = 100
    """Finished rows before `max_error_rate` is checked."""


# of rows that other sampling options may help
_ASKED_STATUSES = ("truncated", "too_long", "error", "crashed")


@options("waves.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class WaveConfig:
    """A rule that runs rows of some status once more, with other options."""

    on: Answers[tuple[str, ...]]
    """Statuses to retry: "truncated", "too_long", "error", "crashed"."""

    sampling: Answers[Mapping[str, Any]]
    """Sampling options that replace those of the stage and the row, such as {"max_tokens":
    2048}."""

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
