"""A job on one host whose replicas copy weights, or share them in a group; on a virtual clock.

Rows wait in one queue, each rank takes some while it has KV for them, and steps are priced by rows
and context. The mode of a group is that of `policy.sharing`, which looks at page boundaries. Not
simulated are what a job does beyond one host, preemption, and copies near the batch at which they
just hide: a pass takes the longer of its products and its copies (`shared_weights` has both).
"""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.decode_times import PassCosts
from raybatch.policy.layer_plan import Workload
from raybatch.policy.ownership import Ownership
from raybatch.policy.sharing import GroupSnapshot, ModeBook, RankLoad
from raybatch.records.arrays import Ints
from raybatch.simulator.rows import SimulatedRows
from raybatch.simulator.shared_rounds import simulate_round
from raybatch.simulator.shared_weights import GroupLinks

# passes between two boundaries
PAGE = 64

Way = Literal["replicated", "was", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSpec:
    """Replicas of one host.

    Args:
        way: with all weights each, with those of others copied in every pass, or with rows that
            travel in the tail (`both`).
        kv_tokens: of each replica.
        max_rows: of a batch, whatever the KV.
        copies_s: of a pass, what its copies take at the least.
        threshold_rows: of `policy.sharing.GroupSnapshot`.
        row_bytes: of a row that travels.
    """

    way: Way
    num_ranks: int
    costs: PassCosts
    kv_tokens: int
    max_rows: int = 1024
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
    def num_tiles(self) -> int:
        return 1 if self.ownership is None else self.ownership.num_tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """What a job took.

    Args:
        tail_s: of it, since the queue was empty and a rank had nothing to do.
        was_passes, cas_passes: of all ranks that had rows.
        mean_batch: rows of a pass.
    """

    completion_s: float
    tail_s: float
    output_tokens: int
    was_passes: int
    cas_passes: int
    mean_batch: float
    num_switches: int

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.completion_s

    @property
    def was_share(self) -> float:
        """Return the share of passes in which weights travel, or none."""
        return self.was_passes / (self.was_passes + self.cas_passes)


def run_job(rows: SimulatedRows, spec: HostSpec) -> JobRun:
    """Let the replicas of a host do all rows, in their order.

    Raises:
        ConfigError: a row needs more KV than a replica has.
    """
    needed = int((rows.prompt + rows.output).max())
    if needed > spec.kv_tokens:
        raise ConfigError(f"a row needs KV for {needed} tokens, a replica has {spec.kv_tokens}")
    queue = deque(zip(rows.prompt.tolist(), rows.output.tolist(), strict=True))
    return _Host(spec, queue).run(int(rows.output.sum()))


@dataclass(slots=True)
class _Replica:
    """One rank's rows: tokens that each has, and those that it is to generate yet."""

    rank: int
    spec: HostSpec
    now: float = 0.0
    context: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    left: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    was_passes: int = 0
    cas_passes: int = 0
    row_passes: int = 0
    last_batch: float = 0.0

    @property
    def num_rows(self) -> int:
        return len(self.left)

    def admit(self, queue: deque[tuple[int, int]], num_others: int = 0) -> None:
        """Take rows while there is KV for all that they will be, and compute their prompts.

        Args:
            num_others: that have none yet and get as many.
        """
        used = int((self.context + self.left).sum())
        most = min(self.spec.max_rows - self.num_rows, -(-len(queue) // (1 + num_others)))
        taken = list[tuple[int, int]]()
        while len(taken) < most:
            prompt, output = queue[0]
            if used + prompt + output > self.spec.kv_tokens:
                break
            taken.append(queue.popleft())
            used += prompt + output
        if not taken:
            return
        prompts, outputs = np.array(taken, np.int64).T
        self.now += self._prompts_s(prompts)
        self.context = np.concatenate((self.context, prompts))
        self.left = np.concatenate((self.left, outputs))

    def _prompts_s(self, prompts: Ints) -> float:
        costs, tokens = self.spec.costs, int(prompts.sum())
        workload = Workload(tokens_per_sequence=max(1, round(float(prompts.mean()))))
        layer = costs.shape.layer
        seconds = costs.attention.seconds(layer.attention_work(tokens, workload))
        seconds += costs.ffn.seconds(layer.ffn_work(tokens))
        plain_s = costs.num_layers * seconds
        return plain_s if self.spec.way == "replicated" else max(plain_s, self.spec.copies_s)

    def costs_now(self) -> PassCosts:
        context = round(float(self.context.mean())) if self.num_rows else 0
        return replace(self.spec.costs, cached_tokens=context)

    def pass_s(self) -> float:
        plain_s = self.costs_now().pass_s(self.num_rows, self.spec.num_tiles)
        return plain_s if self.spec.way == "replicated" else max(plain_s, self.spec.copies_s)

    def passes_ahead(self) -> int:
        """Return the passes until a row ends, or the page does."""
        return min(PAGE, int(self.left.min()))

    def advance(self, num_passes: int) -> None:
        """Let all rows generate so many tokens, and let those go that have all."""
        self.last_batch = float(self.num_rows)
        self.row_passes += num_passes * self.num_rows
        self.context += num_passes
        self.left -= num_passes
        stays = self.left > 0
        self.context, self.left = self.context[stays], self.left[stays]


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
        while any(rank.num_rows for rank in self._ranks):
            if self._book.current.mode == "was":
                self._run_apart()
            else:
                self._run_rounds()
        completion_s = max(rank.now for rank in self._ranks)
        was_passes, cas_passes = (
            sum(getattr(rank, name) for rank in self._ranks)
            for name in ("was_passes", "cas_passes")
        )
        began = completion_s if self._tail_began is None else self._tail_began
        return JobRun(
            completion_s=completion_s,
            tail_s=completion_s - began,
            output_tokens=output_tokens,
            was_passes=was_passes,
            cas_passes=cas_passes,
            mean_batch=sum(rank.row_passes for rank in self._ranks) / (was_passes + cas_passes),
            num_switches=self._book.num_switches,
        )

    def _run_apart(self) -> None:
        """Let ranks pass by themselves until all have rows no more, or the mode changes."""
        order = [(rank.now, rank.rank) for rank in self._ranks if rank.num_rows]
        heapq.heapify(order)
        # ranks that have reported since the last boundary of the group
        reported = set[int]()
        while order:
            rank = self._ranks[heapq.heappop(order)[1]]
            num_passes = rank.passes_ahead()
            rank.now += num_passes * rank.pass_s()
            rank.was_passes += num_passes
            rank.advance(num_passes)
            rank.admit(self._queue)
            self._note_tail(rank)
            if rank.num_rows:
                heapq.heappush(order, (rank.now, rank.rank))
            reported.add(rank.rank)
            if all(r.rank in reported for r in self._ranks if r.num_rows):
                reported.clear()
                if self._changes_mode():
                    return

    def _run_rounds(self) -> None:
        """Let ranks pass in rounds until all have rows no more, or the mode changes."""
        spec = self._spec
        assert spec.ownership is not None, "a group has owners"
        while real := [rank for rank in self._ranks if rank.num_rows]:
            num_rounds = min(rank.passes_ahead() for rank in real)
            longest = max(real, key=lambda rank: rank.num_rows)
            found = simulate_round(
                longest.costs_now(),
                spec.ownership,
                [rank.num_rows for rank in self._ranks],
                row_bytes=spec.row_bytes,
                links=spec.links,
            )
            began = max(rank.now for rank in self._ranks)
            for rank in self._ranks:
                rank.now = began + num_rounds * found.seconds
                if rank.num_rows:
                    rank.cas_passes += num_rounds
                    rank.advance(num_rounds)
                    rank.admit(self._queue)
                self._note_tail(rank)
            if self._changes_mode():
                return

    def _note_tail(self, rank: _Replica) -> None:
        if self._tail_began is None and not rank.num_rows and not self._queue:
            self._tail_began = rank.now

    def _changes_mode(self) -> bool:
        """Look at the group; a change begins when the last rank has come to its boundary."""
        if self._spec.way != "both":
            return False
        self._boundaries += 1
        snapshot = GroupSnapshot(
            loads=tuple(self._loads()),
            mode=self._book.current.mode,
            threshold_rows=self._spec.threshold_rows,
        )
        found = self._book.look(snapshot, self._boundaries)
        if found is None:
            return False
        for rank in self._ranks:
            self._book.acknowledge(rank.rank, found.epoch)
        if found.mode == "cas":
            last = max(rank.now for rank in self._ranks)
            for rank in self._ranks:
                rank.now = last
        return True

    def _loads(self) -> Iterator[RankLoad]:
        for rank in self._ranks:
            yield RankLoad(rank=rank.rank, num_active=rank.num_rows, mean_batch=rank.last_batch)
