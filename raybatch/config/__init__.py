"""Frozen configs of every component, validated when built; only this package reads the environment.

`from_mapping` builds any of them from a plain mapping (a job file, keyword options) and refuses
unknown keys with a suggestion. Configs are never modified: `dataclasses.replace` makes a new one.
"""

from raybatch.config.components import (
    DEFAULT_STEP_TOKENS,
    BackendConfig,
    EngineConfig,
    KVCacheDType,
    LimitConfig,
    OrderName,
    PlanConfig,
    PoolConfig,
    SpecialTokens,
    Strategy,
    WaveConfig,
    check_bundles,
)
from raybatch.config.environment import (
    armed_fault,
    cache_dir,
    environment,
    is_hub_offline,
    log_level,
    secret_of,
)
from raybatch.config.option import from_mapping, from_plain

__all__ = [
    "DEFAULT_STEP_TOKENS",
    "BackendConfig",
    "EngineConfig",
    "KVCacheDType",
    "LimitConfig",
    "OrderName",
    "PlanConfig",
    "PoolConfig",
    "SpecialTokens",
    "Strategy",
    "WaveConfig",
    "armed_fault",
    "cache_dir",
    "check_bundles",
    "environment",
    "from_mapping",
    "from_plain",
    "is_hub_offline",
    "log_level",
    "secret_of",
]
