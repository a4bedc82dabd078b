"""Options of a job: its plan, its limits, its waves."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from raybatch.config.checks import check_choice, check_fraction, check_min, check_whole
from raybatch.errors import ConfigError
from raybatch.records.types import Sampling

OrderName = Literal["ratio", "ascending", "shuffle", "depth_first", "dual_scan"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Options of the plan that a job makes of its whole input before it generates.

    Args:
        mode: "auto" makes the plan, "off" runs rows in input order.
        order: of the prefix groups: "ratio" (most output per computed prompt token first),
            "ascending" (the reverse), "shuffle", "depth_first" or "dual_scan".
        sharing: "single_level" computes one prefix for each group; "multi_level" runs whole
            subtrees in the order of the tree, so that prefixes of prefixes are found in the cache.
        lengths: where expected output lengths come from: "auto" takes `expected_tokens_column`
            where it is set and `max_tokens` where not, "probe" generates some rows first.
        expected_tokens_column: a column of output lengths; null where nothing is known.
        probe_fraction: share of the rows that a probe generates first; their results are kept.
        min_saved_fraction: rows keep the order of the input where sharing saves a smaller share
            of the prompt tokens.
        unit_rows: rows that are written together, if groups allow it.
        max_unit_rows: groups with more rows are cut between two units.
        max_driver_bytes: an input that takes less memory is planned by the driver alone; a larger
            one by Ray tasks, on hashes of its prompts.
        seed: of the order "shuffle" and of the probe.
    """

    WHERE: ClassVar[str] = "plan."

    mode: Literal["auto", "off"] = "auto"
    order: OrderName = "ratio"
    sharing: Literal["single_level", "multi_level"] = "single_level"
    lengths: Literal["auto", "probe"] = "auto"
    expected_tokens_column: str | None = None
    probe_fraction: float = 0.01
    min_saved_fraction: float = 0.01
    unit_rows: int = 1024
    max_unit_rows: int = 4096
    max_driver_bytes: int = 32 << 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self, "mode", ("auto", "off"))
        check_choice(self, "order", get_args(OrderName))
        check_choice(self, "sharing", ("single_level", "multi_level"))
        check_choice(self, "lengths", ("auto", "probe"))
        check_fraction(self, "min_saved_fraction")
        check_fraction(self, "probe_fraction", is_zero_allowed=False)
        for name, minimum in (("unit_rows", 1), ("max_unit_rows", 1), ("max_driver_bytes", 0)):
            check_whole(self, name, minimum)
        check_whole(self, "seed", 0)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitConfig:
    """What ends a run early: no unit starts, and the finished rows of open ones are kept.

    A run that was stopped goes on when the job is started again, with the same limits afresh.

    Args:
        max_wall_s: seconds by the clock.
        max_tokens: prompt tokens of finished rows and generated tokens, together.
        max_engine_hours: hours that engines worked, summed over replicas.
        max_cost: of engines by `price_per_engine_hour`, where all replicas count, idle or not, and
            of an endpoint's answers by the prices of its backend.
        price_per_engine_hour: of one replica.
        max_error_rate: share of error rows among finished ones.
        min_rows_for_error_rate: finished rows before that share is looked at.
    """

    WHERE: ClassVar[str] = "limits."

    max_wall_s: float | None = None
    max_tokens: int | None = None
    max_engine_hours: float | None = None
    max_cost: float | None = None
    price_per_engine_hour: float | None = None
    max_error_rate: float | None = None
    min_rows_for_error_rate: int = 100

    def __post_init__(self) -> None:
        for field_ in dataclasses.fields(self):
            if getattr(self, field_.name) is not None:
                check_min(self, field_.name, 0)
        check_whole(self, "min_rows_for_error_rate", 1)
        if self.max_tokens is not None:
            check_whole(self, "max_tokens", 0)
        if self.max_error_rate is not None and self.max_error_rate > 1:
            raise ConfigError(
                "limits.max_error_rate is a share from 0 to 1, such as 0.05, got "
                f"{self.max_error_rate!r}"
            )


# of rows that other sampling options may help
_ASKED_STATUSES = ("truncated", "too_long", "error", "crashed")


@dataclass(frozen=True, kw_only=True, slots=True)
class WaveConfig:
    """A rule by which rows of some status are asked once more, with other options.

    Args:
        on: statuses, such as "truncated" or "error".
        sampling: options that win over those of the stage and the row, such as
            {"max_tokens": 2048}.
    """

    WHERE: ClassVar[str] = "waves."

    on: tuple[str, ...]
    sampling: Mapping[str, Any]

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
