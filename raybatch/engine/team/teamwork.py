"""What an engine has to do with teams: leads one, follows one, or neither."""

import logging

from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.team.follower import TeamFollower
from raybatch.engine.team.group import Connect, connect
from raybatch.engine.team.leader import TeamLeader, form_team, why_not_led
from raybatch.engine.team.meeting import TeamStore
from raybatch.engine.team.rank import why_not_partitioned
from raybatch.errors import TeamError, error_text
from raybatch.records.team import FormingCost, Served, TeamCall

# ranks of a team, at most
_MAX_SIZE = 8

_logger = logging.getLogger(__name__)


def team_sizes(runner: ModelRunner) -> tuple[int, ...]:
    """Return how many ranks a team of an engine may have, itself included."""
    sizes = range(2, _MAX_SIZE + 1)
    return tuple(size for size in sizes if why_not_partitioned(runner, size) is None)


class Teamwork:
    """Forms and ends the teams of one engine, each with an epoch of its own; of one thread.

    Args:
        connect: makes the group of a call.
    """

    def __init__(self, prepared: PreparedModel, *, connect: Connect = connect) -> None:
        self._prepared, self._connect = prepared, connect
        self._store: TeamStore | None = None
        self._team: TeamLeader | None = None
        # teams that it led, and of which a rank was gone
        self.num_lost = 0

    @property
    def leads(self) -> bool:
        return self._team is not None

    def calls(
        self,
        epoch: int,
        size: int,
        runner: ModelRunner,
        blocks: BlockManager,
        *,
        host: str,
        timeout_s: float,
    ) -> list[TeamCall]:
        """Return what to tell each rank of a team that this engine is to lead, itself first.

        `host` is an address of this host that the others reach. Raises TeamError: it cannot lead.
        """
        refusal = why_not_led(runner, size, blocks.used())
        if self._team is not None or refusal is not None:
            raise TeamError(f"this engine cannot lead a team: {refusal or 'it leads one'}")
        if self._store is None or self._store.host != host:
            self._store = TeamStore(host)
        return self._store.calls(epoch, size, timeout_s=timeout_s)

    def lead(self, call: TeamCall, runner: ModelRunner, blocks: BlockManager) -> FormingCost:
        """Form a team, whose ranks compute the steps of `runner` from then on.

        Raises TeamError: it could not form, and everything is as it was.
        """
        if self._team is not None or self._store is None:
            raise TeamError("this engine leads a team, or made no call for one")
        team = form_team(
            call, self._store, self._prepared, runner, blocks.used(), connect=self._connect
        )
        # nobody uses them, and so they were not copied
        blocks.drop_cached()
        self._team = runner.partition = team
        return team.cost

    def call_off(self, epoch: int, why: str) -> None:
        """Let a team that forms give up, while the thread of the engine waits for its ranks."""
        if self._store is not None:
            self._store.call_off(epoch, why)

    def reunite(self, runner: ModelRunner, blocks: BlockManager) -> None:
        """End the team, after the KV of all heads came back; without a team nothing happens.

        Raises TeamError: a rank is gone, and with it its heads.
        """
        team = self._team
        if team is None:
            return
        blocks.drop_cached()
        runner.partition = None
        team.give_back(runner, blocks.used())
        self._team = None
        _logger.info("a team computed %d steps, and its leader goes on alone", team.num_steps)

    def give_up(self, runner: ModelRunner, error: TeamError) -> None:
        """End a team of which a rank is gone; what its tokens left in the pools is lost."""
        if self._team is not None:
            _logger.warning(
                "a team ends after %d steps, as %s; its rows are computed again by their tokens",
                self._team.num_steps,
                error_text(error),
            )
            self._team.close()
            self.num_lost += 1
        self._team = runner.partition = None

    def follow(
        self, call: TeamCall, runner: ModelRunner, blocks: BlockManager, *, refusal: str
    ) -> Served:
        """Compute a slice of the steps of another engine until that ends the team.

        The engine has no rows; what its pool held is gone. Raises TeamError: the leader is gone, or
        this engine cannot be in a team, as with a refusal; it is free again in any case.
        """
        if not refusal:
            blocks.drop_cached()
        follower = TeamFollower(
            call, self._prepared, runner, refusal=refusal, connect=self._connect
        )
        return follower.serve()
