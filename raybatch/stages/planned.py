"""`plan`: reorders a Ray dataset for prefix sharing, and decides whether that pays."""

import io
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any, Literal

import pyarrow as pa
import ray
from ray import cloudpickle

from raybatch.config import OrderName, PlanConfig
from raybatch.errors import ConfigError, last_line
from raybatch.planning.large import get_results
from raybatch.planning.ray_source import read_planned, sample_keys
from raybatch.prefix.forecast import forecast_sharing
from raybatch.stages.feeder import StageFeeder

logger = logging.getLogger(__name__)

_SAMPLE_ROWS = 2048
# prefill throughput of a fast engine; a slower one saves more time
_TOKENS_PER_S = 50_000
# longest delay of the first row, even for a `take(5)` of the result
_MAX_WAIT_S = 60.0
# operators of Ray Data that are cheap to repeat, without user functions; files other than Parquet
# are read completely to count their rows
_CHEAP = re.compile(r"(InputData|From\w*|Limit|Project|Union|ListFiles)\[|Read\w*\[Read\w*Parquet")

_Dataset = Any  # Ray has no types


def plan(
    dataset: _Dataset,
    stage: type[StageFeeder],
    *,
    order: OrderName = "auto",
    sharing: Literal["single_level", "multi_level"] = "single_level",
    expected_tokens_column: str | None = None,
    min_saved_fraction: float = 0.01,
) -> _Dataset:
    r"""Return a Ray dataset with the rows of another in the order of a plan, as in a job.

    Lazy: each execution runs `dataset`, renders and tokenizes its prompts once, groups all rows by
    shared prefixes, and then returns the first row. `ds.map_batches(stage)` follows the order, and
    drops the columns of the plan:

    - `__rb_plan_group`: int64, equal for rows that share a prefix, null for a row without a group
    - `__rb_plan_prefix_len`: int32, tokens that the rows of the group share
    - `__rb_plan_expected`: int32, expected output tokens of all samples; null where unknown
    - others with this prefix: place in the plan, and the tokenized prompt

    Args:
        dataset: bounded; it is held in the object store, which spills to disk.
        stage: a class returned by `LLMStage`.
        order: this and the other options as in `plan` of a job.

    Raises:
        ConfigError: an option is out of range.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}\n\nQ: {question}")  # doctest: +SKIP
        >>> raybatch.plan(ds, stage).map_batches(stage, **stage.map_options())  # doctest: +SKIP
    """
    options = PlanConfig(
        order=order,
        sharing=sharing,
        expected_tokens_column=expected_tokens_column,
        min_saved_fraction=min_saved_fraction,
    )
    return read_planned(dataset, stage, options, {})


def planned_dataset(
    dataset: _Dataset,
    stage: type[StageFeeder],
    mode: bool | str,
    *,
    before: Callable[[pa.Table], pa.Table] | None = None,
    before_args: Mapping[str, Any] | None = None,
    remote_args: Mapping[str, Any] | None = None,
) -> _Dataset:
    """Return a dataset, planned if `mode` is True, or if it is "auto" and a plan pays.

    Args:
        before: maps each row to one row, before the plan.
        before_args: options of its `map_batches`; with any, "auto" does not plan.
        remote_args: `ray.remote` options of the tasks that render and tokenize.

    Raises:
        ConfigError: `mode` is another value.
    """
    if mode not in (True, False, "auto"):
        raise ConfigError(f'plan must be "auto", True or False, got {mode!r}')
    whole, remote_args = dataset, remote_args or {}
    if before is not None:
        whole = dataset.map_batches(before, batch_format="pyarrow", **(before_args or {}))
    if mode == "auto":
        mode, reason = False, "its preprocess sets map_batches options"
        if not before_args:
            try:
                mode, reason = _pays(dataset, stage, before or (lambda table: table), remote_args)
            except Exception as error:  # if persistent, it is raised when the dataset runs
                reason = f"a sample of it fails with {last_line(error)}"
        does = "planning" if mode else "not planning"
        logger.info("%s the dataset: %s (override with plan=%s)", does, reason, not mode)
    return read_planned(whole, stage, PlanConfig(), remote_args) if mode else whole


def _pays(
    dataset: _Dataset,
    stage: type[StageFeeder],
    before: Callable[[pa.Table], pa.Table],
    remote_args: Mapping[str, Any],
) -> tuple[bool, str]:
    """Return whether a plan saves more time than it delays the first row, and why."""
    if dataset.context.execution_options.preserve_order:
        return False, "preserve_order is set"
    if (operator := _not_cheap(dataset)) is not None:
        return False, f"sampling would run {operator}"
    num_rows, waiting_rows = dataset.count(), stage.waiting_rows()
    if num_rows <= waiting_rows:
        return False, f"its {num_rows:,} rows are grouped while they wait"
    options = cloudpickle.dumps((stage.settled().config, PlanConfig()))
    sample = ray.remote(num_cpus=1, **remote_args)(sample_keys)
    blocks = dataset.limit(_SAMPLE_ROWS).to_arrow_refs()
    keys, row_s = get_results([sample.remote(options, cloudpickle.dumps(before), *blocks)])[0]
    forecast = forecast_sharing(keys, num_rows, waiting_rows)
    cluster = ray.cluster_resources()
    replicas = stage.config.pool.replicas or max(1, int(cluster.get("GPU", 1)))
    saved_s = forecast.saved_tokens / (_TOKENS_PER_S * replicas)
    cost_s = num_rows * row_s / max(1.0, cluster.get("CPU", 1.0))
    is_worth = forecast.saved_fraction >= PlanConfig().min_saved_fraction and saved_s > cost_s
    is_soon = cost_s <= _MAX_WAIT_S
    return is_worth and is_soon, (
        f"from its first {keys.num_rows:,} of {num_rows:,} rows, a plan saves "
        f"{forecast.saved_fraction:.1%} of the prompt tokens compared with rows that share "
        f"while they wait, {saved_s:.1f} s at {_TOKENS_PER_S:,} "
        f"tokens/s per replica, and delays the first row by {cost_s:.1f} s"
        + ("; rows that share a prefix are already adjacent" if forecast.is_sorted else "")
        + ("" if is_soon else f', where "auto" allows {_MAX_WAIT_S:.0f} s')
    )


def _not_cheap(dataset: _Dataset) -> str | None:
    """Return an operator that sampling would run besides reading; None if there is none."""
    with redirect_stdout(io.StringIO()) as text:
        dataset.explain()
    logical = text.getvalue().split("--------")[2]
    operators = [line.lstrip("+- ") for line in logical.splitlines() if line.strip()]
    return next((operator for operator in operators if not _CHEAP.match(operator)), None)
