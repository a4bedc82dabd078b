"""The role of an engine in tensor-parallel (TP) groups: driver rank, worker rank, or none."""

import logging
from dataclasses import replace

import numpy as np

from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import current_device
from raybatch.engine.phases import EngineExtension, PhasedEngine
from raybatch.errors import RankError, error_text
from raybatch.records.types import Capacity, ReplicaStats
from raybatch_extensions.ranks.records import FormingCost, RankInit, Served
from raybatch_extensions.ranks.rendezvous import Rendezvous, RendezvousStore
from raybatch_extensions.tp_groups.driver import DriverRank, form_tp_group, why_not_led
from raybatch_extensions.tp_groups.group import Connect, RankGroup, connect
from raybatch_extensions.tp_groups.messages import Kind, Wire, unpack
from raybatch_extensions.tp_groups.rank import (
    RankCheck,
    TPRank,
    compatibility_of,
    cut_model,
    view_of_heads,
    why_not_partitioned,
)

# most ranks of a TP group
_MAX_SIZE = 8

_logger = logging.getLogger("raybatch.extensions.tp_groups.engine")


class TPExtension(EngineExtension):
    """Forms and ends the TP groups of one engine; each group has a new generation.

    Used by the engine thread only. After a RankError the engine is unchanged or runs its rows
    alone.

    Args:
        engine: its steps run on the TP group.
        connect: connects the ranks of a TP group.
    """

    name = "tp_groups"

    def __init__(self, engine: PhasedEngine, *, connect: Connect = connect) -> None:
        self._engine, self._connect = engine, connect
        self._store: RendezvousStore | None = None
        self._tp_group: DriverRank | None = None
        self._sizes: tuple[int, ...] = ()
        # TP groups led by this engine that ended because a rank failed
        self._num_lost = 0

    @property
    def keeps_engine(self) -> bool:
        return self._tp_group is not None

    def attach(self, runner: ModelRunner) -> None:
        sizes = range(2, _MAX_SIZE + 1)
        self._sizes = tuple(size for size in sizes if why_not_partitioned(runner, size) is None)

    def capacity(self, found: Capacity) -> Capacity:
        return replace(found, tp_sizes=self._sizes)

    def stats(self, found: ReplicaStats) -> ReplicaStats:
        return replace(found, num_lost_tp_groups=self._num_lost)

    def note_rows(self) -> None:
        """End the TP group once its driver rank has no rows."""
        if self._tp_group is not None and not self._engine.engine.num_unfinished():
            self.reunite()

    def rank_inits(self, generation: int, size: int, host: str, timeout_s: float) -> list[RankInit]:
        """Return the records that form a TP group led by this engine, one for each rank, by rank.

        `host` is an address of this host that the peers can reach. Raises RankError: it cannot
        lead.
        """
        refusal = why_not_led(self._engine.runner, size, self._engine.engine.blocks.used())
        if self._tp_group is not None or refusal is not None:
            reason = refusal or "it leads one already"
            raise RankError(f"this engine cannot lead a TP group: {reason}")
        if self._store is None or self._store.host != host:
            self._store = RendezvousStore(host)
        return self._store.calls(generation, size, timeout_s=timeout_s)

    def lead(self, call: RankInit) -> FormingCost:
        """Form a TP group for the next steps and return its cost.

        It ends with `reunite` or after the last row. Raises RankError: it could not form; the
        engine is unchanged.
        """
        if self._tp_group is not None or self._store is None:
            raise RankError("this engine leads a TP group already, or `rank_inits` was not called")
        prepared, runner = self._engine.prepared, self._engine.runner
        blocks, store = self._engine.engine.blocks, self._store
        tp_group, cost = form_tp_group(
            call, store, prepared, runner, blocks.used(), connect=self._connect
        )
        # unused blocks were not copied to the TP group
        blocks.drop_cached()
        self._tp_group = runner.passes = runner.blocks = tp_group
        return cost

    def call_off(self, generation: int, why: str) -> None:
        """Make a `lead` that waits for ranks fail with the reason `why`; called from any thread.

        No effect once `lead` has returned.
        """
        if self._store is not None:
            self._store.call_off(generation, why)

    def reunite(self) -> None:
        """End the TP group, if any; rows continue with their KV or recompute it from tokens."""
        tp_group, runner, blocks = self._tp_group, self._engine.runner, self._engine.engine.blocks
        if tp_group is None:
            return
        blocks.drop_cached()
        runner.passes = runner.blocks = None
        try:
            tp_group.give_back(runner, blocks.used())
        except RankError as error:
            self._engine.go_on_alone(error)
            return
        self._tp_group = None
        _logger.info(
            "TP group dissolved after %d steps; its driver rank continues", tp_group.num_steps
        )

    def lose(self, error: RankError) -> None:
        """End a TP group that lost a rank; the KV that it computed is lost."""
        if self._tp_group is None:
            return
        _logger.warning(
            "TP group lost a rank after %d steps, recomputing the KV of its rows: %s",
            self._tp_group.num_steps,
            error_text(error),
        )
        self._tp_group.close()
        self._num_lost += 1
        self._tp_group = self._engine.runner.passes = self._engine.runner.blocks = None

    def follow(self, call: RankInit) -> Served:
        """Serve as a worker rank in the steps of another engine until it ends the TP group.

        Overwrites the KV pool of this engine. Raises RankError: this engine has rows or cannot
        join, or the driver rank failed; the engine is free again in any case.
        """
        engine, refusal = self._engine.engine, ""
        if self._engine.num_unfinished() or not engine.moves.is_idle:
            refusal = "this engine has rows, and only an idle engine can join"
        else:
            engine.blocks.drop_cached()
        prepared, runner = self._engine.prepared, engine.runner
        return _follow(call, prepared, runner, refusal=refusal, connect=self._connect)


def _follow(
    call: RankInit, prepared: PreparedModel, runner: ModelRunner, *, refusal: str, connect: Connect
) -> Served:
    """Join a TP group and serve its driver rank until released; return early if this rank refuses.

    The TP group uses the pool of `runner`, which must be idle.

    Args:
        refusal: why this engine cannot join now; "" if it can.
    """
    refusal = refusal or why_not_partitioned(runner, call.size) or ""
    device, rendezvous = prepared.model.device, Rendezvous(call)
    rendezvous.come(call.rank, refusal)
    if refusal:
        raise RankError(refusal)
    with current_device(device):
        group = connect(call, rendezvous, device)
        try:
            rank = _check_rank(call, rendezvous, group, prepared, runner)
            served = _serve(rank, Wire(group, call.generation), call.generation)
        finally:
            group.close()
    _logger.info("this engine computed %d steps of TP group %d", served.num_steps, call.generation)
    return served


def _check_rank(
    call: RankInit,
    rendezvous: Rendezvous,
    group: RankGroup,
    prepared: PreparedModel,
    runner: ModelRunner,
) -> TPRank:
    """Make the weight slices and send the check; raises RankError if this rank refuses."""
    place = f"check of rank {call.rank}"
    try:
        parts = cut_model(call, group, prepared)
    except (RankError, RuntimeError, MemoryError) as error:
        rendezvous.leave(place, RankCheck(refusal=error_text(error)).to_text())
        raise RankError(
            f"this engine cannot join the TP group as rank {call.rank}: {error}"
        ) from error
    cache = view_of_heads(runner.cache, parts.spec.num_kv_heads)
    check = RankCheck(
        compatibility=compatibility_of(prepared, runner),
        num_blocks=int(cache.k.shape[1]),
        slice_bytes=parts.cost.num_bytes,
        slice_s=parts.cost.seconds,
    )
    rendezvous.leave(place, check.to_text())
    return TPRank(call, group, runner.spec, parts.decoder, cache, parts.vocabularies)


def _serve(rank: TPRank, wire: Wire, generation: int) -> Served:
    """Execute messages until the one that releases this rank."""
    is_committed, num_steps = False, 0
    while True:
        kind, body = wire.receive()
        if kind is Kind.RELEASE:
            return Served(is_committed=is_committed, num_steps=num_steps)
        if kind is Kind.COMMIT:
            is_committed = True
        elif kind is Kind.STEP:
            if not is_committed:
                raise RankError(f"received a step of TP group {generation} before its commit")
            rank.step(unpack(body))
            num_steps += 1
        elif kind is Kind.WRITE:
            rank.write(body.copy(), None)
        elif kind is Kind.CHECK:
            rank.check(body.copy())
        elif kind is Kind.READ:
            rank.read(body.copy())
        elif kind is Kind.COPY:
            rank.copy(*np.split(body.copy(), 2))
        elif kind is Kind.CLEAR:
            rank.clear(body.copy())
