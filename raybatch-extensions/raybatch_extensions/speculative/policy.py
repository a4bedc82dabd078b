"""Chooses speculative copies: which of the last rows an idle replica also runs; pure.

A copy starts from the tokens that the engine has checkpointed, so it finishes first only if the
owner is much slower or has stopped. An owner without a step for some time is expected to stall for
as long again. Sources: backup tasks of MapReduce (OSDI 2004, section 3.6) and the choice by
estimated time to end of LATE (OSDI 2008); here from measured steps and learnt lengths.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import numpy as np

from raybatch.policy.pool.throughput import StepSeconds
from raybatch.records.arrays import Bools, Floats, Ints

# most copies of an idle replica
_MAX_COPIES = 8
# least saving of a copy: share of the forecast of its row, and seconds
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
    """Of these, checkpointed tokens."""
    left: Floats
    """Expected remaining tokens, at least 1."""
    may_copy: Bools

    def take(self, where: Bools) -> "HeldRows":
        """Return the rows at which `where` is True, [S]."""
        return HeldRows(**{field.name: getattr(self, field.name)[where] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts."""
        names = [field.name for field in fields(cls)]
        return cls(**{n: np.concatenate([getattr(part, n) for part in parts]) for n in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A replica with rows; `silent_s` is the seconds since its last step, 0 if not too long."""

    replica_id: int
    seconds: StepSeconds
    silent_s: float
    rows: HeldRows


class Spare(NamedTuple):
    """An idle replica and its capacity."""

    replica_id: int
    seconds: StepSeconds
    num_seqs: int
    kv_tokens: int


class SpeculativeCopy(NamedTuple):
    """A row to run at a second replica, with the forecast seconds of both runs."""

    row_id: int
    source: int
    target: int
    row_s: float
    copy_s: float


def choose_copies(owners: Iterable[Owner], spares: Iterable[Spare]) -> tuple[SpeculativeCopy, ...]:
    """Return the speculative copies to launch, at most one per row; rows that end last come first.

    Args:
        owners: replicas with rows.
        spares: idle replicas, which run the copies.
    """
    late = [row for owner in owners for row in _late_rows(owner)]
    late.sort(key=lambda row: (-row.end_s, row.row_id))
    spaces = [_FreeSpace(spare) for spare in spares]
    chosen = []
    # bounded by what all spares may take; later rows finish sooner
    for row in late[: _MAX_COPIES * len(spaces)]:
        if row.end_s <= _LEAST_S:
            break
        able = [space for space in spaces if space.fits(row)]
        if not able:
            continue
        space = min(able, key=lambda space: (space.end_s(row), space.spare.replica_id))
        copy_s = space.end_s(row)
        if copy_s + max(_LEAST_S, _LEAST_GAIN * row.end_s) < row.end_s:
            space.take(row)
            target = space.spare.replica_id
            chosen.append(SpeculativeCopy(row.row_id, row.source, target, row.end_s, copy_s))
    return tuple(chosen)


class _LateRow(NamedTuple):
    """A row with its forecast end, and the tokens that a copy computes."""

    row_id: int
    source: int
    end_s: float
    prefill: int
    decode: float


class _FreeSpace:
    """The free capacity of one idle replica while copies are chosen."""

    def __init__(self, spare: Spare) -> None:
        self.spare, self._taken, self._tokens = spare, list[float](), spare.kv_tokens

    def fits(self, row: _LateRow) -> bool:
        num_free = min(_MAX_COPIES, self.spare.num_seqs) - len(self._taken)
        return num_free > 0 and row.prefill + row.decode <= self._tokens

    def end_s(self, row: _LateRow) -> float:
        """Return the seconds until a row would end here, together with the rows taken so far."""
        seconds, prefill_s = self.spare.seconds, self.spare.seconds.token_s * row.prefill
        ends_s = row_ends_s(np.array([*self._taken, row.decode]), seconds)
        return prefill_s + float(ends_s[-1])

    def take(self, row: _LateRow) -> None:
        self._taken.append(row.decode)
        self._tokens -= int(row.prefill + row.decode)


def row_ends_s(left: Floats | Sequence[float], seconds: StepSeconds) -> Floats:
    """Return the seconds until each of the concurrent rows of a replica ends, [S].

    Args:
        left: remaining tokens of each row, [S].
        seconds: costs of the replica's steps.
    """
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
