"""A form of the attention of decode tokens: how a plan is prepared, and what attends."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeForm:
    """Two functions that belong together, as `plan_walk` and `attend_decode` do.

    Args:
        plan: turns a `DecodePart` into what `attend` reads, once per step.
        attend: returns outputs and log-sum-exp of the decode tokens in one layer.
    """

    plan: Callable[..., Any]
    attend: Callable[..., Any]
