"""Minds replicas that wait for what Ray is to reserve: asks other pools, and tells the user."""

import logging

from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.replicas.waiting import WaitForRay

_logger = logging.getLogger(__name__)


class Waits:
    """The waits of one pool."""

    def __init__(self, parts: PoolParts) -> None:
        self._parts = parts
        self._waits = WaitForRay(parts.pool, parts.plan)

    def look(self, now: float) -> None:
        num_waiting, waits_s = self._parts.replicas.waiting(now)
        if self._waits.is_due(waits_s, now):
            self._parts.spawn(self._parts.site.make_room(self._waits.requested))
        if message := self._waits.message(num_waiting, waits_s):
            self._parts.spawn(self._tell(message))

    async def _tell(self, message: str) -> None:
        hint = ""
        try:
            hint = await self._parts.site.shortage(self._parts.plan, self._parts.pool)
        except Exception as error:  # of what Ray promises nobody; no run ends for want of a hint
            _logger.debug("the cluster does not say why engines wait", exc_info=error)
        _logger.warning("%s", f"{message}; {hint}" if hint else message)
