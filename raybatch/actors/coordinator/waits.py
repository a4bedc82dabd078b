"""Minds replicas that wait for what Ray is to reserve: asks other pools, and tells the user."""

import logging

from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import ReplicaSet
from raybatch.actors.replicas.site import Site, Spawn
from raybatch.actors.replicas.waiting import WaitForRay
from raybatch.config import PoolConfig

_logger = logging.getLogger(__name__)


class Waits:
    """The waits of one pool."""

    def __init__(
        self, pool: PoolConfig, plan: Placement, site: Site, replicas: ReplicaSet, spawn: Spawn
    ) -> None:
        self._pool, self._plan, self._site = pool, plan, site
        self._replicas, self._spawn = replicas, spawn
        self._waits = WaitForRay(pool, plan)

    def look(self, now: float) -> None:
        num_waiting, waits_s = self._replicas.waiting(now)
        if self._waits.is_due(waits_s, now):
            self._spawn(self._site.make_room(self._waits.requested))
        if message := self._waits.message(num_waiting, waits_s):
            self._spawn(self._tell(message))

    async def _tell(self, message: str) -> None:
        hint = ""
        try:
            hint = await self._site.shortage(self._plan, self._pool)
        except Exception as error:  # of what Ray promises nobody; no run ends for want of a hint
            _logger.debug("the cluster does not say why engines wait", exc_info=error)
        _logger.warning("%s", f"{message}; {hint}" if hint else message)
