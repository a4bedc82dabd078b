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
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raybatch.actors.coordinator.parts import PoolExtension, PoolParts
from raybatch.actors.ext.sharing.groups import ShareGroup, ShareGroups
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.site import Errors
from raybatch.errors import TeamError, error_text
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
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
class Followed:
    """What is known of a group beside its replicas, which are in the order of their seats."""

    group: ShareGroup
    book: ModeBook
    members: Sequence[Member] = ()
    # of each replica, its steps and the tokens that they computed, as of the last look
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    batches: dict[int, MeanBatch] = field(default_factory=dict)
    # rounds that its replicas had lost before
    num_lost: int = 0
    is_switching: bool = False
    num_rests: int = 0


class SwitchMode(NamedTuple):
    """A group is to take another mode; without an epoch, all go back to copies."""

    followed: Followed
    snapshot: GroupSnapshot
    epoch: ModeEpoch | None


class Sharing(PoolExtension):
    """The groups of one pool, and how each has its weights."""

    actions = (SwitchMode,)

    def __init__(self, parts: PoolParts) -> None:
        self._members, self._spawn = parts.members, parts.spawn
        self._failed: Errors = (*parts.site.failed, TeamError)
        self._groups: dict[ShareGroup, Followed] = {}
        self._num_looks = 0
        self._timeout_s = parts.timeout_s
        assert parts.pool.share_group is not None, "a pool without groups has no part in this"
        parts.replicas.groups = ShareGroups(parts.pool.share_group)

    def snapshot(
        self, pool: PoolSnapshot | None, now: float
    ) -> list[tuple[Followed, GroupSnapshot]]:
        """Return the groups that could switch now; called now and then."""
        self._num_looks += 1
        of_groups: dict[ShareGroup, list[Member]] = {}
        for member in self._members.values():
            if isinstance(member.group, ShareGroup) and member.is_ready:
                of_groups.setdefault(member.group, []).append(member)
        for group in self._groups.keys() - of_groups.keys():
            del self._groups[group]
        found = []
        for group, members in of_groups.items():
            members.sort(key=lambda member: member.rank)
            if len(members) == group.size and not group.ends:
                found += self._look_at(group, members)
        return found

    def plan(
        self, snapshot: Sequence[tuple[Followed, GroupSnapshot]], plan: PoolPlan
    ) -> list[SwitchMode]:
        """Return the switches that two looks in a row want."""
        switches = []
        for followed, group in snapshot:
            before = followed.num_lost
            followed.num_lost = sum(member.stats.num_lost_rounds for member in followed.members)
            if group.mode == "rounds" and followed.num_lost > before:
                switches.append(SwitchMode(followed, group, None))
            elif (epoch := followed.book.look(group, self._num_looks)) is not None:
                switches.append(SwitchMode(followed, group, epoch))
        return switches

    def apply(self, action: SwitchMode) -> None:
        """Begin a switch."""
        followed, snapshot, epoch = action
        followed.is_switching = True
        if epoch is None:
            self._spawn(self._fall_back(followed))
        else:
            self._spawn(self._switch(followed, snapshot, epoch))

    def _look_at(
        self, group: ShareGroup, members: Sequence[Member]
    ) -> list[tuple[Followed, GroupSnapshot]]:
        """Return a group, unless it switches or rests."""
        if group not in self._groups:
            self._groups[group] = Followed(group, ModeBook(ranks=tuple(range(group.size))))
        followed = self._groups[group]
        followed.members = members
        loads = tuple(self._load(followed, member) for member in members)
        if followed.is_switching or followed.num_rests:
            followed.num_rests = max(0, followed.num_rests - 1)
            return []
        # each has measured from how many rows on copies hide; the slowest of them decides
        threshold = max(member.stats.threshold_rows for member in members)
        mode = followed.book.current.mode
        return [(followed, GroupSnapshot(loads=loads, mode=mode, threshold_rows=threshold))]

    def _load(self, followed: Followed, member: Member) -> RankLoad:
        stats = member.stats
        now = stats.num_steps, stats.generated_tokens + stats.num_chunk_tokens
        before = followed.seen.get(member.replica_id, now)
        followed.seen[member.replica_id] = now
        batch = followed.batches.setdefault(member.replica_id, MeanBatch())
        batch.note(rows=now[1] - before[1], passes=now[0] - before[0])
        return RankLoad(
            rank=followed.group.seat(member.rank).rank,
            num_active=stats.num_running,
            mean_batch=batch.take(),
            wanted_rows=wanted_rows(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_used_fraction=stats.kv_used_fraction,
            ),
        )

    async def _switch(self, followed: Followed, snapshot: GroupSnapshot, epoch: ModeEpoch) -> None:
        group, members = followed.group, followed.members
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

    async def _fall_back(self, followed: Followed) -> None:
        """Let all copy weights, as some do already."""
        group, members = followed.group, followed.members
        _logger.info("%s copy weights again, as rounds have ended in one of them", group)
        try:
            await self._to_copies(members, followed.book.current, at_once=True)
        except self._failed as error:
            _logger.info("%s: %s", group, error_text(error))
        finally:
            followed.book = followed.book.fallen_back()
            followed.num_rests = _LOOKS_OF_REST
            followed.is_switching = False

    async def _to_rounds(self, members: Sequence[Member], epoch: ModeEpoch, book: ModeBook) -> None:
        first = members[0]
        address = "127.0.0.1" if first.place is None else first.place.address
        calls = await first.actor.extend(
            "sharing", "calls", epoch.epoch, len(members), address, self._timeout_s
        )
        entering = [
            member.actor.extend("sharing", "enter", call)
            for member, call in zip(members, calls, strict=True)
        ]
        try:
            _acknowledge(book, await _all(entering))
        except BaseException:
            # some may have begun rounds that others have not
            await self._to_copies(members, epoch, at_once=True)
            raise

    async def _to_copies(
        self, members: Sequence[Member], epoch: ModeEpoch, *, at_once: bool = False
    ) -> list[int]:
        """Let all end their rounds; return the epoch that each is in."""
        return await _all(
            [member.actor.extend("sharing", "leave", epoch.epoch, at_once) for member in members]
        )


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
