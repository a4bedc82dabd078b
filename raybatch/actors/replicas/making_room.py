"""What idle engines hold while others of the same driver wait for it."""

import logging
import math
from collections.abc import Awaitable, Callable

from raybatch.actors.replicas.placement import CrewPlan, asked_of_ray
from raybatch.config import PoolConfig

# a replica that waits for so long asks other pools, and again so long after that
_ASK_AFTER_S = 5.0
_TELL_AFTER_S = 30.0

_logger = logging.getLogger(__name__)


class RoomSeeker:
    """Lets idle pools of the driver end engines, where those of this pool wait for what they hold.

    Args:
        pool: options of this pool.
        plan: what one engine asks of Ray.
        make_room: asks the other pools for what its text names.
    """

    def __init__(
        self, pool: PoolConfig, plan: CrewPlan, make_room: Callable[[str], Awaitable[None]]
    ) -> None:
        self._make_room = make_room
        self._asks_for = asked_of_ray(plan, pool)
        self._asked_s = -math.inf
        self._has_told = False

    def is_due(self, waits_s: float, now_s: float) -> bool:
        """Return whether to seek; says once that an engine has been waiting for long.

        Args:
            waits_s: for which a replica has been waiting for Ray to reserve what it takes.
            now_s: of a clock that only rises.
        """
        if waits_s > _TELL_AFTER_S and not self._has_told:
            self._has_told = True
            _logger.warning(
                "an engine has been waiting for %.0f s for %s of the cluster",
                waits_s,
                self._asks_for,
            )
        if waits_s <= _ASK_AFTER_S or now_s - self._asked_s <= _ASK_AFTER_S:
            return False
        self._asked_s = now_s
        return True

    async def seek(self) -> None:
        """Ask the other pools; those that are at work, or hold nothing, do nothing."""
        await self._make_room(self._asks_for)


def has_reserved(pool: PoolConfig, plan: CrewPlan) -> bool:
    """Return whether an engine holds anything that another one could wait for."""
    return bool(plan.bundles or pool.resources or any(plan.total().values()))
