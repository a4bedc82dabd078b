"""`plan`: a Ray dataset in the order in which its prompts share most, and whether that pays."""

import io
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray import cloudpickle

from raybatch.config import OrderName, PlanConfig
from raybatch.errors import ConfigError
from raybatch.planning import block_tasks
from raybatch.planning.large import get_results
from raybatch.planning.ray_source import read_planned
from raybatch.prefix.extrapolation import forecast_sharing

if TYPE_CHECKING:
    from raybatch.stages.feeder import StageFeeder

logger = logging.getLogger(__name__)

_SAMPLE_ROWS = 2048
# prompt tokens that a fast engine computes; a slower one saves more time
_TOKENS_PER_S = 50_000
# operators of Ray Data that read again what lies there, without a function of the user
_CHEAP = re.compile(
    r"(InputData|From\w*|Limit|Project|Union|ListFiles)\[|Read\w*\[Read\w*(Parquet|JSON|CSV|Text)"
)

_Dataset = Any  # Ray has no types


def plan(
    dataset: _Dataset,
    stage: "type[StageFeeder]",
    *,
    order: OrderName = "auto",
    sharing: Literal["single_level", "multi_level"] = "single_level",
    expected_tokens_column: str | None = None,
    min_saved_fraction: float = 0.01,
) -> _Dataset:
    r"""Return a Ray dataset with the rows of another in the order of a plan, as in a job.

    Lazy: each execution runs `dataset`, renders and tokenizes its prompts once, groups all rows
    by shared prefixes, and only then gives the first row. `ds.map_batches(stage)` follows the
    order, and takes the columns of the plan off again. Before it they are

    - `__rb_plan_group`: int64, equal for rows that share a prefix, null for a row that is alone
    - `__rb_plan_prefix_len`: int32, tokens that the rows of the group share
    - `__rb_plan_expected`: int32, expected output tokens of all samples; null where unknown
    - others of the same beginning: place in the plan, and the tokenized prompt

    Args:
        dataset: with bounded data; it is held in the object store, which spills it.
        stage: what `LLMStage` returns.
        order: as `plan.order` of a job, and so are the others.

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


def with_plan(
    dataset: _Dataset,
    stage: "type[StageFeeder]",
    mode: bool | str,
    *,
    before: Callable[[_Dataset], _Dataset] = lambda dataset: dataset,
    remote_args: Mapping[str, Any] | None = None,
) -> _Dataset:
    """Return `before(dataset)`, planned where `mode` is True, or is "auto" and a plan pays.

    Args:
        before: maps each row to one row, cheaply enough for a sample of them.
        remote_args: of the tasks that render and tokenize, as `ray.remote` takes them.

    Raises:
        ConfigError: `mode` is another value.
    """
    if mode not in (True, False, "auto"):
        raise ConfigError(f'plan must be "auto", True or False, got {mode!r}')
    whole, remote_args = before(dataset), remote_args or {}
    if mode == "auto":
        mode, reason = _pays(dataset, stage, before, remote_args)
        does = "is planned" if mode else "runs without a plan"
        logger.info("the dataset %s: %s (plan=%s decides otherwise)", does, reason, not mode)
    return read_planned(whole, stage, PlanConfig(), remote_args) if mode else whole


def _pays(
    dataset: _Dataset,
    stage: "type[StageFeeder]",
    before: Callable[[_Dataset], _Dataset],
    remote_args: Mapping[str, Any],
) -> tuple[bool, str]:
    """Return whether a plan saves more time than passes before its first row, and why."""
    if dataset.context.execution_options.preserve_order:
        return False, "preserve_order is set"
    if (operator := _not_cheap(dataset)) is not None:
        return False, f"a sample is not cheap to read, because {operator} would run for it"
    num_rows, waiting_rows = dataset.count(), stage.waiting_rows()
    if num_rows <= waiting_rows:
        return False, f"its {num_rows:,} rows are grouped while they wait"
    options = cloudpickle.dumps((stage.settled().config, PlanConfig()))
    sample = ray.remote(num_cpus=1, **remote_args)(block_tasks.sample_keys)
    blocks = before(dataset.limit(_SAMPLE_ROWS)).to_arrow_refs()
    keys, row_s = get_results([sample.remote(options, *blocks)])[0]
    forecast = forecast_sharing(keys, num_rows, waiting_rows)
    cluster = ray.cluster_resources()
    replicas = stage.config.pool.replicas or max(1, int(cluster.get("GPU", 1)))
    saved_s = forecast.saved_tokens / (_TOKENS_PER_S * replicas)
    cost_s = num_rows * row_s / max(1.0, cluster.get("CPU", 1.0))
    is_worth = forecast.saved_fraction >= PlanConfig().min_saved_fraction and saved_s > cost_s
    return is_worth, (
        f"by its first {keys.num_rows:,} of {num_rows:,} rows a plan saves "
        f"{forecast.saved_fraction:.1%} of the prompt tokens, {saved_s:.1f} s at {_TOKENS_PER_S:,} "
        f"tokens/s and replica, and takes {cost_s:.1f} s before the first row"
        + ("; rows that share a prefix lie together already" if forecast.is_sorted else "")
    )


def _not_cheap(dataset: _Dataset) -> str | None:
    """Return an operator that a sample of the dataset would run beside reading; None for none."""
    with redirect_stdout(io.StringIO()) as text:
        dataset.explain()
    logical = text.getvalue().split("--------")[2]
    operators = [line.lstrip("+- ") for line in logical.splitlines() if line.strip()]
    return next((operator for operator in operators if not _CHEAP.match(operator)), None)
