"""Whether the passes of an engine that shares weights copy them, or are rounds of its group.

```
copies   a pass of its own: `SharedLayers` lends tiles                      large batches
rounds   a pass at the same time as all others: `FfnRounds` sends rows      the tail
```

Rounds begin with `enter`, between two steps, and end for all ranks behind the round in which any of
them asked for it. Steps take a share of the rows that one may have; where those of all are more
even so, all know it from the start of the round, and pass with copies. A rank without rows serves
where others have begun a round. Where a rank is gone, the pass is computed again with copies: what
it has left in KV is written once more.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.ext.sharing.layers import SharedLayers
from raybatch.engine.ext.sharing.peers import Peers, connect_peers, make_inbox
from raybatch.engine.ext.sharing.rounds import FfnRounds, RoundPlan, seconds_of_rows
from raybatch.engine.ext.sharing.segments import Segment
from raybatch.engine.ext.sharing.threshold import measure_threshold, seconds_of_copies
from raybatch.engine.extension import EngineExtension
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.ranks.meeting import Meeting, TeamStore
from raybatch.errors import TeamError, error_text
from raybatch.policy.sharing import most_round_rows
from raybatch.records.team import TeamCall
from raybatch.records.types import Capacity, ReplicaStats

# of a call, where its ranks meet, and what this one receives in
ConnectPeers = Callable[[TeamCall, Meeting, Segment | None], Peers]

_logger = logging.getLogger(__name__)


class ShareModes(EngineExtension):
    """The rounds of one engine of a group, each time with an epoch of their own; of its thread.

    What raises TeamError leaves the engine to copy weights.

    Args:
        prepared: a model whose tiles are shared.
        connect: makes the peers of a call.
    """

    name = "sharing"
    _runner: ModelRunner

    def __init__(self, prepared: PreparedModel, *, connect: ConnectPeers = connect_peers) -> None:
        layers = prepared.decoder.layers
        assert isinstance(layers, SharedLayers), "a model that is shared"
        self._model, self._layers = prepared.model, layers
        self._decoder, self._connect = prepared.decoder, connect
        self._service = self._decoder.ffn_service = layers.service(self._decoder)
        self._copies_s = seconds_of_copies(self._layers, prepared.model.device)
        self._inbox = make_inbox(self._layers.ownership.size, prepared.model.device)
        self._store: TeamStore | None = None
        self._rounds: FfnRounds | None = None
        self._epoch, self._ends = 0, False
        self._most_rows = prepared.config.token_budget
        self._past: Counter[str] = Counter()
        self._threshold_rows: float | None = None
        # rounds that ended although nobody had asked for it
        self.num_lost = 0

    def attach(self, runner: ModelRunner) -> None:
        """Let the passes of a runner be rounds where there are some."""
        self._runner = runner
        if self._threshold_rows is None:
            rows_s = partial(
                seconds_of_rows, spec=self._model.spec, layers=self._layers, device=runner.device
            )
            self._threshold_rows = measure_threshold(
                runner,
                self._layers,
                copies_s=self._copies_s,
                rows_s=rows_s,
                most_rows=self.most_step_tokens,
            )
        runner.passes = None if self._rounds is None else self

    def capacity(self, found: Capacity) -> Capacity:
        return replace(found, weight_bytes=found.weight_bytes + self._layers.ring.num_bytes)

    def stats(self, found: ReplicaStats) -> ReplicaStats:
        counts: dict[str, Any] = self._past
        if self._rounds is not None:
            counts = self._past + _counts(self._rounds)
        rows, num_lost = self._threshold_rows or 0.0, self.num_lost
        return replace(found, threshold_rows=rows, num_lost_rounds=num_lost, **counts)

    def close(self) -> None:
        self.give_up()
        self._layers.ring.close()

    @property
    def is_in_rounds(self) -> bool:
        return self._rounds is not None

    @property
    def most_step_tokens(self) -> int:
        """Return the rows of one rank with which those of all are no more than a step may have."""
        return most_round_rows(self._most_rows, self._layers.ownership.size)

    def calls(self, epoch: int, size: int, host: str, timeout_s: float) -> list[TeamCall]:
        """Return what to tell each rank of the group of rounds that are to begin, itself first.

        `host` is an address of this host that the others reach.
        """
        if self._store is None or self._store.host != host:
            self._store = TeamStore(host)
        return self._store.calls(epoch, size, timeout_s=timeout_s)

    def enter(self, call: TeamCall) -> int:
        """Let passes be rounds from now on, once all ranks are there; return their epoch.

        Raises TeamError: one is not, or this one was in a later epoch; it copies weights as before.
        """
        refusal = ""
        if self._rounds is not None or call.epoch <= self._epoch:
            are = "is in rounds of" if self._rounds is not None else "has been in"
            refusal = f"this engine {are} epoch {self._epoch}, and is to begin epoch {call.epoch}"
        store = None if call.rank else self._store
        try:
            meeting = self._meet(call, store, refusal)
        except TeamError as error:
            # the others need not wait for one that does not come
            if store is not None:
                with suppress(TeamError):
                    store.call_off(call.epoch, error_text(error))
            raise
        peers = self._connect(call, meeting, self._inbox)
        self._rounds = FfnRounds(peers, self._model.spec, self._layers, self._decoder)
        self._epoch, self._ends = call.epoch, False
        self._runner.passes = self
        return self._epoch

    @staticmethod
    def _meet(call: TeamCall, store: TeamStore | None, refusal: str) -> Meeting:
        """Return where the ranks of a call are, once they are; raises TeamError with a refusal."""
        if refusal:
            with suppress(TeamError):
                Meeting(call, store).come(call.rank, refusal)
            raise TeamError(refusal)
        meeting = Meeting(call, store)
        meeting.come(call.rank, "")
        if store is not None:
            meeting.await_all(call.size)
        return meeting

    def leave(self, epoch: int, at_once: bool) -> int:
        """Ask for the end of the rounds of an epoch or of those before, behind the next one.

        At once where they are not there everywhere: others find this rank gone then. Returns
        the epoch that this rank is in, which is a later one where it has missed this call.
        """
        if self._epoch > epoch:
            return self._epoch
        self._epoch = epoch
        if self._rounds is not None:
            self._ends = True
            if at_once:
                self.give_up()
        return self._epoch

    def is_awaited(self) -> bool:
        """Return whether another rank waits for a round, or rounds are to end; at once."""
        if self._rounds is None:
            return False
        try:
            return self._ends or self._rounds.is_wanted()
        except TeamError as error:
            self._lose(error)
            return False

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a pass as a round, or with copies where these are over; return its logits [S, V]."""
        batch, cache = self._runner.place(batch), self._runner.cache
        try:
            logits = self._round(batch, cache)
        except TeamError as error:
            self._lose(error)
            logits = None
        except BaseException:
            # the others need not wait for the rest of this pass
            self.give_up()
            raise
        return self._decoder.forward(batch, cache) if logits is None else logits

    def _round(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Return the logits of a round; None where it is one of too many rows."""
        rounds = self._rounds
        assert rounds is not None, "rounds have begun"
        plan = rounds.begin(len(batch.token_ids), len(batch.logits_idx), ends=self._ends)
        if self._is_too_large(plan):
            self._skip(plan)
            return None
        self._decoder.ffn_service = rounds.add_ffn_
        try:
            logits = self._decoder.forward(batch, cache)
        finally:
            self._decoder.ffn_service = self._service
        if plan.is_last:
            self._go_back()
        return logits

    def _is_too_large(self, plan: RoundPlan) -> bool:
        """Return whether an owner would compute more rows than a step has."""
        return sum(plan.rows) > max(self._most_rows, *plan.rows)

    def _skip(self, plan: RoundPlan) -> None:
        """Make no round of one that has begun, as all ranks do."""
        assert self._rounds is not None, "rounds have begun"
        self._rounds.skip()
        if plan.is_last:
            self._go_back()

    def serve(self) -> None:
        """Run a round without rows where another rank waits for it, or rounds are to end."""
        rounds = self._rounds
        if rounds is None or not self.is_awaited():
            return
        try:
            plan = rounds.begin(0, 0, ends=self._ends)
            if self._is_too_large(plan):
                self._skip(plan)
                return
            rounds.serve()
        except TeamError as error:
            self._lose(error)
            return
        if plan.is_last:
            self._go_back()

    def _lose(self, error: TeamError) -> None:
        _logger.warning(
            "rounds of epoch %d end, and weights are copied: %s", self._epoch, error_text(error)
        )
        self.num_lost += 1
        self.give_up()

    def give_up(self) -> None:
        """Copy weights again, whatever the others do, which do not wait for this rank any more."""
        if self._rounds is not None:
            self._rounds.close()
            self._go_back()

    def _go_back(self) -> None:
        rounds, self._rounds, self._ends = self._rounds, None, False
        assert rounds is not None, "rounds have begun"
        self._runner.passes = None
        self._past += _counts(rounds)
        rounds.close()


def _counts(rounds: FfnRounds) -> Counter[str]:
    """Return what was done in rounds, as `ReplicaStats` names it."""
    counters = rounds.counters
    return Counter(
        num_rounds=counters.num_rounds,
        num_dummy_rounds=counters.num_dummies,
        num_served_rows=counters.num_served_rows,
        round_bytes=sum(counters.sent_bytes),
    )
