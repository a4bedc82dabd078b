"""The options of a job as a frozen, validated record, and where they are read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import yaml

from raybatch.config import PlanConfig, from_mapping
from raybatch.errors import ConfigError
from raybatch.stages.options import StageConfig

__all__ = ["JobConfig", "plan_config", "read_job_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What one job reads, does and writes.

    Args:
        source: Parquet or JSONL: a file, a folder or a glob.
        sink: folder for the output.
        stage: model, prompt and options.
        plan: of the whole input, made before anything is generated.
        overwrite: remove an earlier output and begin again.
        flush_every_s: finished rows of a unit that is not complete are kept so often.
        partition_by: columns of the source by whose values the output is laid out.
    """

    source: str
    sink: str
    stage: StageConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    overwrite: bool = False
    flush_every_s: float = 60.0
    partition_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.flush_every_s > 0:
            raise ConfigError(f"flush_every_s must be above 0, got {self.flush_every_s!r}")
        names = self.partition_by
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"partition_by must be a list of columns, got {names!r}")
        object.__setattr__(self, "partition_by", tuple(names))


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
    if values.get("mode") is False:
        values["mode"] = "off"
    return from_mapping(PlanConfig, values, where=where)


def read_job_file(path: str | Path) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        ConfigError: there is no such file, or it holds no options.
    """
    try:
        with fsspec.open(str(path), "r", encoding="utf-8") as file:
            mapping = yaml.safe_load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such job file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a job file holds options, such as source: prompts/")
    return mapping
