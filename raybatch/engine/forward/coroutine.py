"""Sequences that pause between the modules of a forward pass, and which of them run next, together.

A `SequenceCoroutine` is one or more parts at one yield point, with the hidden states of all their
rows in one tensor. YIELD parks it in a `Lot`, COMBINE joins parked ones, PARTITION takes them apart
again; none of them computes anything, so no order of firing changes a token (BatchGen, section 4).
The default order is that of its Algorithm 1: attention part by part, then the feed-forward block of
a layer once for all parts that have reached it, so that experts see large batches.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder, PreparedBatch
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.errors import error_text

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


Waiting = Mapping[YieldPoint, Sequence[SequenceCoroutine]]


class FiringPolicy(Protocol):
    """Chooses among the coroutines that wait."""

    def choose(self, waiting: Waiting) -> Sequence[SequenceCoroutine]:
        """Return coroutines of one yield point, at least one, that run next as one."""


class CombineAtExperts:
    """Fires a feed-forward block once `min_tokens` wait for it, or nothing else can run.

    Args:
        min_tokens: rows that the experts want at once (B_moe); None waits for all that come, 0 for
            none, so that attention and feed-forward block of a part are one unit.
    """

    def __init__(self, min_tokens: int | None) -> None:
        self._min_tokens = math.inf if min_tokens is None else min_tokens

    def choose(self, waiting: Waiting) -> Sequence[SequenceCoroutine]:
        points = sorted(waiting)
        for point in points:
            if point.module is Module.FFN and _num_rows(waiting[point]) >= self._min_tokens:
                return self._enough(waiting[point])
        attention = [point for point in points if point.module is Module.ATTENTION]
        if attention:
            return waiting[attention[0]][:1]
        return waiting[points[0]]

    def _enough(self, here: Sequence[SequenceCoroutine]) -> Sequence[SequenceCoroutine]:
        num_rows = 0
        for count, coroutine in enumerate(here, start=1):
            num_rows += len(coroutine.hidden)
            if num_rows >= self._min_tokens:
                return here[:count]
        return here


class LayerByLayer:
    """Leaves no row behind in a layer, so that one pass over the layers serves all rows of a step.

    Args:
        policy: chooses among the coroutines of the lowest layer where any wait.
    """

    def __init__(self, policy: FiringPolicy) -> None:
        self._policy = policy

    def choose(self, waiting: Waiting) -> Sequence[SequenceCoroutine]:
        lowest = min(waiting).layer
        return self._policy.choose({p: c for p, c in waiting.items() if p.layer == lowest})


class PartBatch(NamedTuple):
    """The forward batch of a part, and the sequence of each of its rows, int64 [T]."""

    batch: ForwardBatch
    slots: Int64s


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceView:
    """What a hook sees of one sequence at a yield point.

    Args:
        hidden: its hidden states, [R, M], a view; what is written there goes on.
    """

    slot: int
    point: YieldPoint
    hidden: torch.Tensor


Hook = Callable[[SequenceView], None]


@dataclass(kw_only=True, slots=True)
class RuntimeCounters:
    """What has happened since the start."""

    num_ffn_calls: int = 0
    num_ffn_rows: int = 0
    num_attention_calls: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The results of the parts of a step.

    Args:
        logits: float32 [S, V], part after part; rows of failed sequences mean nothing.
        failed: by slot, why its hook failed.
    """

    logits: torch.Tensor
    failed: Mapping[int, str] = field(default_factory=dict)


class CoroutineRuntime:
    """Drives one decoder over one KV pool.

    Args:
        hooks: called for every sequence at every yield point, in this order; one that raises fails
            its sequence and no other.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, policy: FiringPolicy, *, hooks: Sequence[Hook] = ()
    ) -> None:
        self.counters = RuntimeCounters()
        self._decoder = decoder
        self._cache = cache
        self._policy = policy
        self._hooks = tuple(hooks)

    def forward(self, batches: Sequence[PartBatch]) -> StepResult:
        """Run parts that do not read what another one writes in this step."""
        lot, failed = Lot(), dict[int, str]()
        logits: dict[int, torch.Tensor] = {}
        for index, (batch, slots) in enumerate(batches):
            lot.add(self._begin(index, batch, slots))
        while lot:
            taken = lot.take(self._policy.choose(lot.waiting))
            for coroutine in self._resume(taken):
                self._call_hooks(coroutine, failed)
                if coroutine.point.layer == self._decoder.num_layers:
                    lot.finish(coroutine)
                    logits[coroutine.index] = self._decoder.logits(coroutine.hidden)
                else:
                    lot.park(coroutine)
        ordered = [logits[index] for index in range(len(batches))]
        return StepResult(logits=torch.cat(ordered), failed=failed)

    def _begin(self, index: int, batch: ForwardBatch, slots: Int64s) -> SequenceCoroutine:
        part = Part(index=index, slots=slots, prepared=self._decoder.prepare(batch, self._cache))
        hidden = self._decoder.embed(batch)
        return SequenceCoroutine(
            point=YieldPoint(0, Module.ATTENTION),
            parts=(part,),
            num_rows=(len(hidden),),
            hidden=hidden,
        )

    def _resume(self, coroutines: Sequence[SequenceCoroutine]) -> list[SequenceCoroutine]:
        """Run one module; return one coroutine for each part, at the next yield point."""
        point = coroutines[0].point
        if point.module is Module.ATTENTION:
            return [self._attend(single) for c in coroutines for single in c.split()]
        combined = combine(coroutines)
        self._decoder.ffn_(point.layer, combined.hidden)
        self.counters.num_ffn_calls += 1
        self.counters.num_ffn_rows += len(combined.hidden)
        return [_moved(single, single.hidden) for single in combined.split()]

    def _attend(self, single: SequenceCoroutine) -> SequenceCoroutine:
        (part,) = single.parts
        self.counters.num_attention_calls += 1
        hidden = self._decoder.attention(
            single.point.layer, single.hidden, part.prepared, self._cache
        )
        return _moved(single, hidden)

    def _call_hooks(self, single: SequenceCoroutine, failed: dict[int, str]) -> None:
        if not self._hooks:
            return
        slots = _slots_of_rows(single)
        for slot in dict.fromkeys(slots.tolist()):
            rows = np.flatnonzero(slots == slot)
            view = SequenceView(
                slot=slot,
                point=single.point,
                # the rows of a sequence lie together
                hidden=single.hidden[rows[0] : rows[-1] + 1],
            )
            for hook in self._hooks:
                if slot in failed:
                    break
                try:
                    hook(view)
                except Exception as error:
                    # an exception of a user's function fails its row alone
                    failed[slot] = error_text(error)


def _moved(single: SequenceCoroutine, hidden: torch.Tensor) -> SequenceCoroutine:
    return SequenceCoroutine(
        point=single.point.after(), parts=single.parts, num_rows=(len(hidden),), hidden=hidden
    )


def _slots_of_rows(single: SequenceCoroutine) -> Int64s:
    """Return the sequence of each row of hidden states; behind the last attention some are left."""
    (part,) = single.parts
    if len(single.hidden) == len(part.slots):
        return part.slots
    rows: Int64s = part.prepared.batch.logits_idx.cpu().numpy()
    return part.slots[rows]


def _num_rows(coroutines: Sequence[SequenceCoroutine]) -> int:
    return sum(len(coroutine.hidden) for coroutine in coroutines)
