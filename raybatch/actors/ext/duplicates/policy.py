"""Which of the last rows an idle replica computes as well, as their own may be late or hang; pure.

A copy begins at the tokens that are known outside the engine, so it ends sooner only where its
owner is much slower, or has stopped. One that has ended no step for some time is expected to end
none for as long again. Sources: backup tasks of MapReduce (OSDI 2004, section 3.6) and the choice
by estimated time to end of LATE (OSDI 2008); here from measured steps and learnt lengths.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import numpy as np

from raybatch.policy.pool.rates import StepSeconds
from raybatch.records.arrays import Bools, Floats, Ints

# copies that an idle replica gets, those of the rows that would end last
_MAX_COPIES = 8
# what a copy has to save, of the seconds that its row is to take and in all
_LEAST_GAIN, _LEAST_S = 0.25, 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldRows:
    """Rows of one replica, [S] each, in any order."""

    ids: Ints
    prompt: Ints
    """Tokens."""
    generated: Ints
    """Tokens so far, 0 for a row that has not started."""
    kept: Ints
    """Of these, tokens that another engine could begin with."""
    left: Floats
    """Tokens that are expected to come, at least 1."""
    may_copy: Bools

    def take(self, where: Bools) -> "HeldRows":
        """Return some of the rows."""
        return HeldRows(**{field.name: getattr(self, field.name)[where] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A replica with rows; it has ended no step for `silent_s`."""

    replica_id: int
    seconds: StepSeconds
    silent_s: float
    rows: HeldRows


class Spare(NamedTuple):
    """An idle replica, with room for so many rows and tokens of KV."""

    replica_id: int
    seconds: StepSeconds
    num_seqs: int
    kv_tokens: int


class Duplicate(NamedTuple):
    """A row that a second replica is to compute as well, and what both are forecast to take."""

    row_id: int
    source: int
    target: int
    row_s: float
    copy_s: float


def choose_duplicates(owners: Iterable[Owner], spares: Iterable[Spare]) -> tuple[Duplicate, ...]:
    """Return the copies to begin, each of another row; rows that would end last come first."""
    late = [row for owner in owners for row in _late_rows(owner)]
    late.sort(key=lambda row: (-row.end_s, row.row_id))
    rooms = [_Room(spare) for spare in spares]
    chosen = []
    # no more rows are asked for than all spares may take: those behind them end sooner
    for row in late[: _MAX_COPIES * len(rooms)]:
        if row.end_s <= _LEAST_S:
            break
        able = [room for room in rooms if room.fits(row)]
        if not able:
            continue
        room = min(able, key=lambda room: (room.end_s(row), room.spare.replica_id))
        copy_s = room.end_s(row)
        if copy_s + max(_LEAST_S, _LEAST_GAIN * row.end_s) < row.end_s:
            room.take(row)
            target = room.spare.replica_id
            chosen.append(Duplicate(row.row_id, row.source, target, row.end_s, copy_s))
    return tuple(chosen)


class _LateRow(NamedTuple):
    """A row, when it is forecast to end, and what a copy of it computes."""

    row_id: int
    source: int
    end_s: float
    prefill: int
    decode: float


class _Room:
    """What one spare replica can take while copies are chosen."""

    def __init__(self, spare: Spare) -> None:
        self.spare, self._taken, self._tokens = spare, list[float](), spare.kv_tokens

    def fits(self, row: _LateRow) -> bool:
        num_free = min(_MAX_COPIES, self.spare.num_seqs) - len(self._taken)
        return num_free > 0 and row.prefill + row.decode <= self._tokens

    def end_s(self, row: _LateRow) -> float:
        """Return when a row ends here beside those that were taken."""
        seconds, prefill_s = self.spare.seconds, self.spare.seconds.token_s * row.prefill
        ends_s = row_ends_s(np.array([*self._taken, row.decode]), seconds)
        return prefill_s + float(ends_s[-1])

    def take(self, row: _LateRow) -> None:
        self._taken.append(row.decode)
        self._tokens -= int(row.prefill + row.decode)


def row_ends_s(left: Floats | Sequence[float], seconds: StepSeconds) -> Floats:
    """Return the seconds until each of the rows ends that one replica runs at once, [S]."""
    order = np.argsort(left, kind="stable")
    lengths = np.asarray(left, float)[order]
    steps = np.diff(lengths, prepend=0.0)
    num_rows = np.arange(len(lengths), 0, -1)
    ends_s = np.empty(len(lengths))
    ends_s[order] = np.cumsum(steps * (seconds.step_s + seconds.row_s * num_rows))
    return ends_s


def _late_rows(owner: Owner) -> list[_LateRow]:
    rows = owner.rows
    ends_s = owner.silent_s + row_ends_s(rows.left, owner.seconds)
    again = rows.generated - rows.kept
    (places,) = np.nonzero(rows.may_copy)
    return [
        _LateRow(
            row_id=int(rows.ids[place]),
            source=owner.replica_id,
            end_s=float(ends_s[place]),
            prefill=int(rows.prompt[place] + rows.kept[place]),
            decode=float(rows.left[place] + again[place]),
        )
        for place in places.tolist()
    ]
