"""The mechanisms of a pool that only some jobs ask for, a folder each; see `PoolExtension`."""

import logging

from raybatch.actors.coordinator.parts import MakeExtension
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import type_of
from raybatch.installation import pool_extension

_logger = logging.getLogger(__name__)


def extensions_of(spec: PoolSpec, plan: Placement) -> tuple[MakeExtension, ...]:
    """Return what the options of a job ask for, in the order of their plans; loads no other."""
    made: list[MakeExtension] = []
    if plan.num_replicas > 1 and type_of(spec.backend).forms_teams:
        from raybatch.actors.ext.teams.extension import Teams

        made.append(Teams)
    if spec.pool.share_group is not None:
        from raybatch.actors.ext.sharing.extension import Sharing

        made.append(Sharing)
    if spec.pool.duplicate_last_rows:
        from raybatch.actors.ext.duplicates.extension import Duplicates

        made.append(Duplicates)
    if spec.pool.stages != "off":
        if (stages := pool_extension("stages")) is None:
            _logger.info('pool.stages="auto" does nothing: raybatch-lab is not installed')
        else:
            made.append(stages(spec, plan))
    return tuple(made)
