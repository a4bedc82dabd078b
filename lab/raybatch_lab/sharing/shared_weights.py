"""One group of ranks that decode with each other's feed-forward weights, on a virtual clock (WaS).

Every rank multiplies layer by layer and copies ahead, in the order of `policy.ownership`, as far as
it has slots; a product waits for its copy, a copy for a slot. All copies out of one owner share
what its links give. Nothing else ties ranks together. Rounds, in which rows travel, are in
`shared_rounds`.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.ownership import Ownership, Unit
from raybatch_lab.simulator.clock import VirtualClock


class ModuleSeconds(Protocol):
    """What the modules of a pass take by its rows, such as `policy.decode_times.PassCosts`."""

    def attention_s(self, rows: int) -> float: ...

    def ffn_s(self, rows: int, num_tiles: int = 1) -> float:
        """Return the seconds of one of so many tiles of a layer."""

    def rest_s(self, rows: int) -> float:
        """Return the seconds behind the last layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLinks:
    """Links between the ranks of a host.

    Args:
        bytes_per_s: at which a rank reads from another one.
        egress_bytes_per_s: of all reads from one owner together; None for as much as one reader
            takes.
        latency_s: of a copy before its first byte.
    """

    bytes_per_s: float = math.inf
    egress_bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.owner_bytes_per_s > 0) or self.latency_s < 0:
            raise ConfigError(
                f"links of a group need bytes per second above 0 and a latency of 0 or more, got "
                f"{self.bytes_per_s}, {self.egress_bytes_per_s} and {self.latency_s}"
            )

    @property
    def owner_bytes_per_s(self) -> float:
        return self.bytes_per_s if self.egress_bytes_per_s is None else self.egress_bytes_per_s

    def reader_bytes_per_s(self, num_readers: int) -> float:
        """Return what each of so many readers of one owner gets."""
        return min(self.bytes_per_s, self.owner_bytes_per_s / num_readers)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedGroup:
    """A group, and what its passes are like.

    Args:
        layer_bytes: of a feed-forward block, on one GPU of a rank.
        rows: of a pass, by rank.
        slowness: factor on the seconds of modules, by rank; () for none.
        late_s: when each rank begins; () for all at 0.
        delay_share: of modules that are held up, at random, by `delay_s` on average.
        in_step: ranks begin each pass together, as engines do that agree on every step.
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
                raise ConfigError(f"{name} of a group of {size} ranks has {len(given)} entries")
        if self.num_passes < 2 or self.num_slots < 1 or min(self.rows) < 1:
            raise ConfigError(
                f"a simulated group needs 2 passes, 1 slot and 1 row per rank at least, got "
                f"{self.num_passes}, {self.num_slots} and {self.rows}"
            )

    @property
    def unit_bytes(self) -> float:
        return self.layer_bytes / self.ownership.num_tiles


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRun:
    """What passes took, the first one left out, in which copies have no pass before them.

    Args:
        pass_s: mean of all ranks.
        waited_s: of it, waiting for copies.
        num_waits: products of a pass that waited (bubbles), mean of all ranks.
        pass_bytes: that a rank copied in a pass.
        readers: of one owner at once while there is any, mean over time.
        most_readers: of one owner at once.
        ended_s: when each rank ended each pass, [ranks][passes].
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
    """Let all ranks of a group make their passes.

    Raises:
        ConfigError: a rank waits for ever, as there are fewer slots than its fetches need.
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
            f"with {group.num_slots} slots rank {stuck[0]} waits for ever for weights that it "
            f"cannot fetch; {group.ownership.least_slots} are enough"
        )
    return _run_of(ranks, owners, group)


def _run_of(ranks: list["_Rank"], owners: list["_Owner"], group: SharedGroup) -> GroupRun:
    num = group.num_passes - 1
    # of each rank from the end of its first pass to that of its last
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
    key: _Key | None  # of weights that it has to wait for
    ends_pass: bool


class _PassEnd(NamedTuple):
    time_s: float
    waited_s: float
    num_waits: int


class _Owner:
    """Copies out of one rank's memory; all that run get an equal share of its links."""

    def __init__(self, clock: VirtualClock, links: GroupLinks) -> None:
        self._clock, self._links = clock, links
        # bytes that each running copy has got since there was any, and at which of them it ends
        self._level, self._seen_s = 0.0, 0.0
        self._running: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._version = count(), 0
        self.read_s = self.reader_s = 0.0
        self.most_readers = 0

    def read(self, num_bytes: float, arrived: Callable[[], None]) -> None:
        """Copy bytes, and call when they have arrived."""
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
        """Let the copy that ends next end, unless others begin or end before."""
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
    """One rank: a stream of modules, and one of copies that runs ahead of it."""

    rank: int
    costs: ModuleSeconds
    group: SharedGroup
    clock: VirtualClock
    owners: list[_Owner]
    rng: np.random.Generator
    gate: list[Callable[[], None]]  # ranks that have ended a pass which others have not yet
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
        tile_s = self.costs.ffn_s(rows, ownership.num_tiles)
        attention_s, rest_s = self.costs.attention_s(rows), self.costs.rest_s(rows)
        for number in range(self.group.num_passes):
            for layer in range(ownership.num_layers):
                yield _Module(attention_s, None, False)
                for tile in ownership.tiles_of(layer, self.rank):
                    unit = Unit(layer, tile)
                    is_own = ownership.owner(unit) == self.rank
                    yield _Module(tile_s, None if is_own else (number, unit), False)
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
        assert module is not None, "a module has run"
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
        assert key is not None, "a copy was made"
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
