"""A replica that has run empty computes its slice of another one's steps."""

import logging

import numpy as np

from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import current_device
from raybatch.engine.team.group import Connect, TeamGroup, connect
from raybatch.engine.team.meeting import Meeting
from raybatch.engine.team.messages import Kind, Wire, unpack
from raybatch.engine.team.rank import (
    TeamRank,
    Vote,
    cut_model,
    likeness_of,
    view_of_heads,
    why_not_partitioned,
)
from raybatch.errors import TeamError, error_text
from raybatch.records.arrays import Ints
from raybatch.records.team import Served, TeamCall

_logger = logging.getLogger(__name__)


class TeamFollower:
    """Follows one call, from its vote to its release; of the thread of its engine.

    The pool of `runner`, which must be idle, becomes the team's: what it held is gone.

    Args:
        refusal: why this engine cannot follow now, "" where it can.
    """

    def __init__(
        self,
        call: TeamCall,
        prepared: PreparedModel,
        runner: ModelRunner,
        *,
        refusal: str = "",
        connect: Connect = connect,
    ) -> None:
        self._call, self._prepared, self._runner = call, prepared, runner
        self._refusal = refusal or why_not_partitioned(runner, call.size) or ""
        self._connect = connect
        self._is_committed, self._num_steps = False, 0

    def serve(self) -> Served:
        """Do what the leader says until it releases this rank, or says no to the team.

        Raises TeamError: the leader or another rank is gone, or this rank cannot be in a team.
        The engine is free in any case.
        """
        device, meeting = self._prepared.model.device, Meeting(self._call)
        meeting.come(self._call.rank, self._refusal)
        if self._refusal:
            raise TeamError(self._refusal)
        with current_device(device):
            group = self._connect(self._call, meeting, device)
            try:
                rank = self._vote(meeting, group)
                wire = Wire(group, self._call.epoch)
                while self._obey(rank, *wire.receive()):
                    pass
            finally:
                group.close()
        _logger.info("this engine computed %d steps of team %d", self._num_steps, self._call.epoch)
        return Served(is_committed=self._is_committed, num_steps=self._num_steps)

    def _vote(self, meeting: Meeting, group: TeamGroup) -> TeamRank:
        """Make the slices and tell the leader; raises TeamError where that is a no."""
        call, runner, place = self._call, self._runner, f"vote of rank {self._call.rank}"
        try:
            parts = cut_model(call, group, self._prepared)
        except (TeamError, RuntimeError, MemoryError) as error:
            meeting.leave(place, Vote(refusal=error_text(error)).to_text())
            raise TeamError(f"this engine cannot be rank {call.rank}: {error}") from error
        cache = view_of_heads(runner.cache, parts.spec.num_kv_heads)
        vote = Vote(
            likeness=likeness_of(self._prepared, runner),
            num_blocks=int(cache.k.shape[1]),
            slice_bytes=parts.cost.num_bytes,
            slice_s=parts.cost.seconds,
        )
        meeting.leave(place, vote.to_text())
        return TeamRank(call, group, runner.spec, parts.decoder, cache, parts.vocabularies)

    def _obey(self, rank: TeamRank, kind: Kind, body: Ints) -> bool:
        """Do what a message says; return whether more will come."""
        if kind is Kind.COMMIT:
            self._is_committed = True
        elif kind is Kind.STEP:
            if not self._is_committed:
                raise TeamError(f"a step of team {self._call.epoch}, which is not committed")
            rank.step(unpack(body))
            self._num_steps += 1
        elif kind is Kind.WRITE:
            rank.write(body.copy(), None)
        elif kind is Kind.CHECK:
            rank.check(body.copy())
        elif kind is Kind.READ:
            rank.read(body.copy())
        elif kind is Kind.COPY:
            sources, targets = np.split(body.copy(), 2)
            rank.copy(sources, targets)
        elif kind is Kind.CLEAR:
            rank.clear(body.copy())
        return kind is not Kind.RELEASE
