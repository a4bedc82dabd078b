"""Frozen configs of every component, validated when built; alone in reading the environment.

`from_mapping` builds any of them from a plain mapping (a job file, keyword options) and refuses
unknown keys with a suggestion. Nothing changes a config: `dataclasses.replace` makes a new one.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from raybatch.errors import ConfigError, did_you_mean
from raybatch.types import Sampling

DType = Literal["auto", "float32", "bfloat16", "float16"]
OnError = Literal["row", "raise"]
SpecialTokens = Literal["escape", "allow"]
OrderName = Literal["ratio", "ascending", "shuffle", "depth_first", "dual_scan"]

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of one native engine.

    Args:
        dtype: of weights and KV; "auto" takes float32 on a CPU, the checkpoint's on a GPU.
        device: "auto" takes a GPU where Ray assigned one, else the CPU.
        kv_cache_bytes: memory for KV; None takes a share of the free memory.
        block_size_tokens: positions of one cache block.
        max_batched_tokens: token budget of one step.
        max_num_seqs: upper bound of running sequences; the KV memory usually binds first.
        max_model_len: longest prompt plus output; None takes the model's own limit.
        enable_prefix_caching: share the KV of equal leading blocks between requests.
        kv_admission_fraction: sequences start while the KV memory in use is forecast to stay below
            this share of the cache; above 1 more run at once and some are computed again. None
            makes no forecast: sequences start while there are free blocks.
        num_threads: torch threads of one engine on a CPU.
        tune_malloc: let glibc keep freed memory, so that large temporaries are not mapped and
            cleared again in every step; changes the whole process, Linux only.
    """

    dtype: DType = "auto"
    device: str = "auto"
    kv_cache_bytes: int | None = None
    block_size_tokens: int = 64
    max_batched_tokens: int = 2048
    max_num_seqs: int = 1024
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kv_admission_fraction: float | None = None
    num_threads: int = 1
    tune_malloc: bool = True

    def __post_init__(self) -> None:
        check_choice(self, "dtype", ("auto", "float32", "bfloat16", "float16"))
        for name in ("block_size_tokens", "max_batched_tokens", "max_num_seqs", "num_threads"):
            check_whole(self, name, 1)
        for name in ("kv_cache_bytes", "max_model_len"):
            if getattr(self, name) is not None:
                check_min(self, name, 1)
        if self.kv_admission_fraction is not None:
            check_min(self, "kv_admission_fraction", 0.01)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Options of the pool of engine actors.

    Args:
        replicas: engine actors; None takes one per GPU of the cluster, or one per CPU core of
            the driver's host where the cluster has no GPU.
        num_cpus_per_replica: logical CPUs that Ray reserves for one replica; with any, feeders that
            Ray Data starts first can take all CPUs of a small cluster and no engine ever starts.
        num_gpus_per_replica: GPUs of one replica; None takes 1 where the cluster has GPUs.
        max_row_crashes: a row whose replica died this often with it becomes an error row.
        max_start_failures: starts of one replica that may fail in a row before it is given up;
            the pool fails when no replica is left.
        start_timeout_s: a start that takes longer counts as failed; it includes the wait for
            resources. None waits for ever.
        feeder_timeout_s: the rows of a feeder that was silent for so long are dropped.
        idle_release_s: engines without work for so long are stopped, and started again on
            demand; None keeps them until the driver ends.
        keep_tokens_every_s: rows that generate for long have their tokens so far kept so often,
            beyond their engine; None loses them with it.
    """

    replicas: int | None = None
    num_cpus_per_replica: float = 0
    num_gpus_per_replica: float | None = None
    max_row_crashes: int = 3
    max_start_failures: int = 3
    start_timeout_s: float | None = 1800.0
    feeder_timeout_s: float = 120.0
    idle_release_s: float | None = 600.0
    keep_tokens_every_s: float | None = 30.0

    def __post_init__(self) -> None:
        if self.replicas is not None:
            check_min(self, "replicas", 1)
        check_min(self, "num_cpus_per_replica", 0)
        check_min(self, "max_row_crashes", 1)
        check_min(self, "max_start_failures", 1)
        check_min(self, "feeder_timeout_s", 0.1)
        if self.keep_tokens_every_s is not None:
            check_min(self, "keep_tokens_every_s", 0.05)


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
                f"PlanConfig.max_unit_rows is {self.max_unit_rows} and unit_rows "
                f"{self.unit_rows}, but a unit may not be larger than the largest; raise "
                "max_unit_rows or lower unit_rows"
            )
        if self.lengths == "probe" and self.expected_tokens_column is not None:
            raise ConfigError(
                "PlanConfig: a probe measures what expected_tokens_column says; give one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendConfig:
    """Which backend a replica runs.

    Args:
        kind: "native", "transformers" (slow, for models that the native engine has not), or "fake"
            (no model: answers are derived from the prompt; for tests).
        options: of the backend itself, for example the step time of the fake.
    """

    kind: Literal["native", "transformers", "fake"] = "native"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice(self, "kind", ("native", "transformers", "fake"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitConfig:
    """What ends a run early: no unit starts, and the finished rows of open ones are kept.

    A run that was stopped goes on when the job is started again, with the same limits afresh.

    Args:
        max_wall_s: seconds by the clock.
        max_tokens: prompt tokens of finished rows and generated tokens, together.
        max_engine_hours: hours that engines worked, summed over replicas.
        max_cost: in the currency of `price_per_engine_hour`; all replicas count, idle or not.
        price_per_engine_hour: of one replica.
        max_error_rate: share of error rows among finished ones.
        min_rows_for_error_rate: finished rows before that share is looked at.
    """

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
                "LimitConfig.max_error_rate is a share from 0 to 1, such as 0.05, got "
                f"{self.max_error_rate!r}"
            )
        if self.max_cost is not None and self.price_per_engine_hour is None:
            raise ConfigError("LimitConfig.max_cost needs price_per_engine_hour")


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

    on: tuple[str, ...]
    sampling: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.on or not set(self.on) <= set(_ASKED_STATUSES):
            raise ConfigError(
                f"WaveConfig.on must name statuses of {', '.join(_ASKED_STATUSES)}, got "
                f"{list(self.on)!r}"
            )
        # one value of these decides the type of a column
        names = {f.name for f in dataclasses.fields(Sampling)} - {"n", "logprobs"}
        if not self.sampling or not set(self.sampling) <= names:
            raise ConfigError(
                f"WaveConfig.sampling must set sampling options other than n and logprobs, got "
                f"{dict(self.sampling)!r}"
            )
        dataclasses.replace(Sampling(), **self.sampling)


def from_mapping(cls: type[_T], mapping: Mapping[str, Any], *, where: str) -> _T:
    """Build the config dataclass `cls` from `mapping`.

    Args:
        cls: a dataclass of this library.
        mapping: field names to values; nested configs are built by the caller.
        where: what the mapping is, for error messages, such as "job.yaml: engine".

    Raises:
        ConfigError: an unknown key (with a suggestion), a missing one, or a value out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise ConfigError(f"{where}: unknown option {key!r}{did_you_mean(str(key), fields)}")
    for name, field_ in fields.items():
        is_needed = field_.default is field_.default_factory is dataclasses.MISSING
        if is_needed and name not in mapping:
            raise ConfigError(f"{where}: the option {name!r} is missing")
    try:
        return cls(**mapping)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_min(config: object, name: str, minimum: float) -> None:
    """Raise ConfigError unless the field is a number of at least `minimum`."""
    value = getattr(config, name)
    # also NaN, of which nothing is true
    if not _is_number(value) or not value >= minimum:
        raise ConfigError(
            f"{type(config).__name__}.{name} must be a number of at least {minimum}, got {value!r}"
        )


def check_whole(config: object, name: str, minimum: int) -> None:
    """Raise ConfigError unless the field is a whole number of at least `minimum`."""
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(
            f"{type(config).__name__}.{name} must be a whole number of at least {minimum}, got "
            f"{value!r}"
        )


def check_fraction(config: object, name: str, *, is_zero_allowed: bool = True) -> None:
    """Raise ConfigError unless the field is a number between 0 and 1."""
    value = getattr(config, name)
    if not _is_number(value) or not 0 <= value <= 1 or not (value or is_zero_allowed):
        lowest = "from 0 to 1" if is_zero_allowed else "above 0 and at most 1"
        raise ConfigError(
            f"{type(config).__name__}.{name} must be a number {lowest}, such as 0.01, got {value!r}"
        )


def check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the field is one of `choices`."""
    value = getattr(config, name)
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(
            f"{type(config).__name__}.{name} must be one of {', '.join(choices)}, "
            f"got {value!r}{hint}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_hub_offline() -> bool:
    """Return whether the environment forbids the model hub (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")


def armed_fault() -> str | None:
    """Return the point where this process shall die (RAYBATCH_FAULT), for tests of recovery."""
    return os.environ.get("RAYBATCH_FAULT") or None


def secret_of(variable: str) -> str:
    """Return what a variable of the environment holds, "" where there is none."""
    return os.environ.get(variable, "").strip()


def cache_dir() -> Path:
    """Return the folder for files that can be made again: downloads and prepared weights.

    RAYBATCH_CACHE_DIR wins, then XDG_CACHE_HOME/raybatch, then ~/.cache/raybatch.
    """
    own = os.environ.get("RAYBATCH_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path("~/.cache").expanduser()) / "raybatch"
