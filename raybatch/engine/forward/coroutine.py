"""Sequence coroutines, which pause between modules of a forward pass, and their runtime.

A `SequenceCoroutine` is one or more parts at one yield point, with the hidden states of all their
rows in one tensor. YIELD parks it in a `Lot`, COMBINE joins parked ones, and split separates them
again. None of these computes anything, so the firing order does not change tokens (BatchGen,
section 4).

The engine uses the order of its Algorithm 1: attention part by part, each with its KV in a window
buffer, then the feed-forward block of a layer once for all parts, so that experts get large
batches.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder, PreparedBatch
from raybatch.engine.memory.kv_window import KVWindow, WindowMoves


class Module(IntEnum):
    """The modules of a layer, in the order of execution."""

    ATTENTION = 0
    FFN = 1


@dataclass(frozen=True, order=True, slots=True)
class YieldPoint:
    layer: int
    module: Module

    def after(self) -> "YieldPoint":
        """Return the next yield point; after the last layer, `layer` is the number of layers."""
        if self.module is Module.ATTENTION:
            return YieldPoint(self.layer, Module.FFN)
        return YieldPoint(self.layer + 1, Module.ATTENTION)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Sequences of a step that attend together; the smallest unit of execution."""

    # index of the part in its step; breaks ties
    index: int
    prepared: PreparedBatch
    # its KV copies between host memory and the window
    moves: WindowMoves


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceCoroutine:
    """Parts of a step that are paused at one yield point, with their hidden states."""

    point: YieldPoint
    parts: tuple[Part, ...]
    # rows per part; after the last layer only those with logits
    num_rows: tuple[int, ...]
    hidden: torch.Tensor  # of all rows, part after part, [T, M]

    @property
    def index(self) -> int:
        return self.parts[0].index

    @property
    def indices(self) -> set[int]:
        return {part.index for part in self.parts}

    def split(self) -> list["SequenceCoroutine"]:
        """Return one coroutine per part, with views of the hidden states."""
        if len(self.parts) == 1:
            return [self]
        rows = zip(self.parts, torch.split(self.hidden, list(self.num_rows)), strict=True)
        return [_single(self.point, part, hidden) for part, hidden in rows]


def _single(point: YieldPoint, part: Part, hidden: torch.Tensor) -> SequenceCoroutine:
    return SequenceCoroutine(point=point, parts=(part,), num_rows=(len(hidden),), hidden=hidden)


def combine(coroutines: Sequence[SequenceCoroutine]) -> SequenceCoroutine:
    """Return one coroutine with the parts of all, in the given order.

    Raises ValueError: no coroutines, or different yield points.
    """
    if not coroutines:
        raise ValueError("no coroutines to combine")
    first = coroutines[0]
    if len(coroutines) == 1:
        return first
    points = sorted({coroutine.point for coroutine in coroutines})
    if len(points) > 1:
        raise ValueError(f"cannot combine coroutines at different yield points: {points}")
    return SequenceCoroutine(
        point=first.point,
        parts=tuple(part for coroutine in coroutines for part in coroutine.parts),
        num_rows=tuple(count for coroutine in coroutines for count in coroutine.num_rows),
        hidden=torch.cat([coroutine.hidden for coroutine in coroutines]),
    )


@dataclass(slots=True)
class Lot:
    """Holds the parked coroutines of one step by yield point, in order of arrival.

    Every part must be parked, taken and parked again until it is finished; if a method is called in
    another order, it raises RuntimeError.
    """

    # no empty lists
    waiting: dict[YieldPoint, list[SequenceCoroutine]] = field(default_factory=dict)
    _active: set[int] = field(default_factory=set)
    _done: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def add(self, coroutine: SequenceCoroutine) -> None:
        waiting = {p.index for here in self.waiting.values() for c in here for p in c.parts}
        known = self._active | self._done | waiting
        self._refuse(known & coroutine.indices, "added twice")
        self.waiting.setdefault(coroutine.point, []).append(coroutine)

    def take(self, coroutines: Iterable[SequenceCoroutine]) -> list[SequenceCoroutine]:
        """Remove these parked coroutines, which run next, and return them as a list."""
        taken = list(coroutines)
        for coroutine in taken:
            here = self.waiting.pop(coroutine.point, [])
            kept = [other for other in here if other is not coroutine]
            if kept:
                self.waiting[coroutine.point] = kept
            if len(kept) == len(here):
                self._refuse(coroutine.indices, "taken but not parked")
            self._active |= coroutine.indices
        return taken

    def park(self, coroutine: SequenceCoroutine) -> None:
        self._leave_active(coroutine, "parked but not taken")
        self.waiting.setdefault(coroutine.point, []).append(coroutine)

    def finish(self, coroutine: SequenceCoroutine) -> None:
        self._leave_active(coroutine, "finished but not taken")
        self._done |= coroutine.indices

    def _leave_active(self, coroutine: SequenceCoroutine, mistake: str) -> None:
        self._refuse(coroutine.indices - self._active, mistake)
        self._active -= coroutine.indices

    def _refuse(self, indices: set[int], mistake: str) -> None:
        if indices:
            raise RuntimeError(f"coroutines: parts {sorted(indices)} of the step are {mistake}")


Waiting = Mapping[YieldPoint, Sequence[SequenceCoroutine]]


def combine_at_experts(waiting: Waiting) -> Sequence[SequenceCoroutine]:
    """Return the coroutines that run next, all at one yield point; at least one.

    Attention runs part by part, in order of arrival; a feed-forward block runs once all parts wait
    for it, so that each layer's weights serve all rows of a step.
    """
    attending = [point for point in waiting if point.module is Module.ATTENTION]
    return waiting[min(attending)][:1] if attending else waiting[min(waiting)]


class StepPart(NamedTuple):
    """Rows of a step that attend together, and their KV copies."""

    batch: ForwardBatch
    moves: WindowMoves


@dataclass(frozen=True, slots=True)
class CoroutineRuntime:
    """Runs a decoder by coroutines, with KV in host memory behind a window.

    `choose` gets the parked coroutines and returns those that run next, all at one yield point. A
    part that follows a writer attends in each layer after the parts before it.
    """

    _decoder: Decoder
    _window: KVWindow
    _choose: Callable[[Waiting], Sequence[SequenceCoroutine]] = combine_at_experts

    def forward(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Run the parts of a step; a part that reads another's new KV must come after it.

        Returns:
            float32 logits [S, V], part after part.
        """
        lot, logits = Lot(), dict[int, torch.Tensor]()
        for index, (batch, moves) in enumerate(parts):
            prepared = self._decoder.prepare(batch, self._window.cache)
            part = Part(index=index, prepared=prepared, moves=moves)
            lot.add(_single(YieldPoint(0, Module.ATTENTION), part, self._decoder.embed(batch)))
        while lot:
            for coroutine in self._resume(lot.take(self._choose(lot.waiting))):
                if coroutine.point.layer == self._decoder.num_layers:
                    lot.finish(coroutine)
                    logits[coroutine.index] = self._decoder.logits(coroutine.hidden)
                else:
                    lot.park(coroutine)
        self._window.finish()
        return torch.cat([logits[index] for index in range(len(parts))])

    def _resume(self, coroutines: Sequence[SequenceCoroutine]) -> list[SequenceCoroutine]:
        """Run one module; return one coroutine per part, at the next yield point."""
        point, moved = coroutines[0].point, list[SequenceCoroutine]()
        if point.module is Module.FFN:
            combined = combine(coroutines)
            self._decoder.ffn_(point.layer, combined.hidden)
            return [_single(point.after(), c.parts[0], c.hidden) for c in combined.split()]
        for single in (single for c in coroutines for single in c.split()):
            (part,) = single.parts
            hidden = self._attend(point.layer, part, single.hidden)
            moved.append(_single(point.after(), part, hidden))
        return moved

    def _attend(self, layer: int, part: Part, hidden: torch.Tensor) -> torch.Tensor:
        cache = self._window.enter(layer, part.moves)
        hidden = self._decoder.attention(layer, hidden, part.prepared, cache)
        self._window.leave(layer, part.prepared.batch.slot_mapping, part.moves)
        return hidden
