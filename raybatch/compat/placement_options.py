"""`placement_group_config` of ray.data.llm as what Ray reserves for one engine."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from raybatch.config import Strategy, check_bundles
from raybatch.errors import ConfigError, did_you_mean

_NAMES = ("bundles", "bundle_per_worker", "strategy")


def reserved_by(
    group: Mapping[str, Any], *, num_ranks: int, are_actors: bool = False
) -> dict[str, Any]:
    """Return the options of `PoolConfig` that reserve what the bundles of a group say.

    Ranks that are actors of Ray run in these bundles, on whatever hosts. Otherwise all ranks of an
    engine run on one host, in one actor and the processes that end with it: the bundles are added
    up, there is no group, and nothing has to be released.

    Args:
        group: as ray.data.llm takes it.
        num_ranks: of one engine, for which `bundle_per_worker` is repeated.
        are_actors: the ranks are.

    Raises:
        ConfigError: an unknown name or value, or ranks that are to be spread over hosts and are
            processes of one.
    """
    where = "placement_group_config"
    if not isinstance(group, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {group!r}")
    for name in group:
        if name not in _NAMES:
            raise ConfigError(f"{where}: unknown option {name!r}{did_you_mean(str(name), _NAMES)}")
    bundles = _bundles(group, num_ranks)
    strategy = group.get("strategy", "PACK")
    if strategy not in get_args(Strategy):
        raise ConfigError(
            f"{where}.strategy must be one of {', '.join(get_args(Strategy))}, got {strategy!r}"
        )
    if are_actors:
        # Ray refuses bundles of nothing
        kept = [{n: amount for n, amount in bundle.items() if amount} for bundle in bundles]
        return {"bundles": kept, "strategy": strategy}
    if strategy in ("SPREAD", "STRICT_SPREAD") and len(bundles) > 1:
        raise ConfigError(
            f"{where}.strategy {strategy!r} spreads the ranks of one engine over hosts, and these "
            "are processes of one host; set engine_kwargs.distributed_executor_backend='ray', or "
            "leave the strategy out"
        )
    return _added_up(bundles)


def _bundles(group: Mapping[str, Any], num_ranks: int) -> list[dict[str, float]]:
    given = [name for name in ("bundles", "bundle_per_worker") if group.get(name) is not None]
    if len(given) != 1:
        raise ConfigError("placement_group_config must have one of bundles and bundle_per_worker")
    (name,) = given
    bundles = group[name] if name == "bundles" else [group[name]] * num_ranks
    check_bundles(bundles, where=f"placement_group_config.{name}", is_zero_allowed=True)
    return [dict(bundle) for bundle in bundles]


def _added_up(bundles: list[dict[str, float]]) -> dict[str, Any]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    num_cpus, num_gpus = total.pop("CPU", 0), total.pop("GPU", 0)
    return {
        "num_cpus_per_replica": float(num_cpus),
        "num_gpus_per_replica": float(num_gpus),
        "resources": {name: amount for name, amount in total.items() if amount},
    }
