"""Optional mechanisms of a pool, here and in other distributions; see `PoolExtension`."""

import logging
from collections.abc import Iterator

from raybatch.actors.coordinator.parts import MakeExtension
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import type_of
from raybatch.installation import pool_extension, weight_sharing

_logger = logging.getLogger(__name__)


def extensions_of(spec: PoolSpec, plan: Placement) -> tuple[MakeExtension, ...]:
    """Return functions that make the extensions that a pool uses, in order of planning.

    Only these extensions are imported. Raises MissingDependency: weights are to be shared, and
    raybatch-extensions is not installed.
    """
    return tuple(_extensions(spec, plan))


def _extensions(spec: PoolSpec, plan: Placement) -> Iterator[MakeExtension]:
    if plan.num_replicas > 1 and type_of(spec.backend).forms_tp_groups:
        yield from _installed("tp_groups", spec, plan, "raybatch-extensions")
    if spec.pool.share_group is not None:
        yield weight_sharing().pool_extension
    if spec.pool.duplicate_last_rows:
        from raybatch.actors.ext.speculative.extension import SpeculativeExecution

        yield SpeculativeExecution
    if spec.pool.stages != "off":
        yield from _installed("stages", spec, plan, "raybatch-lab")


def _installed(
    name: str, spec: PoolSpec, plan: Placement, distribution: str
) -> Iterator[MakeExtension]:
    if (make := pool_extension(name)) is None:
        _logger.info("this pool has no %s: %s is not installed", name, distribution)
    else:
        yield make(spec, plan)
