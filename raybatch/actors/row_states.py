"""What a pool knows of each row of one row batch, as arrays; which row goes where is in `queue`."""

from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import numpy.typing as npt

from raybatch.actors.records import Span

WAITING, HELD, DONE = 0, 1, 2

Rows = npt.NDArray[np.intp]
_Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class RowStates:
    """State, holder and counts of each row; a row is waiting, held by one replica, or done.

    Args:
        prompt_ends: entry i sums the prompt tokens before row i.
        cost_ends: entry i sums prompt tokens and longest outputs before row i.
        state: `WAITING`, `HELD` or `DONE`.
        holder: replica of a held row.
        attempts: how often a row was handed out.
        strikes: replicas that died while they held a row.
        num_left: rows that are not done.
    """

    prompt_ends: _Int64s
    cost_ends: _Int64s
    state: npt.NDArray[np.uint8]
    holder: _Int64s
    attempts: npt.NDArray[np.int16]
    strikes: npt.NDArray[np.int16]
    num_left: int

    @classmethod
    def make(cls, prompt_tokens: npt.ArrayLike, max_new_tokens: npt.ArrayLike) -> Self:
        """Return the states of rows that all wait."""
        prompt = np.asarray(prompt_tokens, np.int64)
        num_rows = len(prompt)
        return cls(
            prompt_ends=_ends(prompt),
            cost_ends=_ends(prompt + np.asarray(max_new_tokens, np.int64)),
            state=np.full(num_rows, WAITING, np.uint8),
            holder=np.zeros(num_rows, np.int64),
            attempts=np.zeros(num_rows, np.int16),
            strikes=np.zeros(num_rows, np.int16),
            num_left=num_rows,
        )

    def cost(self, rows: Rows) -> int:
        """Return prompt tokens plus longest outputs of these rows."""
        return int((self.cost_ends[rows + 1] - self.cost_ends[rows]).sum())

    def cost_between(self, start: int, stop: int) -> int:
        """Return the cost of neighbouring rows."""
        return int(self.cost_ends[stop] - self.cost_ends[start])

    def reach(self, start: int, *, prompt_tokens: int, cost: int) -> int:
        """Return the largest stop for which `start` to stop stays within both budgets."""
        return min(
            _reach(self.prompt_ends, start, prompt_tokens), _reach(self.cost_ends, start, cost)
        )

    def hold(self, replica_id: int, start: int, stop: int) -> None:
        """Note that a replica got rows."""
        self.state[start:stop] = HELD
        self.holder[start:stop] = replica_id
        self.attempts[start:stop] += 1

    def held_by(self, replica_id: int) -> Rows:
        """Return the rows that a replica holds, ascending."""
        return np.flatnonzero((self.state == HELD) & (self.holder == replica_id))

    def is_held(self, replica_id: int, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of these rows a replica holds."""
        is_held = (self.state[rows] == HELD) & (self.holder[rows] == replica_id)
        return cast(npt.NDArray[np.bool_], is_held)

    def holders(self) -> list[int]:
        """Return the replicas that hold rows."""
        return cast(list[int], np.unique(self.holder[self.state == HELD]).tolist())

    def left(self) -> Rows:
        """Return the rows that are not done."""
        return np.flatnonzero(self.state != DONE)

    def close(self, rows: Rows) -> None:
        """Note that rows are done."""
        self.state[rows] = DONE
        self.num_left -= len(rows)

    def reopen(self, rows: Rows) -> None:
        """Note that rows wait again."""
        self.state[rows] = WAITING


def spans_of(batch_id: int, rows: Rows) -> list[Span]:
    """Return ascending rows as spans of neighbours."""
    if not len(rows):
        return []
    pieces = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [Span(batch_id, int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def _ends(values: _Int64s) -> _Int64s:
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=ends[1:])
    return ends


def _reach(ends: _Int64s, start: int, budget: int) -> int:
    return int(np.searchsorted(ends, ends[start] + budget, side="right")) - 1
