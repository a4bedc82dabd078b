"""Sequences that pause between the modules of a forward pass, as plain records.

A `SequenceCoroutine` is one or more parts at one yield point, with the hidden states of all their
rows in one tensor. YIELD parks it in a `Lot`, COMBINE joins parked ones, PARTITION takes them apart
again; none of them computes anything, so no order of firing changes a token (BatchGen, section 4).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.forward.decoder import PreparedBatch

Int64s = npt.NDArray[np.int64]


class Module(IntEnum):
    """What a layer consists of, in the order in which it runs."""

    ATTENTION = 0
    FFN = 1


@dataclass(frozen=True, order=True, slots=True)
class YieldPoint:
    """The module that runs next."""

    layer: int
    module: Module

    def after(self) -> "YieldPoint":
        """Return the point behind this module; the layer may be one more than there are."""
        if self.module is Module.ATTENTION:
            return YieldPoint(self.layer, Module.FFN)
        return YieldPoint(self.layer + 1, Module.ATTENTION)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Sequences that attend together; the smallest unit that moves through the layers.

    Args:
        index: number of the part in its step; ties of a schedule break by it.
        slots: int64 [R], the sequence of each row of the forward batch.
    """

    index: int
    slots: Int64s
    prepared: PreparedBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceCoroutine:
    """Parts at one yield point.

    Args:
        parts: in the order of their rows.
        num_rows: rows of each part; the last layer leaves only those with logits.
        hidden: hidden states of all rows, [T, M].
    """

    point: YieldPoint
    parts: tuple[Part, ...]
    num_rows: tuple[int, ...]
    hidden: torch.Tensor

    @property
    def index(self) -> int:
        return self.parts[0].index

    def split(self) -> list["SequenceCoroutine"]:
        """Return one coroutine for each part; their hidden states are views of this one's."""
        if len(self.parts) == 1:
            return [self]
        rows = zip(self.parts, torch.split(self.hidden, list(self.num_rows)), strict=True)
        return [
            SequenceCoroutine(
                point=self.point, parts=(part,), num_rows=(len(hidden),), hidden=hidden
            )
            for part, hidden in rows
        ]


def combine(coroutines: Sequence[SequenceCoroutine]) -> SequenceCoroutine:
    """Return one coroutine with the rows of all, in the order given.

    Raises:
        ValueError: none, or coroutines at different yield points.
    """
    if not coroutines:
        raise ValueError("there is nothing to combine")
    first = coroutines[0]
    if len(coroutines) == 1:
        return first
    points = sorted({coroutine.point for coroutine in coroutines})
    if len(points) > 1:
        raise ValueError(f"coroutines at different yield points cannot be combined: {points}")
    return SequenceCoroutine(
        point=first.point,
        parts=tuple(part for coroutine in coroutines for part in coroutine.parts),
        num_rows=tuple(count for coroutine in coroutines for count in coroutine.num_rows),
        hidden=torch.cat([coroutine.hidden for coroutine in coroutines]),
    )


def partition(coroutine: SequenceCoroutine, count: int) -> list[SequenceCoroutine]:
    """Return up to `count` coroutines with about as many rows each, without splitting a part.

    Rows keep their order, so that combining the result gives back what came in.
    """
    if count < 1:
        raise ValueError(f"a coroutine cannot be parted into {count}")
    ends = np.cumsum(coroutine.num_rows)
    # the share of a part is where its middle lies
    middles = ends - np.array(coroutine.num_rows) / 2
    share = np.minimum(middles * count // max(int(ends[-1]), 1), count - 1).astype(np.int64)
    pieces = coroutine.split()
    return [
        combine([pieces[i] for i in np.flatnonzero(share == number).tolist()])
        for number in np.unique(share).tolist()
    ]


class Lot:
    """Where coroutines of one step wait, by yield point, in the order in which they came.

    Every part is parked, taken and parked again until it is done; anything else is an error.
    """

    def __init__(self) -> None:
        self._waiting: dict[YieldPoint, list[SequenceCoroutine]] = {}
        self._active: set[int] = set()
        self._done: set[int] = set()

    def __bool__(self) -> bool:
        """Return whether any coroutine waits."""
        return bool(self._waiting)

    @property
    def waiting(self) -> Mapping[YieldPoint, Sequence[SequenceCoroutine]]:
        """Coroutines by yield point; no point without any."""
        return self._waiting

    def add(self, coroutine: SequenceCoroutine) -> None:
        """Park a coroutine that has not run yet.

        Raises:
            RuntimeError: one of its parts is known already.
        """
        known = self._active | self._done | {p.index for p in self._parts()}
        self._refuse(known & {part.index for part in coroutine.parts}, "added twice")
        self._append(coroutine)

    def take(self, coroutines: Iterable[SequenceCoroutine]) -> list[SequenceCoroutine]:
        """Take parked coroutines out to run them.

        Raises:
            RuntimeError: one of them does not wait here.
        """
        taken = list(coroutines)
        for coroutine in taken:
            here = self._waiting.get(coroutine.point, [])
            kept = [other for other in here if other is not coroutine]
            if len(kept) == len(here):
                self._refuse({part.index for part in coroutine.parts}, "taken but not parked")
            if kept:
                self._waiting[coroutine.point] = kept
            else:
                del self._waiting[coroutine.point]
            self._active |= {part.index for part in coroutine.parts}
        return taken

    def park(self, coroutine: SequenceCoroutine) -> None:
        """Park a coroutine that has run one module more.

        Raises:
            RuntimeError: one of its parts was not taken.
        """
        self._leave_active(coroutine, "parked but not taken")
        self._append(coroutine)

    def finish(self, coroutine: SequenceCoroutine) -> None:
        """Note that a coroutine has run its last module.

        Raises:
            RuntimeError: one of its parts was not taken.
        """
        self._leave_active(coroutine, "finished but not taken")
        self._done |= {part.index for part in coroutine.parts}

    def _append(self, coroutine: SequenceCoroutine) -> None:
        self._waiting.setdefault(coroutine.point, []).append(coroutine)

    def _leave_active(self, coroutine: SequenceCoroutine, mistake: str) -> None:
        indices = {part.index for part in coroutine.parts}
        self._refuse(indices - self._active, mistake)
        self._active -= indices

    def _parts(self) -> Iterable[Part]:
        return (p for here in self._waiting.values() for c in here for p in c.parts)

    def _refuse(self, indices: set[int], mistake: str) -> None:
        if indices:
            raise RuntimeError(f"lot: parts {sorted(indices)} are {mistake}")
