"""Empties replicas that will end soon, as after SIGTERM or on a host that is taken away; no Ray.

```
notice -> no more rows -> unstarted rows are given back -> running rows move -> it ends
                          (to the queue)                   (with their KV)      (no death)
```

What cannot move ends there. A replica that dies before it is empty costs its rows no strike.
"""

import asyncio
import logging
import time

from raybatch.actors.coordinator.levelling import Levelling
from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.records import Span

# between two looks at what is left in a replica
_TURN_S = 0.1
# between two questions which hosts are taken away
_ASK_EVERY_S = 5.0

_logger = logging.getLogger(__name__)


class Leaving:
    """The replicas of one pool that are to leave."""

    def __init__(self, parts: PoolParts, levelling: Levelling) -> None:
        self._parts, self._levelling = parts, levelling
        self._site, self._replicas = parts.site, parts.replicas
        self._asked_s = time.monotonic()
        self._asking: asyncio.Task[None] | None = None

    def begin(self, replica_id: int, why: str) -> None:
        """Take notice that a replica will end; it gets no rows any more."""
        member = self._replicas.members.get(replica_id)
        if member is None or member.is_leaving:
            return
        member.is_leaving = True
        self._levelling.note_leaving()
        _logger.warning("%s will end: %s; its rows go to others", member, why)
        if member.is_ready:
            self._parts.spawn(self._empty(member))
        else:
            member.started.end()
        for mate in list(self._replicas.members.values()):
            if member.group is not None and mate.group is member.group:
                self.begin(mate.replica_id, f"{member} of its group does")

    def look(self, now: float) -> None:
        """Ask now and then for hosts that are taken away; their replicas are to leave."""
        if self._asking is None and now - self._asked_s > _ASK_EVERY_S:
            self._asked_s = now
            self._asking = self._parts.spawn(self._ask())

    async def _ask(self) -> None:
        try:
            hosts = await self._site.leaving_hosts()
        except Exception as error:  # of what Ray promises nobody; such a host ends without notice
            _logger.debug("the cluster does not say which hosts leave", exc_info=error)
            hosts = set()
        self._asking = None
        for member in list(self._replicas.members.values()):
            place = member.place
            if member.stays and place is not None and place.host_id in hosts:
                # Ray gives another host to the next one, which need not wait for the end of this
                self._replicas.ledger.release(member.rank)
                self._replicas.ledger.grow(1)
                self.begin(member.replica_id, f"{place.host} is taken away")

    async def _empty(self, member: Member) -> None:
        replica_id = member.replica_id
        try:
            while replica_id in self._replicas.members:
                rows = await member.actor.empty()
                self._parts.queue.give_back(replica_id, [Span(b, row, row + 1) for b, row in rows])
                self._levelling.move_away(replica_id)
                if not self._parts.queue.load(replica_id).num_rows:
                    self._parts.let_go(replica_id)
                await asyncio.sleep(_TURN_S)
        except self._site.failed as error:
            # its end is noticed, and its rows are queued again, where it is awaited
            _logger.debug("%s has ended before it was empty", member, exc_info=error)
