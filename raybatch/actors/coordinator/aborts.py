"""Tells replicas to drop rows that nobody waits for, and the queue when they have; no Ray."""

from collections.abc import Callable, Mapping
from contextlib import suppress

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.site import Site, Spawn


class Aborts:
    """Rows of one pool that replicas run for nobody.

    Args:
        members: replicas by id, that come and go.
        spawn: runs a coroutine beside others.
        on_change: called when a replica runs some rows no more.
    """

    def __init__(
        self,
        queue: RowQueue,
        members: Mapping[int, Member],
        site: Site,
        spawn: Spawn,
        on_change: Callable[[], None],
    ) -> None:
        self._queue, self._members = queue, members
        self._died, self._failed = site.died, site.failed
        self._spawn, self._on_change = spawn, on_change

    def begin(self, replica_id: int, batch_id: int) -> None:
        """Begin to abort the rows of a row batch that was dropped."""
        if (member := self._members.get(replica_id)) is not None:
            self._spawn(self._abort(member, batch_id))

    def begin_losers(self) -> None:
        """Begin to abort the rows that another replica has finished first."""
        for replica_id, row_id in self._queue.copies.take_losers():
            if (member := self._members.get(replica_id)) is not None:
                self._spawn(self._abort_row(member, row_id))

    async def _abort(self, member: Member, batch_id: int) -> None:
        # its death is noticed, and its load forgotten, where it is awaited
        with suppress(*self._died):
            await member.actor.abort(batch_id)
            self._queue.note_aborted(member.replica_id, batch_id)
            self._on_change()

    async def _abort_row(self, member: Member, row_id: int) -> None:
        # the engine may have broken, which is noticed in the same place
        with suppress(*self._failed):
            await member.actor.abort_row(row_id)
            self._queue.copies.note_aborted(member.replica_id, row_id)
            self._on_change()
