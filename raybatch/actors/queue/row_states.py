"""The state of each row of a row batch, as arrays, and the sums over what one replica runs."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from raybatch.actors.wire.records import RowGroups, Span
from raybatch.prefix.block_keys import BlockKeys, start_offsets

WAITING, HELD, DONE = 0, 1, 2
ALONE = -1

Rows = npt.NDArray[np.intp]
_Int64s = npt.NDArray[np.int64]


class GroupRows(NamedTuple):
    """A number of rows of one prefix group, and the length of its prefix."""

    group: int
    prefix_len: int
    num_rows: int


class Share(NamedTuple):
    """The load of some rows: the cost of their own parts, and their groups."""

    num_rows: int
    cost: int
    groups: tuple[GroupRows, ...] = ()


@dataclass(slots=True)
class RowStates:
    """State, holder and counts of each row; a row is waiting, held by one replica, or done.

    A row costs its prompt beyond the prefix of its group, and its expected output. The prefix
    itself is a matter of who holds the group.

    Args:
        output: expected new tokens, all samples together.
        keys: of a row batch without a plan, whose groups may change while its rows wait.
        arrival: how often the waiting rows had been grouped when the batch came in.
        attempts: how often a row was handed out.
        token_ends: entry i sums the prompt tokens beyond the prefix before row i.
        cost_ends: entry i sums the cost before row i.
    """

    prompt: _Int64s
    output: _Int64s
    keys: BlockKeys | None
    arrival: int
    state: npt.NDArray[np.uint8]
    holder: _Int64s
    attempts: npt.NDArray[np.int16]
    strikes: npt.NDArray[np.int16]
    num_left: int
    group: _Int64s
    prefix: _Int64s
    token_ends: _Int64s = field(init=False)
    cost_ends: _Int64s = field(init=False)

    @classmethod
    def make(
        cls,
        prompt_tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
        *,
        groups: RowGroups | None = None,
        keys: BlockKeys | None = None,
        arrival: int = 0,
        strikes: npt.NDArray[np.int16] | None = None,
    ) -> Self:
        """Return the states of rows that all wait."""
        prompt = np.asarray(prompt_tokens, np.int64)
        num_rows = len(prompt)
        states = cls(
            prompt=prompt,
            output=np.asarray(new_tokens, np.int64),
            keys=keys,
            arrival=arrival,
            state=np.full(num_rows, WAITING, np.uint8),
            holder=np.zeros(num_rows, np.int64),
            attempts=np.zeros(num_rows, np.int16),
            strikes=np.zeros(num_rows, np.int16) if strikes is None else strikes.copy(),
            num_left=num_rows,
            group=np.full(num_rows, ALONE, np.int64),
            prefix=np.zeros(num_rows, np.int64),
        )
        rows = np.arange(num_rows)
        if groups is None:
            states.assign(rows, states.group, states.prefix)
        else:
            states.assign(rows, groups.group_ids, groups.prefix_lens.astype(np.int64))
        return states

    def assign(self, rows: Rows, group: _Int64s, prefix: _Int64s) -> None:
        """Put waiting rows into groups; what a group shares is at most the prompt."""
        is_alone = (group < 0) | (prefix <= 0)
        self.group[rows] = np.where(is_alone, ALONE, group)
        self.prefix[rows] = np.where(is_alone, 0, np.minimum(prefix, self.prompt[rows]))
        self.token_ends = start_offsets(self.prompt - self.prefix)
        self.cost_ends = start_offsets(self.prompt - self.prefix + self.output)

    def share(self, rows: Rows) -> Share:
        cost = int((self.cost_ends[rows + 1] - self.cost_ends[rows]).sum())
        ids, first, counts = np.unique(self.group[rows], return_index=True, return_counts=True)
        prefix = self.prefix[rows[first]]
        groups = zip(ids.tolist(), prefix.tolist(), counts.tolist(), strict=True)
        return Share(len(rows), cost, tuple(GroupRows(*g) for g in groups if g[0] != ALONE))

    def share_between(self, start: int, stop: int) -> Share:
        """Return the share of neighbouring rows of one group, or of none."""
        cost, group = self.cost_between(start, stop), int(self.group[start])
        if group == ALONE:
            return Share(stop - start, cost)
        return Share(stop - start, cost, (GroupRows(group, int(self.prefix[start]), stop - start),))

    def cost_between(self, start: int, stop: int) -> int:
        return int(self.cost_ends[stop] - self.cost_ends[start])

    def tokens_between(self, start: int, stop: int) -> int:
        """Return the prompt tokens of neighbouring rows beyond their prefixes."""
        return int(self.token_ends[stop] - self.token_ends[start])

    def reach(self, start: int, *, tokens: int, cost: int) -> int:
        """Return the largest stop for which `start` to stop stays within both budgets."""
        return min(_reach(self.token_ends, start, tokens), _reach(self.cost_ends, start, cost))

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return neighbouring rows as runs of one group each, rows that are alone together."""
        borders = np.flatnonzero(np.diff(self.group[start:stop])) + start + 1
        ends = [start, *borders.tolist(), stop]
        return [(a, b) for a, b in pairwise(ends) if a < b]

    def hold(self, replica_id: int, start: int, stop: int) -> None:
        self.state[start:stop] = HELD
        self.holder[start:stop] = replica_id
        self.attempts[start:stop] += 1

    def held_by(self, replica_id: int) -> Rows:
        """Return the rows that a replica holds, ascending."""
        return np.flatnonzero((self.state == HELD) & (self.holder == replica_id))

    def is_held(self, replica_id: int, rows: Rows) -> npt.NDArray[np.bool_]:
        is_held = (self.state[rows] == HELD) & (self.holder[rows] == replica_id)
        return cast(npt.NDArray[np.bool_], is_held)

    def holders(self) -> list[int]:
        return cast(list[int], np.unique(self.holder[self.state == HELD]).tolist())

    def left(self) -> Rows:
        return np.flatnonzero(self.state != DONE)

    def close(self, rows: Rows) -> None:
        self.state[rows] = DONE
        self.num_left -= len(rows)

    def reopen(self, rows: Rows) -> None:
        self.state[rows] = WAITING


def spans_of(batch_id: int, rows: Rows) -> list[Span]:
    """Return ascending rows as spans of neighbours."""
    if not len(rows):
        return []
    pieces = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [Span(batch_id, int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def _reach(ends: _Int64s, start: int, budget: int) -> int:
    return int(np.searchsorted(ends, ends[start] + budget, side="right")) - 1


@dataclass(slots=True)
class _HeldGroup:
    prefix_len: int
    num_rows: int


@dataclass(slots=True)
class ReplicaLoad:
    """Sums over the rows that a replica runs, those of dropped batches included.

    Args:
        cost: of these rows, and of the prefix of each of their groups, once.
        is_testing: it runs suspects or a control, and nothing else.
    """

    num_rows: int = 0
    cost: int = 0
    is_testing: bool = False
    has_control: bool = False
    aborting: dict[int, Share] = field(default_factory=dict)
    _groups: dict[int, _HeldGroup] = field(default_factory=dict)

    def holds(self, group: int) -> bool:
        """Return whether it runs rows of a group, so that it has the prefix."""
        return group in self._groups

    def groups(self) -> list[int]:
        return list(self._groups)

    def add(self, share: Share) -> list[tuple[int, int]]:
        """Add rows; return the groups that it had no rows of, and their prefixes."""
        self.num_rows += share.num_rows
        self.cost += share.cost
        started = []
        for group, prefix_len, num_rows in share.groups:
            if group not in self._groups:
                self._groups[group] = _HeldGroup(prefix_len, 0)
                self.cost += prefix_len
                started.append((group, prefix_len))
            self._groups[group].num_rows += num_rows
        return started

    def remove(self, share: Share) -> list[int]:
        """Remove rows; return the groups that it has no rows of from now on."""
        self.num_rows -= share.num_rows
        self.cost -= share.cost
        ended = []
        for group, _, num_rows in share.groups:
            held = self._groups[group]
            held.num_rows -= num_rows
            if not held.num_rows:
                self.cost -= held.prefix_len
                del self._groups[group]
                ended.append(group)
        self.has_control &= self.num_rows > 0
        return ended

    def abort(self, batch_id: int, share: Share) -> None:
        """Note a dropped batch, whose rows it runs until `confirm`."""
        self.aborting[batch_id] = share

    def confirm(self, batch_id: int) -> list[int]:
        """Remove the rows of a dropped batch; return what `remove` does."""
        return self.remove(self.aborting.pop(batch_id, Share(0, 0)))
