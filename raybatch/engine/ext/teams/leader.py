"""A leader forms a team of its engine and idle ones, and then runs its steps over all of them.

```
prepare   every rank makes its slices and votes                    |  until here a failure
copy      KV of the blocks in use, each rank takes its heads       |  leaves the leader as it
verify    checksums of what every rank has in its pool             |  was, and followers free
commit    steps of this epoch go to all ranks                      v
```

The leader keeps its own pool beside that of the team, with the same blocks: scheduler, table and
sampler go on as if nothing had happened.
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
from raybatch.engine.ext.teams.group import Connect, TeamGroup, connect
from raybatch.engine.ext.teams.messages import Kind, Wire, pack
from raybatch.engine.ext.teams.rank import (
    PIECE_BLOCKS,
    TeamRank,
    Vote,
    checksum,
    cut_model,
    likeness_of,
    why_not_partitioned,
)
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import allocate_kv_cache, free_memory_bytes
from raybatch.engine.ranks.meeting import Meeting, TeamStore
from raybatch.errors import TeamError, error_text
from raybatch.records.arrays import Ints
from raybatch.records.team import FormingCost, TeamCall

# of the room for KV that a team may need from the beginning, and blocks that come soon
_FULL_FRACTION, _SPARE_BLOCKS = 0.9, 3
_NOTHING: Ints = np.empty(0, np.int64)

_logger = logging.getLogger(__name__)


class TeamLeader:
    """The forward pass of a committed team, for the runner of its leader; of one thread.

    Where a follower is gone, the KV of tokens since the commit is lost: the next step raises
    TeamError, so that nothing is raised while a scheduler is at work.
    """

    most_step_tokens = None

    def __init__(self, rank: TeamRank, wire: Wire, group: TeamGroup) -> None:
        self._rank, self._wire, self._group = rank, wire, group
        self.num_steps = 0
        self._failure: TeamError | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a batch of the host over all ranks; return its logits [S, V]."""
        if self._failure is not None:
            raise self._failure
        batch = _with_late_tokens(batch)
        self._wire.send(Kind.STEP, pack(batch))
        logits = self._rank.step(batch)
        assert logits is not None, "logits come together on rank 0"
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
        """Return blocks with the heads of all ranks, [n, 2, L, G, B, R].

        Raises TeamError: a follower is gone.
        """
        return np.concatenate([self._get(block_ids[piece]) for piece in _pieces(len(block_ids))])

    def put(self, rows: npt.NDArray[Any], block_ids: Ints) -> None:
        """Hand blocks with all heads over to the ranks; raises TeamError at once."""
        self._wire.send(Kind.WRITE, block_ids)
        self._rank.write(block_ids, rows)

    def give_back(self, runner: ModelRunner, block_ids: Ints) -> None:
        """Copy these blocks into the leader's own pool, and set the followers free.

        Raises TeamError: a follower is gone, and the pool has some of its blocks.
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
        assert rows is not None, "blocks come together on rank 0"
        return rows

    def _try(self, act: Callable[[], None]) -> None:
        """Keep an error for the next step; behind one, nothing more is done."""
        if self._failure is not None:
            return
        try:
            act()
        except TeamError as error:
            self._failure = error


def _pieces(num_blocks: int) -> list[slice]:
    """Return the pieces in which blocks go over."""
    return [slice(i, i + PIECE_BLOCKS) for i in range(0, num_blocks, PIECE_BLOCKS)]


def form_team(
    call: TeamCall,
    store: TeamStore,
    prepared: PreparedModel,
    runner: ModelRunner,
    used_blocks: Ints,
    *,
    connect: Connect = connect,
) -> tuple[TeamLeader, FormingCost]:
    """Form a team with the followers of this epoch, and give it the KV of the blocks in use.

    Raises TeamError: a rank is missing, has no room, says no, or has other KV than was sent. The
    runner, its pool and its blocks are as they were, also where this returns.
    """
    refusal = why_not_led(runner, call.size, used_blocks)
    if refusal is not None:
        raise TeamError(f"this engine cannot lead a team: {refusal}")
    meeting = Meeting(call, store)
    meeting.await_all(call.size)
    group = connect(call, meeting, runner.device)
    try:
        return _form(call, meeting, group, prepared, runner, used_blocks)
    except (TeamError, RuntimeError, MemoryError) as error:
        group.close()
        raise TeamError(f"team {call.epoch} could not form: {error_text(error)}") from error


def _form(
    call: TeamCall,
    meeting: Meeting,
    group: TeamGroup,
    prepared: PreparedModel,
    runner: ModelRunner,
    used_blocks: Ints,
) -> tuple[TeamLeader, FormingCost]:
    began = time.perf_counter()
    parts = cut_model(call, group, prepared)
    cache = allocate_kv_cache(
        parts.spec,
        num_blocks=runner.num_blocks,
        block_size=runner.config.block_size_tokens,
        dtype=runner.cache.k.dtype,
        device=runner.device,
    )
    rank = TeamRank(call, group, runner.spec, parts.decoder, cache, parts.vocabularies)
    votes = [Vote(slice_bytes=parts.cost.num_bytes, slice_s=parts.cost.seconds)]
    votes += _votes(call, meeting, prepared, runner)
    voted = time.perf_counter()
    wire = Wire(group, call.epoch)
    leader = TeamLeader(rank, wire, group)
    num_bytes = _hand_over(leader, rank, wire, runner, used_blocks)
    wire.send(Kind.COMMIT, _NOTHING)
    now = time.perf_counter()
    cost = FormingCost(
        group=group.kind,
        slice_bytes=max(vote.slice_bytes for vote in votes),
        slice_s=max(vote.slice_s for vote in votes),
        kv_bytes=num_bytes,
        kv_s=now - voted,
        seconds=now - began,
    )
    _logger.info(
        "team %d of %d engines runs over %s: slices of %.1f MB were copied in %.2f s, KV of %.1f "
        "MB in %.2f s, and all took %.2f s",
        call.epoch,
        call.size,
        group.kind,
        cost.slice_bytes / 1e6,
        cost.slice_s,
        num_bytes / 1e6,
        cost.kv_s,
        cost.seconds,
    )
    return leader, cost


def _votes(
    call: TeamCall, meeting: Meeting, prepared: PreparedModel, runner: ModelRunner
) -> list[Vote]:
    """Return what the followers voted; raises TeamError where one of them says no."""
    likeness, votes = likeness_of(prepared, runner), list[Vote]()
    for rank in range(1, call.size):
        vote = Vote.from_text(meeting.find(f"vote of rank {rank}"))
        if vote.refusal:
            raise TeamError(f"rank {rank} refuses: {vote.refusal}")
        if vote.likeness != likeness:
            raise TeamError(f"rank {rank} is another engine: {vote.likeness}, here {likeness}")
        if vote.num_blocks < runner.num_blocks:
            raise TeamError(
                f"rank {rank} has room for {vote.num_blocks} blocks of its heads, and the leader "
                f"has {runner.num_blocks}"
            )
        votes.append(vote)
    return votes


def _hand_over(
    leader: TeamLeader, rank: TeamRank, wire: Wire, runner: ModelRunner, used_blocks: Ints
) -> int:
    """Copy the KV of blocks to all ranks and compare what they have; return its bytes."""
    num_bytes, num_ranks = 0, 0
    for part in _pieces(len(used_blocks)):
        piece = used_blocks[part]
        rows = runner.read_blocks(piece)
        leader.put(rows, piece)
        wire.send(Kind.CHECK, piece)
        found = rank.check(piece)
        num_bytes, num_ranks = num_bytes + rows.nbytes, len(found)
        for other in range(num_ranks):
            if found[other] != checksum(rank.heads_in(rows, other)):
                raise TeamError(f"rank {other} has other KV than it was sent")
    return num_bytes


def why_not_led(runner: ModelRunner, size: int, used_blocks: Ints) -> str | None:
    """Return why an engine cannot lead a team of so many ranks now; None where it can."""
    if (refusal := why_not_partitioned(runner, size)) is not None:
        return refusal
    # memory for a second pool, whose pages are taken when first used
    num_blocks = runner.num_blocks
    if runner.device.type == "cpu":
        num_blocks = min(num_blocks, len(used_blocks) + _SPARE_BLOCKS)
    pool = runner.cache.k
    needed = 2 * num_blocks * pool[:, 0].numel() * pool.element_size() // size
    free = int(_FULL_FRACTION * free_memory_bytes(runner.device))
    if needed > free:
        return f"KV of its rank takes {needed} bytes, and {free} are free"
    return None


def _with_late_tokens(batch: ForwardBatch) -> ForwardBatch:
    """Return a batch of the host with the tokens that a GPU has drawn, which are waited for."""
    if batch.late is None:
        return batch
    token_ids, late = batch.token_ids.clone(), batch.late
    drawn = late.drawn.cpu()[torch.from_numpy(late.places)]
    token_ids[torch.from_numpy(late.rows)] = drawn.to(token_ids.dtype)
    return replace(batch, token_ids=token_ids, late=None)
