"""Options of the pool of engines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from raybatch.config.checks import check_choice, check_min, is_number
from raybatch.errors import ConfigError, told_range

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    """Options of the pool of engine actors.

    Args:
        replicas: engine actors; None takes one per GPU of the cluster, or one per CPU core of
            the driver's host where the cluster has no GPU.
        num_cpus_per_replica: logical CPUs that Ray reserves for one replica; with any, feeders that
            Ray Data starts first can take all CPUs of a small cluster and no engine ever starts.
        num_gpus_per_replica: GPUs of one replica; None takes 1, or with vLLM the product of its
            tensor, pipeline and context parallel sizes, where the cluster has GPUs or options mean
            them: a GPU as `accelerator_type`, `engine.device` "cuda", or `replicas` of vLLM.
        max_row_crashes: a row whose replica died this often with it becomes an error row.
        max_start_failures: starts of one replica that may fail in a row before it is given up, one
            where another would fail alike; the pool fails when no replica is left.
        start_timeout_s: a start that takes longer counts as failed; it includes the wait for
            resources. None waits for ever.
        feeder_timeout_s: the rows of a feeder that was silent for so long are dropped.
        idle_release_s: engines without work for so long are stopped, and started again on
            demand; None keeps them until the driver ends.
        keep_tokens_every_s: rows that generate for long have their tokens so far kept so often,
            beyond their engine; None loses them with it.
        accelerator_type: engines run on hosts with this accelerator alone, such as "H100"; None
            takes any.
        resources: custom resources of Ray that one replica reserves, by name.
        runtime_env: of Ray, for the engines: environment variables, packages, files.
        bundles: of the placement group of an engine of vLLM whose ranks are actors, and all that
            Ray reserves for it; those with a GPU lie on hosts with `accelerator_type`. None
            takes a GPU for each rank.
        strategy: of that group: "PACK", "STRICT_PACK", "SPREAD" or "STRICT_SPREAD".
    """

    WHERE: ClassVar[str] = "pool."

    replicas: int | None = None
    num_cpus_per_replica: float = 0
    num_gpus_per_replica: float | None = None
    max_row_crashes: int = 3
    max_start_failures: int = 3
    start_timeout_s: float | None = 1800.0
    feeder_timeout_s: float = 120.0
    idle_release_s: float | None = 600.0
    keep_tokens_every_s: float | None = 30.0
    accelerator_type: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    bundles: Sequence[Mapping[str, float]] | None = None
    strategy: Strategy = "PACK"

    def __post_init__(self) -> None:
        if self.replicas is not None:
            check_min(self, "replicas", 1)
        check_min(self, "num_cpus_per_replica", 0)
        check_min(self, "max_row_crashes", 1)
        check_min(self, "max_start_failures", 1)
        check_min(self, "feeder_timeout_s", 0.1)
        if self.keep_tokens_every_s is not None:
            check_min(self, "keep_tokens_every_s", 0.05)
        _check_placement(self)


def _check_placement(pool: PoolConfig) -> None:
    """Check what Ray is asked for."""
    kind: object = pool.accelerator_type
    if kind is not None and not (kind and isinstance(kind, str)):
        raise ConfigError(f"pool.accelerator_type must be a name such as H100, got {kind!r}")
    for name in ("resources", "runtime_env"):
        if not isinstance(value := getattr(pool, name), Mapping):
            raise ConfigError(f"pool.{name} must be a mapping, got {value!r:.200}")
    for name, amount in pool.resources.items():
        where = f"pool.resources: {name!r}"
        if name in ("CPU", "GPU"):
            raise ConfigError(f"{where} has an option of its own, num_{name.lower()}s_per_replica")
        _check_amount(amount, where=where, is_zero_allowed=True)
    check_choice(pool, "strategy", get_args(Strategy))
    if pool.bundles is not None:
        check_bundles(pool.bundles, where="pool.bundles")
        _check_beside_bundles(pool)


def check_bundles(bundles: object, *, where: str, is_zero_allowed: bool = False) -> None:
    """Check the bundles of a placement group.

    Args:
        bundles: whatever was given for them.
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
            told = f"{where}: {name!r} of a bundle"
            _check_amount(amount, where=told, is_zero_allowed=is_zero_allowed)


def _check_amount(amount: Any, *, where: str, is_zero_allowed: bool) -> None:  # noqa: ANN401
    # also NaN, of which nothing is true
    is_enough = is_number(amount) and (amount >= 0 if is_zero_allowed else amount > 0)
    if not is_enough or not amount < math.inf:
        lowest = "at least 0" if is_zero_allowed else "above 0"
        raise ConfigError(f"{where} must be {told_range(lowest, amount)}, got {amount!r}")


def _check_beside_bundles(pool: PoolConfig) -> None:
    given = {
        "num_cpus_per_replica": pool.num_cpus_per_replica or None,
        "num_gpus_per_replica": pool.num_gpus_per_replica,
        "resources": pool.resources or None,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"pool.{name}={value!r} has no effect beside bundles, which say all that "
                "Ray reserves for an engine; put it into a bundle, or leave it out"
            )
