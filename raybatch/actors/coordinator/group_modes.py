"""Lets groups that share weights move weights or rows, as `choose_mode` decides; no Ray.

```
copies   every replica reads the weights of others, in passes of its own
rounds   rows go to the owners of weights; all replicas of the group pass at the same time
```

A switch is a call that each member takes between two of its steps. Whatever fails in one leaves all
members with copies, as those need no other replica to be in step (mechanism S10).
"""

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field

from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.share_groups import ShareGroup
from raybatch.actors.replicas.site import Errors
from raybatch.errors import TeamError, error_text
from raybatch.policy.sharing import (
    GroupSnapshot,
    MeanBatch,
    ModeBook,
    ModeEpoch,
    RankLoad,
    wanted_rows,
)

# looks without another try after one that failed
_LOOKS_OF_REST = 120

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Followed:
    """What is known of a group beside its replicas."""

    book: ModeBook
    # of each replica, its steps and the tokens that they computed, as of the last look
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    batches: dict[int, MeanBatch] = field(default_factory=dict)
    # rounds that its replicas had lost before
    num_lost: int = 0
    is_switching: bool = False
    num_rests: int = 0


class GroupModes:
    """Follows the groups of one pool, where it has some."""

    def __init__(self, parts: PoolParts) -> None:
        self._members, self._spawn = parts.members, parts.spawn
        self._failed: Errors = (*parts.site.failed, TeamError)
        self._groups: dict[ShareGroup, _Followed] = {}
        self._num_looks = 0
        self._timeout_s = parts.timeout_s

    def look(self, now: float) -> None:
        """Begin switches that two looks in a row want; called now and then."""
        self._num_looks += 1
        of_groups: dict[ShareGroup, list[Member]] = {}
        for member in self._members.values():
            if member.group is not None and member.is_ready:
                of_groups.setdefault(member.group, []).append(member)
        for group in self._groups.keys() - of_groups.keys():
            del self._groups[group]
        for group, members in of_groups.items():
            # in the order of their seats
            members.sort(key=lambda member: member.rank)
            if len(members) == group.size and not group.ends:
                self._look_at(group, members)

    def _look_at(self, group: ShareGroup, members: list[Member]) -> None:
        followed = self._groups.get(group)
        if followed is None:
            book = ModeBook(ranks=tuple(range(group.size)))
            followed = self._groups[group] = _Followed(book)
        loads = tuple(self._load(followed, member, group) for member in members)
        # each has measured from how many rows on copies hide; the slowest of them decides
        threshold = max(member.stats.threshold_rows for member in members)
        if followed.is_switching or followed.num_rests:
            followed.num_rests = max(0, followed.num_rests - 1)
            return
        num_lost = sum(member.stats.num_lost_rounds for member in members)
        before, followed.num_lost = followed.num_lost, num_lost
        if followed.book.current.mode == "rounds" and num_lost > before:
            followed.is_switching = True
            self._spawn(self._fall_back(group, members, followed))
            return
        snapshot = GroupSnapshot(
            loads=loads, mode=followed.book.current.mode, threshold_rows=threshold
        )
        epoch = followed.book.look(snapshot, self._num_looks)
        if epoch is not None:
            followed.is_switching = True
            self._spawn(self._switch(group, members, followed, epoch, snapshot))

    def _load(self, followed: _Followed, member: Member, group: ShareGroup) -> RankLoad:
        stats = member.stats
        now = stats.num_steps, stats.generated_tokens + stats.num_chunk_tokens
        before = followed.seen.get(member.replica_id, now)
        followed.seen[member.replica_id] = now
        batch = followed.batches.setdefault(member.replica_id, MeanBatch())
        batch.note(rows=now[1] - before[1], passes=now[0] - before[0])
        return RankLoad(
            rank=group.seat(member.rank).rank,
            num_active=stats.num_running,
            mean_batch=batch.take(),
            wanted_rows=wanted_rows(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_used_fraction=stats.kv_used_fraction,
            ),
        )

    async def _switch(
        self,
        group: ShareGroup,
        members: list[Member],
        followed: _Followed,
        epoch: ModeEpoch,
        snapshot: GroupSnapshot,
    ) -> None:
        rows = f"{snapshot.batch:.1f} rows a pass, threshold {snapshot.threshold_rows:.0f}"
        try:
            if epoch.mode == "rounds":
                await self._to_rounds(members, epoch, followed.book)
            else:
                _acknowledge(followed.book, await self._to_copies(members, epoch))
        except self._failed as error:
            _logger.info("%s stay with copies of weights: %s", group, error_text(error))
            followed.book = followed.book.fallen_back()
            followed.num_rests = _LOOKS_OF_REST
        else:
            how = "send rows to the owners of weights" if epoch.mode == "rounds" else "copy weights"
            _logger.info("%s %s from now on (epoch %d): %s", group, how, epoch.epoch, rows)
        finally:
            followed.is_switching = False

    async def _fall_back(
        self, group: ShareGroup, members: list[Member], followed: _Followed
    ) -> None:
        """Let all copy weights, as some do already."""
        _logger.info("%s copy weights again, as rounds have ended in one of them", group)
        try:
            await self._to_copies(members, followed.book.current, at_once=True)
        except self._failed as error:
            _logger.info("%s: %s", group, error_text(error))
        finally:
            followed.book = followed.book.fallen_back()
            followed.num_rests = _LOOKS_OF_REST
            followed.is_switching = False

    async def _to_rounds(self, members: list[Member], epoch: ModeEpoch, book: ModeBook) -> None:
        first = members[0]
        address = "127.0.0.1" if first.place is None else first.place.address
        calls = await first.actor.share(
            "calls", epoch.epoch, len(members), address, self._timeout_s
        )
        entering = [
            member.actor.share("enter", call) for member, call in zip(members, calls, strict=True)
        ]
        try:
            _acknowledge(book, await _all(entering))
        except BaseException:
            # some may have begun rounds that others have not
            await self._to_copies(members, epoch, at_once=True)
            raise

    async def _to_copies(
        self, members: list[Member], epoch: ModeEpoch, *, at_once: bool = False
    ) -> list[int]:
        """Let all end their rounds; return the epoch that each is in."""
        return await _all([member.actor.share("leave", epoch.epoch, at_once) for member in members])


def _acknowledge(book: ModeBook, epochs: list[int]) -> None:
    """Take the epoch that each rank is in; raises TeamError where one is in another."""
    for rank, epoch in zip(book.ranks, epochs, strict=True):
        book.acknowledge(rank, epoch)


async def _all(calls: list[Awaitable[int]]) -> list[int]:
    """Return the answers once all calls have ended; raises what the first of them has raised."""
    epochs = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        epochs.append(answer)
    return epochs
