"""The state of each row of a row batch, as arrays, and the sums over what one replica runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from raybatch.actors.wire.records import RowGroups, RowRange
from raybatch.prefix.block_keys import BlockKeys, start_offsets
from raybatch.records.arrays import Ints

WAITING, HELD, DONE, MOVING = 0, 1, 2, 3
ALONE = -1
# smallest ratio by which an estimate of outputs has to change
MIN_CHANGE = 1.25

Rows = npt.NDArray[np.intp]


class GroupRows(NamedTuple):
    """A prefix group, and how many of some rows are in it."""

    group: int
    prefix_len: int
    num_rows: int


class Share(NamedTuple):
    """What some rows add to a load: their number, their cost without prefixes, and their groups."""

    num_rows: int
    cost: int
    groups: tuple[GroupRows, ...] = ()


class Tokens(NamedTuple):
    """Sums over rows: prompt tokens without the prefixes of groups, and expected output tokens."""

    num_rows: int
    prompt: int
    output: int


class RowStates:
    """State, holder and counts of each row of a row batch.

    A row is waiting, held by one replica, or done. The source of a moving row holds it until the
    move is committed.

    The cost of a row is its prompt tokens without the prefix of its group, plus its expected output
    tokens. The prefix itself counts for the replica that holds the group.

    Args:
        prompt_tokens: prompt tokens of each row.
        new_tokens: expected output tokens of each row, over all samples.
        groups: prefix groups of rows with a plan.
        keys: block keys of rows without a plan, whose groups may change while they wait.
        arrival: how often the queue had formed groups before the batch arrived.
        crash_counts: crashes of each row in earlier runs.
    """

    def __init__(
        self,
        prompt_tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
        *,
        groups: RowGroups | None = None,
        keys: BlockKeys | None = None,
        arrival: int = 0,
        crash_counts: npt.NDArray[np.int16] | None = None,
    ) -> None:
        self.prompt: Ints = np.asarray(prompt_tokens, np.int64)
        self.output: Ints = np.asarray(new_tokens, np.int64)
        self.keys = keys
        self.arrival = arrival
        self.num_left = num_rows = len(self.prompt)
        self.state = np.full(num_rows, WAITING, np.uint8)
        self.holder = np.zeros(num_rows, np.int64)
        # how often a row was handed out
        self.attempts = np.zeros(num_rows, np.int16)
        self.crash_counts = (
            np.zeros(num_rows, np.int16) if crash_counts is None else crash_counts.copy()
        )
        self.group = np.full(num_rows, ALONE, np.int64)
        self.prefix = np.zeros(num_rows, np.int64)
        # entry i sums over the rows before i: prompt tokens beyond the prefix, cost
        self.token_ends: Ints
        self.cost_ends: Ints
        if groups is None:
            self.assign(np.arange(num_rows), self.group, self.prefix)
        else:
            prefix_lens = groups.prefix_lens.astype(np.int64)
            self.assign(np.arange(num_rows), groups.group_ids, prefix_lens)

    def assign(self, rows: Rows, group: Ints, prefix: Ints) -> None:
        """Put waiting rows into prefix groups; arrays have one entry per row.

        Args:
            group: group id, below 0 for none.
            prefix: prefix tokens of the group; more than the prompt counts as the prompt.
        """
        is_alone = (group < 0) | (prefix <= 0)
        self.group[rows] = np.where(is_alone, ALONE, group)
        self.prefix[rows] = np.where(is_alone, 0, np.minimum(prefix, self.prompt[rows]))
        self.token_ends = start_offsets(self.prompt - self.prefix)
        self.cost_ends = start_offsets(self.prompt - self.prefix + self.output)

    def reweigh(self, new_tokens: Callable[[Rows], Ints]) -> int:
        """Update the expected output tokens of waiting rows; return how many rows changed.

        Held rows keep theirs, so that loads stay consistent. If no row would change by more than a
        quarter, nothing changes. `new_tokens` returns the expected output tokens of given rows.
        """
        waiting = np.flatnonzero(self.state == WAITING)
        if not len(waiting):
            return 0
        before, now = self.output[waiting], new_tokens(waiting)
        ratio = np.maximum(now, 1) / np.maximum(before, 1)
        if not ((ratio > MIN_CHANGE) | (ratio < 1 / MIN_CHANGE)).any():
            return 0
        self.output = self.output.copy()
        self.output[waiting] = now
        self.cost_ends = start_offsets(self.prompt - self.prefix + self.output)
        return int(np.count_nonzero(before != now))

    def share(self, rows: Rows) -> Share:
        cost = int((self.cost_ends[rows + 1] - self.cost_ends[rows]).sum())
        if (self.group[rows] == ALONE).all():
            return Share(len(rows), cost)
        ids, first, counts = np.unique(self.group[rows], return_index=True, return_counts=True)
        prefix = self.prefix[rows[first]]
        groups = zip(ids.tolist(), prefix.tolist(), counts.tolist(), strict=True)
        return Share(len(rows), cost, tuple(GroupRows(*g) for g in groups if g[0] != ALONE))

    def share_between(self, start: int, stop: int) -> Share:
        """Return the share of rows `start` to `stop`, which are of one group or of none."""
        cost, group = self.cost_between(start, stop), int(self.group[start])
        if group == ALONE:
            return Share(stop - start, cost)
        return Share(stop - start, cost, (GroupRows(group, int(self.prefix[start]), stop - start),))

    def cost_between(self, start: int, stop: int) -> int:
        return int(self.cost_ends[stop] - self.cost_ends[start])

    def tokens_between(self, start: int, stop: int) -> int:
        """Return the prompt tokens of rows `start` to `stop` without the prefixes of groups."""
        return int(self.token_ends[stop] - self.token_ends[start])

    def reach(self, start: int, *, tokens: int, cost: int) -> int:
        """Return the largest stop such that rows `start` to stop are within both budgets.

        Args:
            tokens: budget of prompt tokens without prefixes.
            cost: budget of the cost of rows.
        """
        sums = ((self.token_ends, tokens), (self.cost_ends, cost))
        return min(int(e.searchsorted(e[start] + budget, side="right")) - 1 for e, budget in sums)

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split rows `start` to `stop` into (start, stop) runs of neighbours of the same group.

        Neighbours without a group also form a run.
        """
        borders = np.flatnonzero(np.diff(self.group[start:stop])) + start + 1
        ends = [start, *borders.tolist(), stop]
        return [(a, b) for a, b in pairwise(ends) if a < b]

    def hold(self, replica_id: int, start: int, stop: int) -> None:
        self.state[start:stop] = HELD
        self.holder[start:stop] = replica_id
        self.attempts[start:stop] += 1

    def held_by(self, replica_id: int) -> Rows:
        """Return the rows that a replica holds, ascending."""
        return np.flatnonzero(self._has_holder() & (self.holder == replica_id))

    def is_held(self, replica_id: int | Ints, rows: Rows) -> npt.NDArray[np.bool_]:
        state = self.state[rows]
        has_holder = (state == HELD) | (state == MOVING)
        return cast(npt.NDArray[np.bool_], has_holder & (self.holder[rows] == replica_id))

    def holders(self) -> list[int]:
        return cast(list[int], np.unique(self.holder[self._has_holder()]).tolist())

    def is_moving(self, replica_id: int, row: int) -> bool:
        """Return whether a row is moving away from a replica that still holds it."""
        return bool(self.state[row] == MOVING and self.holder[row] == replica_id)

    def tokens_left(self, *, is_held: bool) -> Tokens:
        """Return the total tokens of rows that replicas hold, or else of waiting rows."""
        rows = self._has_holder() if is_held else self.state == WAITING
        prompt, output = (self.prompt - self.prefix)[rows], self.output[rows]
        return Tokens(len(output), int(prompt.sum()), int(output.sum()))

    def left(self) -> Rows:
        return np.flatnonzero(self.state != DONE)

    def close(self, rows: Rows) -> None:
        self.state[rows] = DONE
        self.num_left -= len(rows)

    def reopen(self, rows: Rows) -> None:
        self.state[rows] = WAITING

    def _has_holder(self) -> npt.NDArray[np.bool_]:
        return cast(npt.NDArray[np.bool_], (self.state == HELD) | (self.state == MOVING))


def row_ranges_of(batch_id: int, rows: Rows) -> list[RowRange]:
    """Return ascending rows of a batch as row ranges, one for each run of consecutive rows."""
    if not len(rows):
        return []
    pieces = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [RowRange(batch_id, int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def one_by_one(batch_id: int, rows: Rows) -> list[RowRange]:
    return [RowRange(batch_id, row, row + 1) for row in rows.tolist()]


@dataclass(slots=True)
class ReplicaLoad:
    """Sums over the rows that a replica holds, including those of dropped batches.

    Args:
        cost: cost of these rows, plus the prefix of each of their groups once.
        is_testing: the replica runs only suspects or a canary.
    """

    num_rows: int = 0
    cost: int = 0
    is_testing: bool = False
    has_canary: bool = False
    # by id, dropped batches whose rows it has not confirmed as stopped
    aborting: dict[int, Share] = field(default_factory=dict)
    # groups with running rows, whose prefixes it has
    groups: dict[int, GroupRows] = field(default_factory=dict)

    def add(self, share: Share) -> list[tuple[int, int]]:
        """Add rows; return (group, prefix tokens) of each group that is new to the replica."""
        self.num_rows += share.num_rows
        self.cost += share.cost
        started = []
        for added in share.groups:
            held = self.groups.get(added.group)
            if held is None:
                self.groups[added.group] = added
                self.cost += added.prefix_len
                started.append((added.group, added.prefix_len))
            else:
                self.groups[added.group] = held._replace(num_rows=held.num_rows + added.num_rows)
        return started

    def remove(self, share: Share) -> list[int]:
        """Remove rows; return the groups of which the replica has no rows any more."""
        self.num_rows -= share.num_rows
        self.cost -= share.cost
        ended = []
        for group, _, num_rows in share.groups:
            held = self.groups.pop(group)
            if held.num_rows > num_rows:
                self.groups[group] = held._replace(num_rows=held.num_rows - num_rows)
            else:
                self.cost -= held.prefix_len
                ended.append(group)
        self.has_canary &= self.num_rows > 0
        return ended
