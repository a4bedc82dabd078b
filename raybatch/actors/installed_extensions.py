"""Loads optional mechanisms of a pool from other distributions; see `PoolExtension`."""

import logging
from collections.abc import Iterator

from raybatch.actors.coordinator.parts import MakeExtension
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import type_of
from raybatch.errors import MissingDependency
from raybatch.installation import EXTENSIONS, LAB, pool_extension, weight_sharing

_logger = logging.getLogger(__name__)


def extensions_of(spec: PoolSpec, plan: Placement) -> tuple[MakeExtension, ...]:
    """Return functions that make the extensions that a pool uses, in order of planning.

    Only these extensions are imported. Raises MissingDependency: the options ask for one that is
    not installed.
    """
    return tuple(_extensions(spec, plan))


def _extensions(spec: PoolSpec, plan: Placement) -> Iterator[MakeExtension]:
    pool = spec.pool
    if plan.num_replicas > 1 and type_of(spec.backend).forms_tp_groups:
        yield from _installed("tp_groups", spec, plan, f"TP groups of engines need {EXTENSIONS}")
    if pool.share_group is not None:
        yield weight_sharing().pool_extension
    if pool.duplicate_last_rows:
        needs = f"pool.duplicate_last_rows needs {EXTENSIONS}"
        yield from _installed("speculative", spec, plan, needs, is_required=True)
    if pool.stages != "off":
        needs, is_required = f"pool.stages={pool.stages} needs {LAB}", pool.stages != "auto"
        yield from _installed("stages", spec, plan, needs, is_required=is_required)


def _installed(
    name: str, spec: PoolSpec, plan: Placement, needs: str, *, is_required: bool = False
) -> Iterator[MakeExtension]:
    """Yield an extension; if it is missing, raise or log what it needs."""
    if (make := pool_extension(name)) is not None:
        yield make(spec, plan)
    elif is_required:
        raise MissingDependency(needs)
    else:
        _logger.info("this pool runs without an optional mechanism: %s", needs)
