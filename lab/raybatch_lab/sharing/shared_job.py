"""A job on one host whose replicas copy weights, or share them in a group; on a virtual clock.

Rows wait in one queue, and each rank takes some while it has KV for all that they will be. Passes
are priced by rows, context and the chunk of a prompt beside them. The mode of a group is that of
`policy.sharing`, which looks at page boundaries. Who gets which rows, and how prompts are cut, is
simpler than in a pool and its engines. Not simulated are preemption, and copies near the batch at
which they just hide: a pass takes the longer of its products and its copies (`shared_weights` has
both).
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import Workload
from raybatch.policy.cost.roofline import Work
from raybatch.policy.decode_times import PassCosts
from raybatch.policy.ownership import Ownership
from raybatch.policy.sharing import GroupSnapshot, MeanBatch, ModeBook, RankLoad, most_round_rows
from raybatch.records.arrays import Ints
from raybatch_lab.sharing.shared_rounds import simulate_round
from raybatch_lab.sharing.shared_weights import GroupLinks

# passes between two boundaries
PAGE = 64

Way = Literal["replicated", "copies", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """Replicas of one host.

    Args:
        way: with all weights each, with those of others copied in every pass, or with rows that
            travel in the tail (`both`).
        kv_tokens: of each replica.
        max_rows: of a batch, whatever the KV.
        max_pass_tokens: rows and prompt tokens of a pass.
        copies_s: of a pass, what its copies take at the least.
        threshold_rows: of `policy.sharing.GroupSnapshot`.
        row_bytes: of a row that travels.
    """

    way: Way
    num_ranks: int
    costs: PassCosts
    kv_tokens: int
    max_rows: int = 1024
    max_pass_tokens: int = 2048
    ownership: Ownership | None = None
    links: GroupLinks = field(default_factory=GroupLinks)
    copies_s: float = 0.0
    threshold_rows: float = 0.0
    row_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.way == "both" and self.ownership is None:
            raise ConfigError("rows travel to owners, so a group of both modes needs an ownership")
        if self.num_ranks < 1 or self.kv_tokens < 1 or self.max_rows < 1:
            raise ConfigError("a host needs a replica, KV for a token, and a row in a batch")

    @property
    def most_round_rows(self) -> int:
        return most_round_rows(self.max_pass_tokens, self.num_ranks)

    @property
    def num_tiles(self) -> int:
        return 1 if self.ownership is None else self.ownership.num_tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """What a job took.

    Args:
        tail_s: of it, since the queue was empty and a rank had nothing to do.
        copy_passes, round_passes: of all ranks that had rows.
        mean_batch: rows of a pass.
    """

    completion_s: float
    tail_s: float
    output_tokens: int
    copy_passes: int
    round_passes: int
    mean_batch: float
    num_switches: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.completion_s

    @property
    def copy_share(self) -> float:
        """Return the share of passes in which weights travel, or none."""
        return self.copy_passes / (self.copy_passes + self.round_passes)


def run_job(prompt: Ints, output: Ints, spec: HostSpec) -> JobRun:
    """Let the replicas of a host do all rows, in their order.

    Args:
        prompt, output: tokens of each row, at least 1; int64 [R] each.

    Raises:
        ConfigError: a row needs more KV than a replica has.
    """
    needed = int((prompt + output).max())
    if needed > spec.kv_tokens:
        raise ConfigError(f"a row needs KV for {needed} tokens, a replica has {spec.kv_tokens}")
    queue = deque(zip(prompt.tolist(), output.tolist(), strict=True))
    return _Host(spec, queue).run(int(output.sum()))


@dataclass(slots=True)
class _Replica:
    """One rank's rows: tokens that each has and is to generate yet, and prompts to compute."""

    rank: int
    spec: HostSpec
    now: float = 0.0
    context: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    left: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    prompts: deque[tuple[int, int]] = field(default_factory=deque)
    # of the first prompt, what is computed
    num_computed: int = 0
    copy_passes: int = 0
    round_passes: int = 0
    row_passes: int = 0
    is_in_rounds: bool = False
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
        """Return the tokens of prompts that its next pass computes."""
        most = self.spec.most_round_rows if self.is_in_rounds else self.spec.max_pass_tokens
        room = max(0 if self.num_rows else 1, most - self.num_rows)
        return min(room, self.prompts[0][0] - self.num_computed) if self.prompts else 0

    def admit(self, queue: deque[tuple[int, int]], num_others: int = 0) -> None:
        """Take rows while there is KV for all that they will be.

        Args:
            num_others: that have none yet and get as many.
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
        """Return the seconds of one layer's attention, of rows and the chunk of a prompt."""
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
        costs, tiles = self.spec.costs, self.spec.num_tiles
        ffn_s = tiles * costs.ffn_s(self.num_rows + self.chunk, tiles)
        plain_s = costs.num_layers * (self.attention_s() + ffn_s) + costs.rest_s(self.num_rows)
        return plain_s if self.spec.way == "replicated" else max(plain_s, self.spec.copies_s)

    def passes_ahead(self) -> int:
        """Return the passes that are alike: until a row ends, the page does or a prompt goes on."""
        if self.prompts:
            return 1
        return min(PAGE, int(self.left.min()))

    def advance(self, num_passes: int) -> None:
        """Let all rows generate so many tokens, and let those go that have all."""
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
            # the pass that ends a prompt draws the first token
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
            # it has taken no more
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
            if self._book.current.mode == "copies":
                self._run_apart()
            else:
                self._run_rounds()
        completion_s = max(rank.now for rank in self._ranks)
        copy_passes, round_passes = (
            sum(getattr(rank, name) for rank in self._ranks)
            for name in ("copy_passes", "round_passes")
        )
        began = completion_s if self._tail_began is None else self._tail_began
        return JobRun(
            completion_s=completion_s,
            tail_s=completion_s - began,
            output_tokens=output_tokens,
            copy_passes=copy_passes,
            round_passes=round_passes,
            mean_batch=sum(rank.row_passes for rank in self._ranks) / (copy_passes + round_passes),
            num_switches=self._book.num_switches,
        )

    def _run_apart(self) -> None:
        """Let ranks pass by themselves until all have rows no more, or the mode changes."""
        for rank in self._ranks:
            rank.is_in_rounds = False
        order = [(rank.now, rank.rank) for rank in self._ranks if rank.num_active]
        heapq.heapify(order)
        while order:
            rank = self._ranks[heapq.heappop(order)[1]]
            num_passes = rank.passes_ahead()
            rank.now += num_passes * rank.pass_s()
            rank.copy_passes += num_passes
            self._advance(rank, num_passes)
            if rank.num_active:
                heapq.heappush(order, (rank.now, rank.rank))
            # all that have rows have made a page of passes
            if (
                all(r.num_since >= PAGE for r in self._ranks if r.num_active)
                and self._changes_mode()
            ):
                return

    def _run_rounds(self) -> None:
        """Let ranks pass in rounds until all have rows no more, or the mode changes."""
        spec = self._spec
        for rank in self._ranks:
            rank.is_in_rounds = True
        while real := [rank for rank in self._ranks if rank.num_active]:
            rows = [rank.num_rows + rank.chunk for rank in self._ranks]
            num_rounds = min(rank.passes_ahead() for rank in real)
            # of more rows than a step may have, all pass with copies
            is_round = sum(rows) <= max(spec.max_pass_tokens, *rows)
            seconds = self._round_s(rows) if is_round else max(rank.pass_s() for rank in real)
            now = max(rank.now for rank in self._ranks) + num_rounds * seconds
            for rank in self._ranks:
                rank.now = now
            for rank in real:
                rank.round_passes += num_rounds * is_round
                rank.copy_passes += num_rounds * (not is_round)
                self._advance(rank, num_rounds)
            if any(rank.num_since >= PAGE for rank in self._ranks) and self._changes_mode():
                return

    def _round_s(self, rows: list[int]) -> float:
        spec = self._spec
        assert spec.ownership is not None, "a group has owners"
        found = simulate_round(
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
        """Look at the group; a change begins when the last rank has come to its boundary."""
        self._boundaries += 1
        loads = tuple(rank.take_load() for rank in self._ranks)
        if self._spec.way != "both":
            return False
        snapshot = GroupSnapshot(
            loads=loads, mode=self._book.current.mode, threshold_rows=self._spec.threshold_rows
        )
        found = self._book.look(snapshot, self._boundaries)
        if found is None:
            return False
        for rank in self._ranks:
            self._book.acknowledge(rank.rank, found.epoch)
        if found.mode == "rounds":
            last = max(rank.now for rank in self._ranks)
            for rank in self._ranks:
                rank.now = last
        return True
