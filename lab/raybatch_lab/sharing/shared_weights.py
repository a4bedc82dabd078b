"""Simulates weight fetch of one group on a virtual clock.

Every rank computes layer by layer and fetches ahead in the order of `policy.ownership` while it has
free slots; a computation waits for its fetch, a fetch for a slot. All reads from one owner share
its bandwidth. Ranks do not interact otherwise. Exchange passes are in `shared_exchange`.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from raybatch.errors import ConfigError
from raybatch.records.share import Unit
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.simulator.clock import VirtualClock


class ModuleSeconds(Protocol):
    """Seconds of the modules of a forward pass, such as `pass_costs.PassCosts`."""

    def attention_s(self, rows: int) -> float: ...

    def ffn_s(self, rows: int, num_shards: int = 1) -> float:
        """Return the seconds of one of `num_shards` shards of a layer's feed-forward block."""

    def rest_s(self, rows: int) -> float:
        """Return the seconds of a pass after its last layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLinks:
    """Links between the ranks of a host.

    Args:
        bytes_per_s: bandwidth of one rank that reads from another.
        egress_bytes_per_s: total bandwidth of all reads from one owner; None for `bytes_per_s`.
        latency_s: seconds of a transfer before its first byte.
    """

    bytes_per_s: float = math.inf
    egress_bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.owner_bytes_per_s > 0) or self.latency_s < 0:
            raise ConfigError(
                "GroupLinks needs bytes_per_s and egress_bytes_per_s above 0, and latency_s of at "
                f"least 0, got {self.bytes_per_s}, {self.egress_bytes_per_s} and {self.latency_s}"
            )

    @property
    def owner_bytes_per_s(self) -> float:
        return self.bytes_per_s if self.egress_bytes_per_s is None else self.egress_bytes_per_s

    def reader_bytes_per_s(self, num_readers: int) -> float:
        """Return the bandwidth of each of `num_readers` readers of one owner."""
        return min(self.bytes_per_s, self.owner_bytes_per_s / num_readers)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGroup:
    """A weight-sharing group, and the forward passes to simulate.

    Args:
        num_slots: buffers for fetched weights on each rank.
        layer_bytes: weights of a layer's feed-forward block on one GPU of a rank.
        rows: rows in each pass, by rank.
        num_passes: passes of each rank.
        slowness: factor on the seconds of modules, by rank; () for none.
        late_s: start time of each rank; () for 0.
        delay_share: share of modules with a random delay of `delay_s` on average.
        in_step: ranks start each pass together, as engines in lockstep do.
    """

    ownership: Ownership
    num_slots: int
    layer_bytes: float
    links: GroupLinks
    rows: tuple[int, ...]
    num_passes: int = 4
    slowness: tuple[float, ...] = ()
    late_s: tuple[float, ...] = ()
    delay_share: float = 0.0
    delay_s: float = 0.0
    seed: int = 0
    in_step: bool = False

    def __post_init__(self) -> None:
        size = self.ownership.size
        for name, given in (
            ("rows", self.rows),
            ("slowness", self.slowness),
            ("late", self.late_s),
        ):
            if len(given) not in (size, *([0] if name != "rows" else [])):
                raise ConfigError(
                    f"{name} of a group needs {size} values, one for each rank, got {len(given)}"
                )
        if self.num_passes < 2 or self.num_slots < 1 or min(self.rows) < 1:
            raise ConfigError(
                "a simulated group needs num_passes of at least 2, and num_slots and rows of at "
                f"least 1, got {self.num_passes}, {self.num_slots} and {self.rows}"
            )

    @property
    def unit_bytes(self) -> float:
        return self.layer_bytes / self.ownership.num_shards


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRun:
    """Result of `simulate_group`; means leave out the first pass, whose fetches cannot start early.

    Args:
        pass_s: seconds of a pass, mean over ranks.
        waited_s: seconds of a pass in which a rank waited for weights, mean over ranks.
        num_waits: modules of a pass that waited for weights, mean over ranks.
        pass_bytes: bytes that a rank fetches in a pass, mean over ranks.
        readers: concurrent readers of an owner while it has any, mean over time.
        most_readers: most concurrent readers of an owner.
        ended_s: time at which each pass ended, `ended_s[rank][pass]`.
    """

    pass_s: float
    waited_s: float
    num_waits: float
    pass_bytes: float
    readers: float
    most_readers: int
    ended_s: tuple[tuple[float, ...], ...]

    @property
    def stall_share(self) -> float:
        return self.waited_s / self.pass_s


def simulate_group(costs: ModuleSeconds, group: SharedGroup) -> GroupRun:
    """Simulate the passes of all ranks of a group.

    Raises:
        ConfigError: the ranks deadlock, because they have fewer slots than their order of fetches
            needs.
    """
    clock = VirtualClock()
    owners = [_Owner(clock, group.links) for _ in range(group.ownership.size)]
    rng, gate = np.random.Generator(np.random.PCG64(group.seed)), list[Callable[[], None]]()
    ranks = [_Rank(rank, costs, group, clock, owners, rng, gate) for rank in range(len(owners))]
    for rank, start_s in zip(ranks, group.late_s or [0.0] * len(ranks), strict=True):
        clock.at(start_s, rank.begin)
    clock.run(lambda: False)
    if stuck := [rank.rank for rank in ranks if len(rank.ended) < group.num_passes]:
        raise ConfigError(
            f"rank {stuck[0]} deadlocks with num_slots={group.num_slots}; set at least "
            f"{group.ownership.least_slots}"
        )
    return _run_of(ranks, owners, group)


def _run_of(ranks: list["_Rank"], owners: list["_Owner"], group: SharedGroup) -> GroupRun:
    num = group.num_passes - 1
    # per rank: end of its first and of its last pass
    spans = [(rank.ended[0], rank.ended[-1]) for rank in ranks]
    read_s = sum(owner.read_s for owner in owners)
    return GroupRun(
        pass_s=sum(last.time_s - first.time_s for first, last in spans) / num / len(ranks),
        waited_s=sum(last.waited_s - first.waited_s for first, last in spans) / num / len(ranks),
        num_waits=sum(last.num_waits - first.num_waits for first, last in spans) / num / len(ranks),
        pass_bytes=sum(rank.num_fetched for rank in ranks)
        * group.unit_bytes
        / group.num_passes
        / len(ranks),
        readers=sum(owner.reader_s for owner in owners) / read_s if read_s else 0.0,
        most_readers=max(owner.most_readers for owner in owners),
        ended_s=tuple(tuple(end.time_s for end in rank.ended) for rank in ranks),
    )


# a unit of one of the passes
_Key = tuple[int, Unit]


class _Module(NamedTuple):
    seconds: float
    key: _Key | None  # unit whose weights it waits for
    ends_pass: bool


class _PassEnd(NamedTuple):
    time_s: float
    waited_s: float
    num_waits: int


class _Owner:
    """Reads from one rank's memory; concurrent ones share its bandwidth equally."""

    def __init__(self, clock: VirtualClock, links: GroupLinks) -> None:
        self._clock, self._links = clock, links
        # bytes received by each concurrent read since the owner was idle, and the level at which
        # each read ends
        self._level, self._seen_s = 0.0, 0.0
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._version = count(), 0
        self.read_s = self.reader_s = 0.0
        self.most_readers = 0

    def read(self, num_bytes: float, arrived: Callable[[], None]) -> None:
        """Start a read of `num_bytes`; call `arrived` when it is complete."""
        self._clock.after(self._links.latency_s, lambda: self._start(num_bytes, arrived))

    def _start(self, num_bytes: float, arrived: Callable[[], None]) -> None:
        self._advance()
        heapq.heappush(self._running, (self._level + num_bytes, next(self._numbers), arrived))
        self.most_readers = max(self.most_readers, len(self._running))
        self._expect()

    def _advance(self) -> None:
        now, num_running = self._clock.now, len(self._running)
        if num_running and now > self._seen_s:
            elapsed = now - self._seen_s
            self._level += elapsed * self._links.reader_bytes_per_s(num_running)
            self.read_s += elapsed
            self.reader_s += elapsed * num_running
        self._seen_s = now

    def _expect(self) -> None:
        """Schedule the end of the next read; starts and ends of others reschedule it."""
        self._version += 1
        if not self._running:
            self._level = 0.0
            return
        version = self._version
        left = max(0.0, self._running[0][0] - self._level)
        self._clock.after(
            left / self._links.reader_bytes_per_s(len(self._running)), lambda: self._end(version)
        )

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._level, _, arrived = heapq.heappop(self._running)
        self._expect()
        arrived()


@dataclass(slots=True)
class _Rank:
    """One rank: a compute stream, and a fetch stream that runs ahead of it."""

    rank: int
    costs: ModuleSeconds
    group: SharedGroup
    clock: VirtualClock
    owners: list[_Owner]
    rng: np.random.Generator
    gate: list[Callable[[], None]]  # continuations of ranks that wait for the others to end a pass
    ended: list[_PassEnd] = field(default_factory=list)
    num_fetched: int = 0
    _num_free: int = 0
    _ready: set[_Key] = field(default_factory=set)
    _copying: _Key | None = None
    _module: _Module | None = None
    _waits_since: float | None = None
    _waited_s: float = 0.0
    _num_waits: int = 0
    _modules: Iterator[_Module] = field(init=False)
    _fetches: Iterator[_Key] = field(init=False)

    def begin(self) -> None:
        self._num_free = self.group.num_slots
        self._modules, self._fetches = self._all_modules(), self._all_fetches()
        self._fetch()
        self._go_on()

    def _all_modules(self) -> Iterator[_Module]:
        ownership, rows = self.group.ownership, self.group.rows[self.rank]
        shard_s = self.costs.ffn_s(rows, ownership.num_shards)
        attention_s, rest_s = self.costs.attention_s(rows), self.costs.rest_s(rows)
        for number in range(self.group.num_passes):
            for layer in range(ownership.num_layers):
                yield _Module(attention_s, None, False)
                for shard in ownership.shards_of(layer, self.rank):
                    unit = Unit(layer, shard)
                    is_own = ownership.owner(unit) == self.rank
                    yield _Module(shard_s, None if is_own else (number, unit), False)
            yield _Module(rest_s, None, True)

    def _all_fetches(self) -> Iterator[_Key]:
        fetches = self.group.ownership.fetches(self.rank)
        for number in range(self.group.num_passes):
            yield from ((number, unit) for unit in fetches)

    def _go_on(self) -> None:
        self._module = next(self._modules, None)
        if self._module is None:
            return
        if self._module.key is None or self._module.key in self._ready:
            self._run(self._module)
        else:
            self._waits_since = self.clock.now

    def _run(self, module: _Module) -> None:
        slowness = self.group.slowness[self.rank] if self.group.slowness else 1.0
        seconds = module.seconds * slowness
        if self.group.delay_share and self.rng.random() < self.group.delay_share:
            seconds += self.rng.exponential(self.group.delay_s)
        self.clock.after(seconds, self._finished)

    def _finished(self) -> None:
        module = self._module
        assert module is not None, "no module is running"
        if module.key is not None:
            self._ready.remove(module.key)
            self._num_free += 1
            self._fetch()
        if module.ends_pass:
            self.ended.append(_PassEnd(self.clock.now, self._waited_s, self._num_waits))
            if self.group.in_step:
                self._wait_for_others()
                return
        self._go_on()

    def _wait_for_others(self) -> None:
        self.gate.append(self._go_on)
        if len(self.gate) == self.group.ownership.size:
            going = self.gate.copy()
            self.gate.clear()
            for go_on in going:
                go_on()

    def _fetch(self) -> None:
        if self._copying is not None or not self._num_free:
            return
        key = next(self._fetches, None)
        if key is None:
            return
        self._num_free -= 1
        self._copying = key
        owner = self.owners[self.group.ownership.owner(key[1])]
        owner.read(self.group.unit_bytes, self._arrived)

    def _arrived(self) -> None:
        key = self._copying
        assert key is not None, "no fetch is running"
        self._ready.add(key)
        self._copying = None
        self.num_fetched += 1
        self._fetch()
        if self._waits_since is not None and self._module and self._module.key == key:
            waited_s = self.clock.now - self._waits_since
            self._waited_s += waited_s
            self._num_waits += waited_s > 0
            self._waits_since = None
            self._run(self._module)
