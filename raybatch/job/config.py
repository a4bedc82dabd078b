"""The options of a job as a frozen, validated record, and where they are read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import fsspec
import yaml

from raybatch.backends.registry import type_of
from raybatch.config import (
    LimitConfig,
    PlanConfig,
    WaveConfig,
    check_choice,
    check_min,
    from_mapping,
)
from raybatch.errors import ConfigError
from raybatch.inputs.schemas import SchemaPolicy
from raybatch.policy.executor import ExecutorName
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import referenced_columns

OutputOrder = Literal["plan", "input"]

# what the units of a run without a plan take as well; explaining such a run takes the memory
_WITHOUT_A_PLAN = ("mode", "unit_rows", "max_unit_rows", "max_driver_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What one job reads, does and writes.

    Args:
        source: Parquet, JSONL or Arrow IPC: a file, a folder or a glob.
        sink: folder for the output.
        stage: model, prompt and options.
        plan: of the whole input, made before anything is generated.
        overwrite: remove an earlier output and begin again.
        extend: files that are new in the source are added to the output.
        flush_every_s: finished rows of a unit that is not complete are kept so often.
        partition_by: columns of the source by whose values the output is laid out.
        output_order: of the rows: "plan" as they were written, "input" as they were read.
        limits: what ends a run early.
        waves: rules by which rows of some status are asked once more, in this order.
        columns: of the source that are read and written; None takes all.
        schema_policy: "strict" refuses files whose schemas differ, "cast" widens without loss.
        skip_bad_files: leave out files that cannot be read.
        max_row_group_bytes: that a row group or record batch may take in memory.
        max_decompressed_bytes: that a compressed JSONL file may grow to; None allows 1 GiB, and
            larger files a hundred times their size.
        executor: of the engines: "ray", "local" without it, or "auto", whichever suits.
    """

    source: str
    sink: str
    stage: StageConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    overwrite: bool = False
    extend: bool = False
    flush_every_s: float = 5.0
    partition_by: tuple[str, ...] = ()
    output_order: OutputOrder = "plan"
    limits: LimitConfig = field(default_factory=LimitConfig)
    waves: tuple[WaveConfig, ...] = ()
    columns: tuple[str, ...] | None = None
    schema_policy: SchemaPolicy = "strict"
    skip_bad_files: bool = False
    max_row_group_bytes: int = 2 << 30
    max_decompressed_bytes: int | None = None
    executor: ExecutorName = "auto"

    def __post_init__(self) -> None:
        if self.overwrite and self.extend:
            raise ConfigError("overwrite begins again and extend goes on; set one of them")
        if not self.flush_every_s > 0:
            raise ConfigError(f"flush_every_s must be above 0, got {self.flush_every_s!r}")
        has_price = self.limits.price_per_engine_hour is not None
        if self.limits.max_cost is not None and not (
            has_price or type_of(self.stage.backend).has_prices(self.stage.backend)
        ):
            raise ConfigError(
                "limits.max_cost needs limits.price_per_engine_hour, or the prices of an endpoint "
                "in backend.options"
            )
        check_choice(self, "schema_policy", get_args(SchemaPolicy))
        check_choice(self, "output_order", get_args(OutputOrder))
        check_choice(self, "executor", get_args(ExecutorName))
        check_min(self, "max_row_group_bytes", 1)
        if self.max_decompressed_bytes is not None:
            check_min(self, "max_decompressed_bytes", 1)
        self._check_task()
        if not isinstance(self.skip_bad_files, bool):
            raise ConfigError(f"skip_bad_files must be true or false, got {self.skip_bad_files!r}")
        if len(set(self.partition_by)) < len(self.partition_by):
            raise ConfigError(
                f"partition_by must name each column once, got {list(self.partition_by)!r}"
            )
        if self.columns is not None and not (
            self.columns and len(set(self.columns)) == len(self.columns)
        ):
            raise ConfigError(
                f"columns must name each column once, and at least one, got "
                f"{list(self.columns)!r}; leave it out to take all"
            )

    def _check_task(self) -> None:
        if self.stage.task == "generate":
            return
        for name, is_set in (
            ("waves", bool(self.waves)),
            ("plan.lengths", self.plan.lengths == "probe"),
            ("plan.expected_tokens_column", self.plan.expected_tokens_column is not None),
        ):
            if is_set:
                raise ConfigError(
                    f"{name} is about generated tokens, and task {self.stage.task!r} generates "
                    "none; leave it out"
                )

    def check_columns(self) -> None:
        """Raise ConfigError where `columns` leaves out a column that an option names."""
        needed = [*referenced_columns(self.stage), *self.partition_by]
        if self.plan.mode != "off" and self.plan.expected_tokens_column is not None:
            needed.append(self.plan.expected_tokens_column)
        for name in needed:
            if self.columns is not None and name not in self.columns:
                raise ConfigError(
                    f"columns leaves out {name!r}, which the job reads; add it, as in columns: "
                    f"[{', '.join([*self.columns, name])}]"
                )


def column_names(columns: object, *, where: str) -> tuple[str, ...] | None:
    """Return the names of columns from any form in which users give them.

    Raises:
        ConfigError: they are of no such form.
    """
    if columns is None:
        return None
    names = columns.split(",") if isinstance(columns, str) else columns
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where} must be a list of names, got {columns!r}")
    return tuple(names)


def limit_config(limits: object, *, where: str) -> LimitConfig:
    """Return limits from any form in which users give them.

    Raises:
        ConfigError: they are of no such form, or a limit is unknown or wrong.
    """
    if limits is None or isinstance(limits, LimitConfig):
        return limits or LimitConfig()
    if not isinstance(limits, Mapping):
        raise ConfigError(f"{where} must be limits such as max_tokens, got {limits!r}")
    return from_mapping(LimitConfig, limits, where=where)


def wave_configs(waves: object, *, where: str) -> tuple[WaveConfig, ...]:
    """Return waves from any form in which users give them.

    Raises:
        ConfigError: they are of no such form, or an option is unknown or wrong.
    """
    if waves is None:
        return ()
    if not isinstance(waves, list | tuple):
        raise ConfigError(f"{where} must be a list of rules, got {waves!r}")
    found = []
    for number, wave in enumerate(waves):
        if isinstance(wave, WaveConfig):
            found.append(wave)
            continue
        if not isinstance(wave, Mapping):
            raise ConfigError(f"{where}: rule {number} must have 'on' and 'sampling', got {wave!r}")
        on = wave.get("on", ())
        listed = {**wave, "on": (on,) if isinstance(on, str) else tuple(on)}
        found.append(from_mapping(WaveConfig, listed, where=f"{where}: rule {number}"))
    return tuple(found)


def plan_config(plan: object, *, where: str) -> PlanConfig:
    """Return the options of a plan from any form in which users give them.

    Raises:
        ConfigError: they are of no such form, or an option is unknown or wrong.
    """
    if isinstance(plan, PlanConfig):
        return plan
    # YAML reads a bare `off` as false
    if plan is None or plan is True or plan == "auto":
        return PlanConfig()
    if plan is False or plan == "off":
        return PlanConfig(mode="off")
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{where} must be 'auto', 'off' or options of the plan, got {plan!r}")
    values = dict(plan)
    if isinstance(values.get("mode"), bool):
        values["mode"] = "auto" if values["mode"] else "off"
    return from_mapping(PlanConfig, values, where=where)


def without_effect(plan: PlanConfig) -> list[str]:
    """Return the options that were given to a plan that is off, and that only a plan heeds."""
    if plan.mode != "off":
        return []
    return [
        field.name
        for field in fields(PlanConfig)
        if field.name not in _WITHOUT_A_PLAN and getattr(plan, field.name) != field.default
    ]


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping with a key twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if name != "<<" and names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the option {name!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_job_file(path: str | Path) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        ConfigError: there is no such file, or it holds no options.
    """
    try:
        with fsspec.open(str(path), "r", encoding="utf-8") as file:
            mapping = yaml.load(file, Loader=_UniqueKeys)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such job file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a job file holds options, such as source: prompts/")
    return mapping
