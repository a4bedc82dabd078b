"""Options of the pool of engines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import Field
from pydantic.dataclasses import dataclass

from raybatch.config.option import (
    CHECKED,
    NonNegativeFloat,
    Place,
    Positive,
    Speed,
    Unchecked,
    is_number,
    options,
)
from raybatch.errors import ConfigError, range_text

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


@options("pool.")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class PoolConfig:
    """Number, resources and restarts of the engines."""

    replicas: Place[Positive | None] = None
    """Number of engines; None takes as many as the GPUs of the cluster allow, without GPUs one per
    CPU core of the driver's host, and 1 for an endpoint."""

    num_cpus_per_replica: Place[NonNegativeFloat] = 0
    """CPUs that Ray reserves per engine. Keep 0 on small clusters: above it, Ray Data's tasks may
    take all CPUs and no engine ever starts."""

    num_gpus_per_replica: Place[NonNegativeFloat | None] = None
    """GPUs per engine. None takes 1 (vLLM: the product of its tensor, pipeline and context parallel
    sizes) if the cluster has GPUs or options ask for them: a GPU as `accelerator_type`,
    `engine.device` "cuda", or `replicas` of vLLM."""

    max_row_crashes: Speed[Positive] = 3
    """A row becomes an error row after its engine died with it this often."""

    max_start_failures: Speed[Positive] = 3
    """Failed starts in a row after which a replica is given up (one, if the cause would not go
    away); the run fails when no replica is left."""

    start_timeout_s: Speed[NonNegativeFloat | None] = 1800.0
    """A start that takes longer fails; waiting for resources counts. None waits for ever."""

    feeder_timeout_s: Speed[Annotated[float, Ge(0.1)]] = 120.0
    """Rows sent by a feeder (a Ray Data task of the stage) that was silent for this long are
    dropped."""

    idle_release_s: Speed[NonNegativeFloat | None] = 600.0
    """Engines without work for this long stop, and start again on demand; None keeps them until the
    driver ends."""

    keep_tokens_every_s: Speed[Annotated[float, Ge(0.05)] | None] = 30.0
    """How often the tokens so far of long rows are copied out of their engine, so that another
    engine can continue them; None loses them with it."""

    accelerator_type: Place[Annotated[str | None, Field(examples=["H100"])]] = None
    """Engines run only on hosts with this accelerator, such as "H100"; None takes any."""

    resources: Place[Unchecked[Mapping[str, float]]] = field(default_factory=dict)
    """Custom resources of Ray that one replica reserves, by name."""

    runtime_env: Place[Mapping[str, Any]] = field(default_factory=dict)
    """Ray's runtime_env for the engines: environment variables, packages, files."""

    bundles: Place[Unchecked[Sequence[Mapping[str, float]] | None]] = None
    """Placement group of a vLLM engine with `distributed_executor_backend: ray`, all that Ray
    reserves for it; bundles with a GPU go to hosts with `accelerator_type`. None takes one GPU per
    rank."""

    strategy: Place[Strategy] = "PACK"
    """Placement strategy of `bundles`, as in Ray."""

    def __post_init__(self) -> None:
        if self.accelerator_type == "":
            raise ConfigError("pool.accelerator_type must be a name such as H100, got ''")
        if not isinstance(self.resources, Mapping):
            raise ConfigError(f"pool.resources must be a mapping, got {self.resources!r:.200}")
        for name, amount in self.resources.items():
            where = f"pool.resources: {name!r}"
            if name in ("CPU", "GPU"):
                raise ConfigError(
                    f"{where} has an option of its own, num_{name.lower()}s_per_replica"
                )
            _check_amount(amount, where=where, is_zero_allowed=True)
        if self.bundles is not None:
            check_bundles(self.bundles, where="pool.bundles")
            _refuse_with_bundles(self)


def check_bundles(bundles: object, *, where: str, is_zero_allowed: bool = False) -> None:
    """Check the bundles of a placement group.

    Args:
        where: what they are, for error messages.
        is_zero_allowed: a bundle may have nothing of a resource, or of all.

    Raises:
        ConfigError: they are no list with a bundle, or one of them is no mapping to amounts.
    """
    if not isinstance(bundles, list | tuple) or not bundles:
        raise ConfigError(
            f"{where} must be a list of bundles, such as [{{'GPU': 1}}]; got {bundles!r}"
        )
    for bundle in bundles:
        if not isinstance(bundle, Mapping) or not (bundle or is_zero_allowed):
            raise ConfigError(
                f"{where}: a bundle must be a mapping with a resource, got {bundle!r}"
            )
        for name, amount in bundle.items():
            of_bundle = f"{where}: {name!r} of a bundle"
            _check_amount(amount, where=of_bundle, is_zero_allowed=is_zero_allowed)


def _check_amount(amount: Any, *, where: str, is_zero_allowed: bool) -> None:  # noqa: ANN401
    # also NaN, of which nothing is true
    is_enough = is_number(amount) and (amount >= 0 if is_zero_allowed else amount > 0)
    if not is_enough or not amount < math.inf:
        lowest = "at least 0" if is_zero_allowed else "above 0"
        raise ConfigError(f"{where} must be {range_text(lowest, amount)}, got {amount!r}")


def _refuse_with_bundles(pool: PoolConfig) -> None:
    values = {
        "num_cpus_per_replica": pool.num_cpus_per_replica or None,
        "num_gpus_per_replica": pool.num_gpus_per_replica,
        "resources": pool.resources or None,
    }
    for name, value in values.items():
        if value is not None:
            raise ConfigError(
                f"pool.{name}={value!r} has no effect beside bundles, which say all that "
                "Ray reserves for an engine; put it into a bundle, or leave it out"
            )
