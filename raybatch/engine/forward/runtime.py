"""Runs the parts of a step through the layers: which coroutines fire next, and together.

The default order is that of BatchGen's Algorithm 1: attention part by part, then the feed-forward
block of a layer once for all parts that have reached it, so that experts see large batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.coroutine import (
    Lot,
    Module,
    Part,
    SequenceCoroutine,
    YieldPoint,
    combine,
)
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.errors import error_text

Int64s = npt.NDArray[np.int64]
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
