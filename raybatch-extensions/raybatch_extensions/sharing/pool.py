"""Switches weight-sharing groups to the mode that `choose_mode` decides; Ray-free.

```
copies   weight fetch: every replica reads weights of others, at its own steps
rounds   activation exchange: rows go to the owners of weights, in lockstep
```

A switch is a call to each member between two of its steps. If one fails, all members return to
copies, which need no lockstep (mechanism S10).
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raybatch.actors.coordinator.parts import PoolExtension, PoolParts
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.runtime import Errors
from raybatch.errors import RankError, error_text
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch_extensions.sharing.groups import WeightSharingGroup, WeightSharingGroups
from raybatch_extensions.sharing.modes import (
    GroupSnapshot,
    MeanBatch,
    ModeBook,
    ModeGeneration,
    RankLoad,
    wanted_rows,
)

# polls without another attempt after a failed one
_POLLS_OF_REST = 120

_logger = logging.getLogger("raybatch.extensions.sharing.pool")


@dataclass(slots=True, eq=False)
class Followed:
    """State of a weight-sharing group whose mode is switched; `members` are in order of ranks."""

    group: WeightSharingGroup
    book: ModeBook
    members: Sequence[Member] = ()
    # by replica, its steps and their tokens at the last poll
    seen: dict[int, tuple[int, int]] = field(default_factory=dict)
    batches: dict[int, MeanBatch] = field(default_factory=dict)
    # lost rounds of its replicas at the last poll
    num_lost: int = 0
    is_switching: bool = False
    num_rests: int = 0


class SwitchMode(NamedTuple):
    """Switch a group to the mode of `generation`; None falls back to weight fetch."""

    followed: Followed
    snapshot: GroupSnapshot
    generation: ModeGeneration | None


class Sharing(PoolExtension):
    """Switches weight-sharing groups of a pool between weight fetch and activation exchange."""

    actions = (SwitchMode,)

    def __init__(self, parts: PoolParts) -> None:
        self._members, self._spawn = parts.members, parts.spawn
        self._failed: Errors = (*parts.runtime.failed, RankError)
        self._groups: dict[WeightSharingGroup, Followed] = {}
        self._num_polls = 0
        self._timeout_s = parts.timeout_s
        assert parts.pool.share_group is not None, "pool.share_group is set"
        parts.replicas.groups = WeightSharingGroups(parts.pool.share_group)

    def snapshot(
        self, pool: PoolSnapshot | None, now: float
    ) -> list[tuple[Followed, GroupSnapshot]]:
        """Return the groups that could switch their mode now, each with its state."""
        self._num_polls += 1
        of_groups: dict[WeightSharingGroup, list[Member]] = {}
        for member in self._members.values():
            if isinstance(member.group, WeightSharingGroup) and member.is_ready:
                of_groups.setdefault(member.group, []).append(member)
        for group in self._groups.keys() - of_groups.keys():
            del self._groups[group]
        found = []
        for group, members in of_groups.items():
            members.sort(key=lambda member: member.rank)
            if len(members) == group.size and not group.ends:
                found += self._group_snapshot(group, members)
        return found

    def plan(
        self, snapshot: Sequence[tuple[Followed, GroupSnapshot]], plan: PoolPlan
    ) -> list[SwitchMode]:
        """Return the switches on which two plans in a row agree, and those after a failure."""
        switches = []
        for followed, group in snapshot:
            before = followed.num_lost
            followed.num_lost = sum(member.stats.num_lost_exchanges for member in followed.members)
            if group.mode == "exchange" and followed.num_lost > before:
                switches.append(SwitchMode(followed, group, None))
            elif (generation := followed.book.update(group, self._num_polls)) is not None:
                switches.append(SwitchMode(followed, group, generation))
        return switches

    def apply(self, action: SwitchMode) -> None:
        """Start a switch."""
        followed, snapshot, generation = action
        followed.is_switching = True
        if generation is None:
            self._spawn(self._fall_back(followed))
        else:
            self._spawn(self._switch(followed, snapshot, generation))

    def _group_snapshot(
        self, group: WeightSharingGroup, members: Sequence[Member]
    ) -> list[tuple[Followed, GroupSnapshot]]:
        """Return a group with its snapshot, unless it switches or rests."""
        if group not in self._groups:
            self._groups[group] = Followed(group, ModeBook(ranks=tuple(range(group.size))))
        followed = self._groups[group]
        followed.members = members
        loads = tuple(self._load(followed, member) for member in members)
        if followed.is_switching or followed.num_rests:
            followed.num_rests = max(0, followed.num_rests - 1)
            return []
        # each measured the batch size that hides copies; the slowest decides
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
            rank=followed.group.share_rank(member.rank).rank,
            num_active=stats.num_running,
            mean_batch=batch.take(),
            wanted_rows=wanted_rows(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_used_fraction=stats.kv_used_fraction,
            ),
        )

    async def _switch(
        self, followed: Followed, snapshot: GroupSnapshot, generation: ModeGeneration
    ) -> None:
        group, members = followed.group, followed.members
        rows = f"{snapshot.batch:.1f} rows a pass, threshold {snapshot.threshold_rows:.0f}"
        try:
            if generation.mode == "exchange":
                await self._to_exchange(members, generation, followed.book)
            else:
                _acknowledge(followed.book, await self._to_fetch(members, generation))
        except self._failed as error:
            _logger.info("%s keep fetching weights: %s", group, error_text(error))
            followed.book = followed.book.fallen_back()
            followed.num_rests = _POLLS_OF_REST
        else:
            how = "activation exchange" if generation.mode == "exchange" else "weight fetch"
            _logger.info(
                "%s have switched to %s (generation %d) with %s",
                group,
                how,
                generation.generation,
                rows,
            )
        finally:
            followed.is_switching = False

    async def _fall_back(self, followed: Followed) -> None:
        """Return all members to copies, as some have already."""
        group, members = followed.group, followed.members
        _logger.info("%s go back to weight fetch: activation exchange failed at one of them", group)
        try:
            await self._to_fetch(members, followed.book.current, at_once=True)
        except self._failed as error:
            _logger.info("%s: %s", group, error_text(error))
        finally:
            followed.book = followed.book.fallen_back()
            followed.num_rests = _POLLS_OF_REST
            followed.is_switching = False

    async def _to_exchange(
        self, members: Sequence[Member], generation: ModeGeneration, book: ModeBook
    ) -> None:
        first = members[0]
        address = "127.0.0.1" if first.place is None else first.place.address
        calls = await first.actor.extend(
            "sharing", "calls", generation.generation, len(members), address, self._timeout_s
        )
        entering = [
            member.actor.extend("sharing", "enter", call)
            for member, call in zip(members, calls, strict=True)
        ]
        try:
            _acknowledge(book, await _all(entering))
        except BaseException:
            # some may have entered rounds and others not
            await self._to_fetch(members, generation, at_once=True)
            raise

    async def _to_fetch(
        self, members: Sequence[Member], generation: ModeGeneration, *, at_once: bool = False
    ) -> list[int]:
        """End the rounds of all members; return the generation of each."""
        return await _all(
            [
                member.actor.extend("sharing", "leave", generation.generation, at_once)
                for member in members
            ]
        )


def _acknowledge(book: ModeBook, generations: list[int]) -> None:
    """Acknowledge the generation of each rank; raises RankError if one differs."""
    for rank, generation in zip(book.ranks, generations, strict=True):
        book.acknowledge(rank, generation)


async def _all(calls: list[Awaitable[int]]) -> list[int]:
    """Wait for all calls; raises the first error among their answers."""
    generations = []
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        generations.append(answer)
    return generations
