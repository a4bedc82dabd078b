"""What an engine has to do with teams: leads one, follows one, or neither."""

import logging
from dataclasses import replace

import numpy as np

from raybatch.engine.ext.teams.group import Connect, TeamGroup, connect
from raybatch.engine.ext.teams.leader import TeamLeader, form_team, why_not_led
from raybatch.engine.ext.teams.messages import Kind, Wire, unpack
from raybatch.engine.ext.teams.rank import (
    TeamRank,
    Vote,
    cut_model,
    likeness_of,
    view_of_heads,
    why_not_partitioned,
)
from raybatch.engine.extension import EngineExtension
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import current_device
from raybatch.engine.phases import PhasedEngine
from raybatch.engine.ranks.meeting import Meeting, TeamStore
from raybatch.errors import TeamError, error_text
from raybatch.records.team import FormingCost, Served, TeamCall
from raybatch.records.types import Capacity, ReplicaStats

# ranks of a team, at most
_MAX_SIZE = 8

_logger = logging.getLogger(__name__)


class Teamwork(EngineExtension):
    """Forms and ends the teams of one engine, each with an epoch of its own; of its thread.

    What raises TeamError leaves the engine as it was, or alone with its rows.

    Args:
        engine: whose steps a team computes.
        connect: how the ranks of a team reach each other.
    """

    name = "teams"

    def __init__(self, engine: PhasedEngine, *, connect: Connect = connect) -> None:
        self._engine, self._connect = engine, connect
        self._store: TeamStore | None = None
        self._team: TeamLeader | None = None
        self._sizes: tuple[int, ...] = ()
        # teams that it led, and of which a rank was gone
        self._num_lost = 0

    @property
    def keeps_engine(self) -> bool:
        return self._team is not None

    def attach(self, runner: ModelRunner) -> None:
        sizes = range(2, _MAX_SIZE + 1)
        self._sizes = tuple(size for size in sizes if why_not_partitioned(runner, size) is None)

    def capacity(self, found: Capacity) -> Capacity:
        return replace(found, team_sizes=self._sizes)

    def stats(self, found: ReplicaStats) -> ReplicaStats:
        return replace(found, num_lost_teams=self._num_lost)

    def note_rows(self) -> None:
        """End a team whose leader has no rows any more."""
        if self._team is not None and not self._engine.engine.num_unfinished():
            self.reunite()

    def team_calls(self, epoch: int, size: int, host: str, timeout_s: float) -> list[TeamCall]:
        """Return what to tell each rank of a team that this engine is to lead, itself first.

        `host` is an address of this host that the others reach. Raises TeamError: it cannot lead.
        """
        refusal = why_not_led(self._engine.runner, size, self._engine.engine.blocks.used())
        if self._team is not None or refusal is not None:
            raise TeamError(f"this engine cannot lead a team: {refusal or 'it leads one'}")
        if self._store is None or self._store.host != host:
            self._store = TeamStore(host)
        return self._store.calls(epoch, size, timeout_s=timeout_s)

    def lead(self, call: TeamCall) -> FormingCost:
        """Spread steps over a team from now on; it ends with `reunite`, or with the last row.

        Raises TeamError: it could not form, and everything is as it was.
        """
        if self._team is not None or self._store is None:
            raise TeamError("this engine leads a team, or made no call for one")
        prepared, runner = self._engine.prepared, self._engine.runner
        blocks, store = self._engine.engine.blocks, self._store
        team, cost = form_team(call, store, prepared, runner, blocks.used(), connect=self._connect)
        # nobody uses them, and so they were not copied
        blocks.drop_cached()
        self._team = runner.passes = runner.blocks = team
        return cost

    def call_off(self, epoch: int, why: str) -> None:
        """Let `lead` fail soon, which waits for ranks; of any thread, and nothing after `lead`."""
        if self._store is not None:
            self._store.call_off(epoch, why)

    def reunite(self) -> None:
        """End the team, if there is one; rows go on with their KV, or by their tokens."""
        team, runner, blocks = self._team, self._engine.runner, self._engine.engine.blocks
        if team is None:
            return
        blocks.drop_cached()
        runner.passes = runner.blocks = None
        try:
            team.give_back(runner, blocks.used())
        except TeamError as error:
            self._engine.go_on_alone(error)
            return
        self._team = None
        _logger.info("a team computed %d steps, and its leader goes on alone", team.num_steps)

    def lose(self, error: TeamError) -> None:
        """End a team of which a rank is gone; what its tokens left in the pools is lost."""
        if self._team is None:
            return
        _logger.warning(
            "a team ends after %d steps, as %s; its rows are computed again by their tokens",
            self._team.num_steps,
            error_text(error),
        )
        self._team.close()
        self._num_lost += 1
        self._team = self._engine.runner.passes = self._engine.runner.blocks = None

    def follow(self, call: TeamCall) -> Served:
        """Compute a slice of another engine's steps until it ends the team.

        What the pool of this engine held is gone. Raises TeamError: it has rows, the leader is
        gone, or it cannot be in a team; it is free again in any case.
        """
        engine, refusal = self._engine.engine, ""
        if self._engine.num_unfinished() or not engine.moves.is_idle:
            refusal = "an engine that has rows cannot follow another one"
        else:
            engine.blocks.drop_cached()
        prepared, runner = self._engine.prepared, engine.runner
        return _follow(call, prepared, runner, refusal=refusal, connect=self._connect)


def _follow(
    call: TeamCall, prepared: PreparedModel, runner: ModelRunner, *, refusal: str, connect: Connect
) -> Served:
    """Do what the leader of a call says until it releases this rank, or this rank says no.

    The pool of `runner`, which must be idle, becomes the team's.

    Args:
        refusal: why this engine cannot follow now, "" where it can.
    """
    refusal = refusal or why_not_partitioned(runner, call.size) or ""
    device, meeting = prepared.model.device, Meeting(call)
    meeting.come(call.rank, refusal)
    if refusal:
        raise TeamError(refusal)
    with current_device(device):
        group = connect(call, meeting, device)
        try:
            rank = _vote(call, meeting, group, prepared, runner)
            served = _serve(rank, Wire(group, call.epoch), call.epoch)
        finally:
            group.close()
    _logger.info("this engine computed %d steps of team %d", served.num_steps, call.epoch)
    return served


def _vote(
    call: TeamCall, meeting: Meeting, group: TeamGroup, prepared: PreparedModel, runner: ModelRunner
) -> TeamRank:
    """Make the slices and tell the leader; raises TeamError where that is a no."""
    place = f"vote of rank {call.rank}"
    try:
        parts = cut_model(call, group, prepared)
    except (TeamError, RuntimeError, MemoryError) as error:
        meeting.leave(place, Vote(refusal=error_text(error)).to_text())
        raise TeamError(f"this engine cannot be rank {call.rank}: {error}") from error
    cache = view_of_heads(runner.cache, parts.spec.num_kv_heads)
    vote = Vote(
        likeness=likeness_of(prepared, runner),
        num_blocks=int(cache.k.shape[1]),
        slice_bytes=parts.cost.num_bytes,
        slice_s=parts.cost.seconds,
    )
    meeting.leave(place, vote.to_text())
    return TeamRank(call, group, runner.spec, parts.decoder, cache, parts.vocabularies)


def _serve(rank: TeamRank, wire: Wire, epoch: int) -> Served:
    """Do what messages say, up to the one that releases this rank."""
    is_committed, num_steps = False, 0
    while True:
        kind, body = wire.receive()
        if kind is Kind.RELEASE:
            return Served(is_committed=is_committed, num_steps=num_steps)
        if kind is Kind.COMMIT:
            is_committed = True
        elif kind is Kind.STEP:
            if not is_committed:
                raise TeamError(f"a step of team {epoch}, which is not committed")
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
