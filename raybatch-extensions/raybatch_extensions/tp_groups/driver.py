"""The driver rank of a TP group: forms it from idle engines and runs its steps on all ranks.

```
prepare   every rank makes its weight slices and reports its check |  a failure up to here
copy      KV of the blocks in use; each rank takes its heads       |  leaves the driver rank
verify    checksums of the KV of every rank                        |  unchanged and the
commit    steps of this generation go to all ranks                 v  worker ranks free
```

The driver rank keeps its own KV pool next to that of the group, with equal block ids: scheduler,
table and sampler do not notice the group.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import allocate_kv_cache, free_memory_bytes
from raybatch.errors import RankError, error_text
from raybatch.records.arrays import Ints
from raybatch_extensions.ranks.records import FormingCost, RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous, RendezvousStore
from raybatch_extensions.tp_groups.group import Connect, RankGroup, connect
from raybatch_extensions.tp_groups.messages import Kind, Wire, pack
from raybatch_extensions.tp_groups.rank import (
    PIECE_BLOCKS,
    RankCheck,
    TPRank,
    checksum,
    compatibility_of,
    cut_model,
    why_not_partitioned,
)

# largest share of free memory for the KV slice, and blocks reserved for growth
_FULL_FRACTION, _SPARE_BLOCKS = 0.9, 3
_NOTHING: Ints = np.empty(0, np.int64)

_logger = logging.getLogger("raybatch.extensions.tp_groups.driver")


class DriverRank:
    """Runs forward passes on a committed TP group, for the driver's runner; used by one thread.

    If a worker rank fails, the KV computed since the commit is lost. Methods that the scheduler
    calls do not raise then: the next `forward` raises RankError.
    """

    most_step_tokens = None

    def __init__(self, rank: TPRank, wire: Wire, group: RankGroup) -> None:
        self._rank, self._wire, self._group = rank, wire, group
        self.num_steps = 0
        self._failure: RankError | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a host batch on all ranks; return its logits [S, V]."""
        if self._failure is not None:
            raise self._failure
        batch = _with_late_tokens(batch)
        self._wire.send(Kind.STEP, pack(batch))
        logits = self._rank.step(batch)
        assert logits is not None, "rank 0 gathers the logits"
        self.num_steps += 1
        return logits

    def copy_blocks(self, source_ids: Ints, target_ids: Ints) -> None:
        self._rank.copy(source_ids, target_ids)
        self._try(partial(self._wire.send, Kind.COPY, np.concatenate((source_ids, target_ids))))

    def clear_blocks(self, block_ids: Ints) -> None:
        self._rank.clear(block_ids)
        self._try(partial(self._wire.send, Kind.CLEAR, block_ids))

    def write_blocks(self, rows: npt.NDArray[Any], block_ids: Ints) -> None:
        for piece in _pieces(len(block_ids)):
            self._try(partial(self.put, rows[piece], block_ids[piece]))

    def read_blocks(self, block_ids: Ints) -> npt.NDArray[Any]:
        """Gather blocks with the KV heads of all ranks, as `kv_cache.read_blocks` returns them.

        Raises RankError: a worker rank failed.
        """
        return np.concatenate([self._get(block_ids[piece]) for piece in _pieces(len(block_ids))])

    def put(self, rows: npt.NDArray[Any], block_ids: Ints) -> None:
        """Write blocks with all KV heads to the ranks, each its heads; raises RankError at once."""
        self._wire.send(Kind.WRITE, block_ids)
        self._rank.write(block_ids, rows)

    def give_back(self, runner: ModelRunner, block_ids: Ints) -> None:
        """Copy these blocks into the driver's own pool and release the worker ranks.

        Raises RankError: a worker rank failed; the pool is incomplete.
        """
        for piece in _pieces(len(block_ids)):
            runner.write_blocks(self._get(block_ids[piece]), block_ids[piece])
        self._wire.send(Kind.RELEASE, _NOTHING)
        self.close()

    def close(self) -> None:
        self._group.close()

    def _get(self, block_ids: Ints) -> npt.NDArray[Any]:
        self._wire.send(Kind.READ, block_ids)
        rows = self._rank.read(block_ids)
        assert rows is not None, "rank 0 gathers the blocks"
        return rows

    def _try(self, act: Callable[[], None]) -> None:
        """Run `act` and defer its error to the next step; skip it after an error."""
        if self._failure is not None:
            return
        try:
            act()
        except RankError as error:
            self._failure = error


def _pieces(num_blocks: int) -> list[slice]:
    """Return the slices in which blocks are sent."""
    return [slice(i, i + PIECE_BLOCKS) for i in range(0, num_blocks, PIECE_BLOCKS)]


def form_tp_group(
    call: RankInit,
    store: RendezvousStore,
    prepared: PreparedModel,
    runner: ModelRunner,
    used_blocks: Ints,
    *,
    connect: Connect = connect,
) -> tuple[DriverRank, FormingCost]:
    """Form a TP group with the ranks of `call`'s generation; return its driver rank and the cost.

    The KV of `used_blocks` is copied to it. The runner and its pool are not changed. Raises
    RankError: a rank is missing, has too little memory, cannot join, or received damaged KV.
    """
    refusal = why_not_led(runner, call.size, used_blocks)
    if refusal is not None:
        raise RankError(f"this engine cannot lead a TP group: {refusal}")
    rendezvous = Rendezvous(call, store)
    rendezvous.await_all(call.size)
    group = connect(call, rendezvous, runner.device)
    try:
        return _form(call, rendezvous, group, prepared, runner, used_blocks)
    except (RankError, RuntimeError, MemoryError) as error:
        group.close()
        text = f"could not form TP group {call.generation}: {error_text(error)}"
        raise RankError(text) from error


def _form(
    call: RankInit,
    rendezvous: Rendezvous,
    group: RankGroup,
    prepared: PreparedModel,
    runner: ModelRunner,
    used_blocks: Ints,
) -> tuple[DriverRank, FormingCost]:
    began = time.perf_counter()
    parts = cut_model(call, group, prepared)
    cache = allocate_kv_cache(
        parts.spec,
        num_blocks=runner.num_blocks,
        block_size=runner.config.block_size_tokens,
        dtype=runner.cache.k.dtype,
        device=runner.device,
    )
    rank = TPRank(call, group, runner.spec, parts.decoder, cache, parts.vocabularies)
    checks = [RankCheck(slice_bytes=parts.cost.num_bytes, slice_s=parts.cost.seconds)]
    checks += _rank_checks(call, rendezvous, prepared, runner)
    voted = time.perf_counter()
    wire = Wire(group, call.generation)
    driver = DriverRank(rank, wire, group)
    num_bytes = _hand_over(driver, rank, wire, runner, used_blocks)
    wire.send(Kind.COMMIT, _NOTHING)
    now = time.perf_counter()
    cost = FormingCost(
        group=group.kind,
        slice_bytes=max(check.slice_bytes for check in checks),
        slice_s=max(check.slice_s for check in checks),
        kv_bytes=num_bytes,
        kv_s=now - voted,
        seconds=now - began,
    )
    _logger.info(
        "formed TP group %d of %d engines over %s: copied weight slices of %.1f MB in %.2f s and "
        "KV of %.1f MB in %.2f s, %.2f s in total",
        call.generation,
        call.size,
        group.kind,
        cost.slice_bytes / 1e6,
        cost.slice_s,
        num_bytes / 1e6,
        cost.kv_s,
        cost.seconds,
    )
    return driver, cost


def _rank_checks(
    call: RankInit, rendezvous: Rendezvous, prepared: PreparedModel, runner: ModelRunner
) -> list[RankCheck]:
    """Return the checks of the worker ranks; raises RankError if one refuses."""
    compatibility, checks = compatibility_of(prepared, runner), list[RankCheck]()
    for rank in range(1, call.size):
        check = RankCheck.from_text(rendezvous.find(f"check of rank {rank}"))
        if check.refusal:
            raise RankError(f"rank {rank} cannot join the TP group: {check.refusal}")
        if check.compatibility != compatibility:
            raise RankError(
                f"rank {rank} cannot join the TP group: its weights, dtypes, block size, torch or "
                f"device differ ({check.compatibility}; the driver rank: {compatibility})"
            )
        if check.num_blocks < runner.num_blocks:
            raise RankError(
                f"rank {rank} cannot join the TP group: it has memory for {check.num_blocks} KV "
                f"blocks, fewer than the {runner.num_blocks} of the driver rank"
            )
        checks.append(check)
    return checks


def _hand_over(
    driver: DriverRank, rank: TPRank, wire: Wire, runner: ModelRunner, used_blocks: Ints
) -> int:
    """Copy the KV of blocks to all ranks and compare checksums; return its bytes."""
    num_bytes, num_ranks = 0, 0
    for part in _pieces(len(used_blocks)):
        piece = used_blocks[part]
        rows = runner.read_blocks(piece)
        driver.put(rows, piece)
        wire.send(Kind.CHECK, piece)
        found = rank.check(piece)
        num_bytes, num_ranks = num_bytes + rows.nbytes, len(found)
        for other in range(num_ranks):
            if found[other] != checksum(rank.heads_in(rows, other)):
                raise RankError(f"checksum error: rank {other} received damaged KV")
    return num_bytes


def why_not_led(runner: ModelRunner, size: int, used_blocks: Ints) -> str | None:
    """Return why an engine cannot lead a TP group of `size` ranks now; None if it can.

    `used_blocks` are the ids of KV blocks in use.
    """
    if (refusal := why_not_partitioned(runner, size)) is not None:
        return refusal
    # memory for a second pool, whose pages the system allocates on first use
    num_blocks = runner.num_blocks
    if runner.device.type == "cpu":
        num_blocks = min(num_blocks, len(used_blocks) + _SPARE_BLOCKS)
    pool = runner.cache.k
    needed = 2 * num_blocks * pool[:, 0].numel() * pool.element_size() // size
    free = int(_FULL_FRACTION * free_memory_bytes(runner.device))
    if needed > free:
        return f"its KV slice needs {needed} bytes, and {free} bytes are free"
    return None


def _with_late_tokens(batch: ForwardBatch) -> ForwardBatch:
    """Return a host batch with the tokens that the GPU sampled; waits for them."""
    if batch.late is None:
        return batch
    token_ids, late = batch.token_ids.clone(), batch.late
    drawn = late.drawn.cpu()[torch.from_numpy(late.places)]
    token_ids[torch.from_numpy(late.rows)] = drawn.to(token_ids.dtype)
    return replace(batch, token_ids=token_ids, late=None)
