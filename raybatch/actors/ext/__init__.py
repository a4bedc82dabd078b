"""Optional mechanisms of a pool, one folder each; see `PoolExtension`."""

import logging

from raybatch.actors.coordinator.parts import MakeExtension
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import type_of
from raybatch.installation import pool_extension

_logger = logging.getLogger(__name__)


def extensions_of(spec: PoolSpec, plan: Placement) -> tuple[MakeExtension, ...]:
    """Return functions that make the extensions that a pool uses, in order of planning.

    Only these extensions are imported.
    """
    made: list[MakeExtension] = []
    if plan.num_replicas > 1 and type_of(spec.backend).forms_tp_groups:
        from raybatch.actors.ext.tp_groups.extension import TPGroups

        made.append(TPGroups)
    if spec.pool.share_group is not None:
        from raybatch.actors.ext.sharing.extension import Sharing

        made.append(Sharing)
    if spec.pool.duplicate_last_rows:
        from raybatch.actors.ext.speculative.extension import SpeculativeExecution

        made.append(SpeculativeExecution)
    if spec.pool.stages != "off":
        if (stages := pool_extension("stages")) is None:
            _logger.info(
                'pool.stages="auto" has no effect: raybatch-lab, which has stages, is not installed'
            )
        else:
            made.append(stages(spec, plan))
    return tuple(made)
