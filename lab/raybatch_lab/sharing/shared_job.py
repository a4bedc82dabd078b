"""Simulates a job on one host with replicated or shared weights, on a virtual clock.

Rows wait in one queue; each rank takes rows while it has KV for their final length. The cost of a
pass depends on rows, context and prompt chunk. The mode of a group is chosen by `policy.sharing` at
page boundaries. Distribution of rows and chunking are simpler than in a real pool. Preemption is
not simulated, and a pass takes the longer of computation and weight fetch (`shared_weights` models
their interaction).
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import Workload
from raybatch.policy.cost.roofline import Work
from raybatch.records.arrays import Ints
from raybatch_extensions.sharing.modes import (
    GroupSnapshot,
    MeanBatch,
    ModeBook,
    RankLoad,
    max_exchange_rows,
)
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.pass_costs import PassCosts
from raybatch_lab.sharing.shared_exchange import simulate_exchange
from raybatch_lab.sharing.shared_weights import GroupLinks

# passes between two boundaries
PAGE = 64

Sharing = Literal["replicated", "fetch", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """The replicas of a simulated host, with replicated or shared weights.

    Args:
        sharing: "replicated" holds all weights on each replica; "fetch" fetches shared weights in
            every pass; "both" also exchanges activations, while replicas have few rows.
        num_ranks: number of replicas.
        kv_tokens: KV memory of each replica, in tokens.
        max_rows: largest batch of a replica.
        max_pass_tokens: largest sum of decoding rows and prompt tokens in a pass.
        ownership: which replica owns which weights; needed for "both".
        fetch_s: minimum seconds to fetch the weights of a pass.
        threshold_rows: see `policy.sharing.GroupSnapshot`.
        row_bytes: bytes of one row's activations, in one direction.
    """

    sharing: Sharing
    num_ranks: int
    costs: PassCosts
    kv_tokens: int
    max_rows: int = 1024
    max_pass_tokens: int = 2048
    ownership: Ownership | None = None
    links: GroupLinks = field(default_factory=GroupLinks)
    fetch_s: float = 0.0
    threshold_rows: float = 0.0
    row_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.sharing == "both" and self.ownership is None:
            raise ConfigError(
                "sharing='both' needs to know which rank owns which weights; set ownership"
            )
        if self.num_ranks < 1 or self.kv_tokens < 1 or self.max_rows < 1:
            raise ConfigError("num_ranks, kv_tokens and max_rows of a host must be at least 1")

    @property
    def max_exchange_rows(self) -> int:
        return max_exchange_rows(self.max_pass_tokens, self.num_ranks)

    @property
    def num_shards(self) -> int:
        return 1 if self.ownership is None else self.ownership.num_shards


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """Result of a simulated job.

    Args:
        tail_s: length of the tail: seconds from when no row waits and a rank is idle to the end.
        fetch_passes, exchange_passes: passes without and with activation exchange, over all ranks
            with rows.
        mean_batch: mean rows of a pass.
        num_switches: switches between the two modes.
    """

    completion_s: float
    tail_s: float
    output_tokens: int
    fetch_passes: int
    exchange_passes: int
    mean_batch: float
    num_switches: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.completion_s

    @property
    def fetch_share(self) -> float:
        """Return the share of passes without activation exchange."""
        return self.fetch_passes / (self.fetch_passes + self.exchange_passes)


def run_job(prompt: Ints, output: Ints, spec: HostSpec) -> JobRun:
    """Simulate the replicas of a host on a job, whose rows start in order.

    Args:
        prompt, output: tokens of each row, at least 1; int64 [R] each.

    Raises:
        ConfigError: a row needs more KV than a replica has.
    """
    needed = int((prompt + output).max())
    if needed > spec.kv_tokens:
        raise ConfigError(
            f"the longest row needs KV memory for {needed} tokens, but kv_tokens of a replica is "
            f"{spec.kv_tokens}; raise it or use shorter rows"
        )
    queue = deque(zip(prompt.tolist(), output.tolist(), strict=True))
    return _Host(spec, queue).run(int(output.sum()))


@dataclass(slots=True)
class _Replica:
    """Rows of one rank: current and remaining tokens of each, and prompts to compute."""

    rank: int
    spec: HostSpec
    now: float = 0.0
    context: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    left: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    prompts: deque[tuple[int, int]] = field(default_factory=deque)
    # computed tokens of the first prompt
    num_computed: int = 0
    fetch_passes: int = 0
    exchange_passes: int = 0
    row_passes: int = 0
    is_exchanging: bool = False
    # passes since the last boundary
    num_since: int = 0
    batch: MeanBatch = field(default_factory=MeanBatch)

    @property
    def num_rows(self) -> int:
        return len(self.left)

    @property
    def num_active(self) -> int:
        return len(self.left) + len(self.prompts)

    @property
    def chunk(self) -> int:
        """Return the prompt tokens that the next pass computes."""
        most = self.spec.max_exchange_rows if self.is_exchanging else self.spec.max_pass_tokens
        room = max(0 if self.num_rows else 1, most - self.num_rows)
        return min(room, self.prompts[0][0] - self.num_computed) if self.prompts else 0

    def admit(self, queue: deque[tuple[int, int]], num_others: int = 0) -> None:
        """Take rows from the head of a queue while KV memory for their final lengths is free.

        Args:
            queue: (prompt tokens, output tokens) of each waiting row.
            num_others: other idle ranks, for which an equal share of the queue is left.
        """
        used = int((self.context + self.left).sum()) + sum(map(sum, self.prompts))
        most = min(self.spec.max_rows - self.num_active, -(-len(queue) // (1 + num_others)))
        for _ in range(most):
            needed = sum(queue[0])
            if used + needed > self.spec.kv_tokens:
                return
            self.prompts.append(queue.popleft())
            used += needed

    def attention_s(self) -> float:
        """Return the seconds of one layer's attention in the next pass: rows and prompt chunk."""
        costs, layer = self.spec.costs, self.spec.costs.shape.layer
        work = Work(operations=0.0, moved_bytes=layer.attention_bytes)
        if self.num_rows:
            context = Workload(cached_tokens=round(float(self.context.mean())))
            work = layer.attention_work(self.num_rows, context)
        if self.chunk:
            context = Workload(tokens_per_sequence=self.chunk, cached_tokens=self.num_computed)
            more = layer.attention_work(self.chunk, context)
            work = Work(
                operations=work.operations + more.operations,
                moved_bytes=work.moved_bytes + more.moved_bytes - layer.attention_bytes,
            )
        return costs.attention.seconds(work) + (self.num_rows + self.chunk) * costs.row_s

    def pass_s(self) -> float:
        costs, shards = self.spec.costs, self.spec.num_shards
        ffn_s = shards * costs.ffn_s(self.num_rows + self.chunk, shards)
        plain_s = costs.num_layers * (self.attention_s() + ffn_s) + costs.rest_s(self.num_rows)
        return plain_s if self.spec.sharing == "replicated" else max(plain_s, self.spec.fetch_s)

    def passes_ahead(self) -> int:
        """Return the number of passes that can be simulated at once, since nothing else changes."""
        if self.prompts:
            return 1
        return min(PAGE, int(self.left.min()))

    def advance(self, num_passes: int) -> None:
        """Let all rows generate `num_passes` tokens; remove finished ones."""
        batch, chunk = self.num_rows + self.chunk, self.chunk
        self.num_since += num_passes
        self.batch.note(num_passes * batch, num_passes)
        self.row_passes += num_passes * self.num_rows
        self.context += num_passes
        self.left -= num_passes
        if chunk:
            self._computed(chunk)
        stays = self.left > 0
        self.context, self.left = self.context[stays], self.left[stays]

    def _computed(self, chunk: int) -> None:
        self.num_computed += chunk
        prompt, output = self.prompts[0]
        if self.num_computed == prompt:
            # the pass that ends a prompt samples the first token
            self.prompts.popleft()
            self.num_computed = 0
            self.context = np.append(self.context, prompt + 1)
            self.left = np.append(self.left, output - 1)

    def take_load(self) -> RankLoad:
        self.num_since = 0
        return RankLoad(
            rank=self.rank,
            num_active=self.num_active,
            mean_batch=self.batch.take(),
            # it takes no more than it has KV for
            wanted_rows=self.num_active,
        )


class _Host:
    def __init__(self, spec: HostSpec, queue: deque[tuple[int, int]]) -> None:
        self._spec, self._queue = spec, queue
        self._ranks = [_Replica(rank, spec) for rank in range(spec.num_ranks)]
        self._book = ModeBook(ranks=tuple(range(spec.num_ranks)))
        self._boundaries = 0
        self._tail_began: float | None = None

    def run(self, output_tokens: int) -> JobRun:
        for rank in self._ranks:
            rank.admit(self._queue, len(self._ranks) - rank.rank - 1)
        while any(rank.num_active for rank in self._ranks):
            if self._book.current.mode == "fetch":
                self._run_apart()
            else:
                self._run_exchanges()
        completion_s = max(rank.now for rank in self._ranks)
        fetch_passes, exchange_passes = (
            sum(getattr(rank, name) for rank in self._ranks)
            for name in ("fetch_passes", "exchange_passes")
        )
        began = completion_s if self._tail_began is None else self._tail_began
        return JobRun(
            completion_s=completion_s,
            tail_s=completion_s - began,
            output_tokens=output_tokens,
            fetch_passes=fetch_passes,
            exchange_passes=exchange_passes,
            mean_batch=sum(rank.row_passes for rank in self._ranks)
            / (fetch_passes + exchange_passes),
            num_switches=self._book.num_switches,
        )

    def _run_apart(self) -> None:
        """Run independent passes until no rank has rows, or the mode changes."""
        for rank in self._ranks:
            rank.is_exchanging = False
        order = [(rank.now, rank.rank) for rank in self._ranks if rank.num_active]
        heapq.heapify(order)
        while order:
            rank = self._ranks[heapq.heappop(order)[1]]
            num_passes = rank.passes_ahead()
            rank.now += num_passes * rank.pass_s()
            rank.fetch_passes += num_passes
            self._advance(rank, num_passes)
            if rank.num_active:
                heapq.heappush(order, (rank.now, rank.rank))
            # all ranks with rows have run a page of passes
            if (
                all(r.num_since >= PAGE for r in self._ranks if r.num_active)
                and self._changes_mode()
            ):
                return

    def _run_exchanges(self) -> None:
        """Run exchange passes until no rank has rows, or the mode changes."""
        spec = self._spec
        for rank in self._ranks:
            rank.is_exchanging = True
        while real := [rank for rank in self._ranks if rank.num_active]:
            rows = [rank.num_rows + rank.chunk for rank in self._ranks]
            num_exchanges = min(rank.passes_ahead() for rank in real)
            # with more rows than a step may have, all ranks fetch weights
            is_exchange = sum(rows) <= max(spec.max_pass_tokens, *rows)
            seconds = self._exchange_s(rows) if is_exchange else max(rank.pass_s() for rank in real)
            now = max(rank.now for rank in self._ranks) + num_exchanges * seconds
            for rank in self._ranks:
                rank.now = now
            for rank in real:
                rank.exchange_passes += num_exchanges * is_exchange
                rank.fetch_passes += num_exchanges * (not is_exchange)
                self._advance(rank, num_exchanges)
            if any(rank.num_since >= PAGE for rank in self._ranks) and self._changes_mode():
                return

    def _exchange_s(self, rows: list[int]) -> float:
        spec = self._spec
        assert spec.ownership is not None, "a group needs an ownership"
        found = simulate_exchange(
            spec.costs,
            spec.ownership,
            rows,
            row_bytes=spec.row_bytes,
            links=spec.links,
            attention_s=[rank.attention_s() for rank in self._ranks],
        )
        return found.seconds

    def _advance(self, rank: _Replica, num_passes: int) -> None:
        rank.advance(num_passes)
        rank.admit(self._queue)
        if self._tail_began is None and not rank.num_active and not self._queue:
            self._tail_began = rank.now

    def _changes_mode(self) -> bool:
        """Check the group; a change starts when the last rank reaches its boundary."""
        self._boundaries += 1
        loads = tuple(rank.take_load() for rank in self._ranks)
        if self._spec.sharing != "both":
            return False
        snapshot = GroupSnapshot(
            loads=loads, mode=self._book.current.mode, threshold_rows=self._spec.threshold_rows
        )
        found = self._book.update(snapshot, self._boundaries)
        if found is None:
            return False
        for rank in self._ranks:
            self._book.acknowledge(rank.rank, found.generation)
        if found.mode == "exchange":
            last = max(rank.now for rank in self._ranks)
            for rank in self._ranks:
                rank.now = last
        return True
