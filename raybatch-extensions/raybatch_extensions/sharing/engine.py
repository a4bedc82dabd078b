"""Switches an engine with shared weights between weight fetch and activation exchange.

```
fetch      each rank runs its own passes: `SharedLayers` lends shards       large batches
exchange   all ranks pass at once: `ActivationExchange` sends rows          the tail
```

Exchange begins with `enter`, between two steps. It ends on all ranks after the pass in which any
rank requested the end. Each rank's steps are limited to a share of the row limit; if the total
exceeds it anyway, all ranks learn it at the start of the pass and run it with weight fetch. A rank
without rows serves the passes of its peers. If a rank fails, the pass runs again with weight fetch
and rewrites its KV.
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
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.phases import EngineExtension
from raybatch.errors import RankError, error_text
from raybatch.records.types import Capacity, ReplicaStats
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous, RendezvousStore
from raybatch_extensions.sharing.activation_exchange import (
    ActivationExchange,
    ExchangePlan,
    seconds_of_rows,
)
from raybatch_extensions.sharing.layers import SharedLayers
from raybatch_extensions.sharing.modes import max_exchange_rows
from raybatch_extensions.sharing.peers import Peers, connect_peers, make_inbox
from raybatch_extensions.sharing.segments import Segment
from raybatch_extensions.sharing.threshold import fetch_seconds, measure_threshold

# arguments: the call, the meeting point of its ranks, the inbox of this rank
ConnectPeers = Callable[[RankInit, Rendezvous, Segment | None], Peers]

_logger = logging.getLogger("raybatch.extensions.sharing.engine")


class SharingModes(EngineExtension):
    """Switches one engine between weight fetch and activation exchange.

    Each exchange has a generation, a rising number that is the same on all its ranks. Used by the
    engine thread only. After a RankError the engine is in weight fetch.

    Args:
        prepared: a model whose shards are shared.
        connect: connects the ranks of an exchange.
    """

    name = "sharing"
    _runner: ModelRunner

    def __init__(self, prepared: PreparedModel, *, connect: ConnectPeers = connect_peers) -> None:
        layers = prepared.decoder.layers
        assert isinstance(layers, SharedLayers), "the model is not shared"
        self._model, self._layers = prepared.model, layers
        self._decoder, self._connect = prepared.decoder, connect
        self._service = self._decoder.ffn_service = layers.service(self._decoder)
        self._fetch_s = fetch_seconds(self._layers, prepared.model.device)
        self._inbox = make_inbox(self._layers.ownership.size, prepared.model.device)
        self._store: RendezvousStore | None = None
        self._exchange: ActivationExchange | None = None
        self._generation, self._ends = 0, False
        self._most_rows = prepared.config.token_budget
        self._past: Counter[str] = Counter()
        self._threshold_rows: float | None = None
        # exchanges that a failed rank ended
        self.num_lost = 0

    def attach(self, runner: ModelRunner) -> None:
        """Make a runner run its passes through this extension while an exchange is active."""
        self._runner = runner
        if self._threshold_rows is None:
            rows_s = partial(
                seconds_of_rows, spec=self._model.spec, layers=self._layers, device=runner.device
            )
            self._threshold_rows = measure_threshold(
                runner,
                self._layers,
                fetch_s=self._fetch_s,
                rows_s=rows_s,
                most_rows=self.most_step_tokens,
            )
        runner.passes = None if self._exchange is None else self

    def capacity(self, found: Capacity) -> Capacity:
        return replace(found, weight_bytes=found.weight_bytes + self._layers.buffers.num_bytes)

    def stats(self, found: ReplicaStats) -> ReplicaStats:
        counts: dict[str, Any] = self._past
        if self._exchange is not None:
            counts = self._past + _counts(self._exchange)
        rows, num_lost = self._threshold_rows or 0.0, self.num_lost
        return replace(found, threshold_rows=rows, num_lost_exchanges=num_lost, **counts)

    def close(self) -> None:
        self.give_up()
        self._layers.buffers.close()

    @property
    def is_exchanging(self) -> bool:
        return self._exchange is not None

    @property
    def most_step_tokens(self) -> int:
        """Return the most rows per rank for which all ranks together keep the limit of a step."""
        return max_exchange_rows(self._most_rows, self._layers.ownership.size)

    def calls(self, generation: int, size: int, host: str, timeout_s: float) -> list[RankInit]:
        """Return the records that start an exchange, one for each rank, this rank's first.

        `host` is an address of this host that the peers can reach.
        """
        if self._store is None or self._store.host != host:
            self._store = RendezvousStore(host)
        return self._store.calls(generation, size, timeout_s=timeout_s)

    def enter(self, call: RankInit) -> int:
        """Start an exchange once all ranks have joined; return its generation.

        Raises RankError: a rank did not join, or this one has been in a later generation; the
        engine stays in weight fetch.
        """
        refusal = ""
        if self._exchange is not None or call.generation <= self._generation:
            state = "is in" if self._exchange is not None else "has been in"
            refusal = (
                f"cannot start generation {call.generation}: this engine {state} generation "
                f"{self._generation}"
            )
        store = None if call.rank else self._store
        try:
            rendezvous = self._meet(call, store, refusal)
        except RankError as error:
            # the peers must not wait for a rank that does not join
            if store is not None:
                with suppress(RankError):
                    store.call_off(call.generation, error_text(error))
            raise
        peers = self._connect(call, rendezvous, self._inbox)
        self._exchange = ActivationExchange(peers, self._model.spec, self._layers, self._decoder)
        self._generation, self._ends = call.generation, False
        self._runner.passes = self
        return self._generation

    @staticmethod
    def _meet(call: RankInit, store: RendezvousStore | None, refusal: str) -> Rendezvous:
        """Return the meeting once all ranks have joined; raises RankError with a refusal."""
        if refusal:
            with suppress(RankError):
                Rendezvous(call, store).come(call.rank, refusal)
            raise RankError(refusal)
        rendezvous = Rendezvous(call, store)
        rendezvous.come(call.rank, "")
        if store is not None:
            rendezvous.await_all(call.size)
        return rendezvous

    def leave(self, generation: int, at_once: bool) -> int:
        """Request that the current exchange ends after its next pass.

        No effect if this rank is in a later generation than `generation`. With `at_once` leave now,
        which the peers see as a lost rank: for an exchange that did not start on all ranks. Returns
        the generation of this rank.
        """
        if self._generation > generation:
            return self._generation
        self._generation = generation
        if self._exchange is not None:
            self._ends = True
            if at_once:
                self.give_up()
        return self._generation

    def is_awaited(self) -> bool:
        """Return whether `serve` must run: a peer waits for an exchange pass, or an end is due."""
        if self._exchange is None:
            return False
        try:
            return self._ends or self._exchange.is_wanted()
        except RankError as error:
            self._lose(error)
            return False

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run a pass by exchange, or by weight fetch if that has ended; return logits [S, V]."""
        batch, cache = self._runner.place(batch), self._runner.cache
        try:
            logits = self._exchange_pass(batch, cache)
        except RankError as error:
            self._lose(error)
            logits = None
        except BaseException:
            # the peers must not wait for the rest of this pass
            self.give_up()
            raise
        return self._decoder.forward(batch, cache) if logits is None else logits

    def _exchange_pass(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Return the logits of an exchange pass; None if all ranks have too many rows."""
        exchange = self._exchange
        assert exchange is not None, "no exchange has started"
        plan = exchange.begin(len(batch.token_ids), len(batch.logits_idx), ends=self._ends)
        if self._is_too_large(plan):
            self._skip(plan)
            return None
        self._decoder.ffn_service = exchange.add_ffn_
        try:
            logits = self._decoder.forward(batch, cache)
        finally:
            self._decoder.ffn_service = self._service
        if plan.is_last:
            self._go_back()
        return logits

    def _is_too_large(self, plan: ExchangePlan) -> bool:
        """Return whether an owner would compute more rows than a step may have."""
        return sum(plan.rows) > max(self._most_rows, *plan.rows)

    def _skip(self, plan: ExchangePlan) -> None:
        """Cancel the exchange pass that has begun; all ranks do."""
        assert self._exchange is not None, "no exchange has started"
        self._exchange.skip()
        if plan.is_last:
            self._go_back()

    def serve(self) -> None:
        """Run an exchange pass without own rows, if a peer waits or an end is requested."""
        exchange = self._exchange
        if exchange is None or not self.is_awaited():
            return
        try:
            plan = exchange.begin(0, 0, ends=self._ends)
            if self._is_too_large(plan):
                self._skip(plan)
                return
            exchange.serve()
        except RankError as error:
            self._lose(error)
            return
        if plan.is_last:
            self._go_back()

    def _lose(self, error: RankError) -> None:
        _logger.warning(
            "activation exchange ended in generation %d, falling back to weight fetch: %s",
            self._generation,
            error_text(error),
        )
        self.num_lost += 1
        self.give_up()

    def give_up(self) -> None:
        """Return to weight fetch at once; the peers stop waiting for this rank."""
        if self._exchange is not None:
            self._exchange.close()
            self._go_back()

    def _go_back(self) -> None:
        exchange, self._exchange, self._ends = self._exchange, None, False
        assert exchange is not None, "no exchange has started"
        self._runner.passes = None
        self._past += _counts(exchange)
        exchange.close()


def _counts(exchange: ActivationExchange) -> Counter[str]:
    """Return the counters of an exchange under the names of `ReplicaStats`."""
    counters = exchange.counters
    return Counter(
        num_exchanges=counters.num_exchanges,
        num_dummy_exchanges=counters.num_dummies,
        num_served_rows=counters.num_served_rows,
        exchange_bytes=sum(counters.sent_bytes),
    )
