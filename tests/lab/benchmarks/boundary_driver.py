"""A tiny machine with numbered pages in two memories, which carries out plans of the boundary.

It knows nothing of how plans are made or checked: pages are sets, a page in two hands fails.
"""

from dataclasses import dataclass, field

from boundary.page_boundary import plan_boundary
from boundary.records import BoundaryOptions, BoundarySnapshot, SequencePages

from tests.lab.benchmarks.boundary_cases import PAGE


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A sequence that comes before a boundary; it ends by itself after `output` tokens."""

    prompt: int
    output: int
    budget: int = 10_000
    boundary: int = 0
    priority: int = 0


@dataclass(kw_only=True)
class Running:
    arrival: Arrival
    status: str = "waiting"
    progress: int = 0
    waited: int = 0
    device: set = field(default_factory=set)
    host: set = field(default_factory=set)

    @property
    def context(self):
        return self.arrival.prompt + self.progress

    @property
    def remaining(self):
        has_ended = self.progress >= self.arrival.output
        return 0 if has_ended else self.arrival.budget - self.progress


class Machine:
    """Runs arrivals, boundary by boundary; `plans`, `ended` and `decoded` record the run."""

    def __init__(
        self,
        arrivals,
        *,
        device_pages,
        host_pages,
        max_active=8,
        page_tokens=PAGE,
        chunk=0,
        options=None,
    ):
        self.options = options or BoundaryOptions()
        self.page, self.max_active, self.chunk = page_tokens, max_active, chunk
        self.device_pages, self.host_pages = device_pages, host_pages
        self.device_free, self.host_free = set(range(device_pages)), set(range(host_pages))
        self.to_come = dict(enumerate(arrivals))
        self.running: dict[int, Running] = {}
        self.ended: dict[int, tuple[str, int]] = {}
        self.plans, self.snapshots, self.decoded = [], [], []
        self.since_prefill = 0
        # a token per boundary that decodes, and no two rounds without one between them
        tokens = sum(1 + min(arrival.output, arrival.budget) for arrival in arrivals)
        self.most_boundaries = 100 + 3 * tokens

    def run(self, num_boundaries=None):
        while (self.running or self.to_come) and len(self.plans) != num_boundaries:
            self.step()

    def step(self):
        now = len(self.plans)
        assert now < self.most_boundaries, "a run does not end"
        for id in [id for id, arrival in self.to_come.items() if arrival.boundary <= now]:
            self.running[id] = Running(arrival=self.to_come.pop(id))
        snapshot = self.snapshot()
        plan = plan_boundary(snapshot, self.options)
        self.snapshots.append(snapshot)
        self.plans.append(plan)
        before = {id: sequence.status for id, sequence in self.running.items()}
        self.carry_out(plan)
        for id, sequence in self.running.items():
            sequence.waited = sequence.waited + 1 if sequence.status == before[id] else 0
        if plan.is_prefill:
            self.since_prefill = 0
            self.decoded.append({})
        else:
            self.since_prefill += 1
            self.decoded.append({id: self.decode(s) for id, s in self.running.items()})

    def snapshot(self):
        return BoundarySnapshot(
            sequences=tuple(
                SequencePages(
                    id=id,
                    status=s.status,
                    context_tokens=s.context,
                    remaining_tokens=s.remaining,
                    device_pages=len(s.device),
                    host_pages=len(s.host),
                    progress_tokens=s.progress,
                    waited=s.waited,
                    priority=s.arrival.priority,
                )
                for id, s in self.running.items()
            ),
            page_tokens=self.page,
            device_pages=self.device_pages,
            device_free=len(self.device_free),
            host_pages=self.host_pages,
            host_free=len(self.host_free),
            max_active=self.max_active,
            host_chunk_tokens=self.chunk,
            boundaries_since_prefill=self.since_prefill,
        )

    def carry_out(self, plan):
        for reason, ids in (("stop", plan.release), ("capacity", plan.over_capacity)):
            for id in ids:
                assert id not in self.ended
                sequence = self.running.pop(id)
                self.free(sequence, device=True, host=True)
                self.ended[id] = (reason, sequence.progress)
        for id in plan.evict:
            self.free(self.running[id], device=True, host=True)
            self.running[id].status = "evicted"
        for id in plan.suspend:
            assert "active" == self.running[id].status
            self.free(self.running[id], device=True)
            self.running[id].status = "suspended"
        for grant in plan.extend:
            self.take(self.running[grant.id].device, self.device_free, grant.num_pages)
        for grant in plan.load:
            assert self.running[grant.id].status in ("suspended", "prefilled")
            self.take(self.running[grant.id].device, self.device_free, grant.num_pages)
            self.running[grant.id].status = "active"
        for grant in plan.grow:
            self.take(self.running[grant.id].host, self.host_free, grant.num_pages)
        for grant in plan.prefill:
            assert self.running[grant.id].status in ("waiting", "evicted")
            self.take(self.running[grant.id].host, self.host_free, grant.num_pages)
            self.running[grant.id].status = "prefilled"

    def free(self, sequence, *, device=False, host=False):
        if device:
            self.device_free |= sequence.device
            sequence.device = set()
        if host:
            self.host_free |= sequence.host
            sequence.host = set()

    def take(self, pages, free, count):
        # KeyError where more is granted than there is
        pages |= {free.pop() for _ in range(count)}

    def decode(self, sequence):
        """Decode until the next boundary, within pages; return the tokens, None if not active."""
        if sequence.status != "active":
            return None
        room = self.page * min(len(sequence.device), len(sequence.host)) - sequence.context
        left = sequence.arrival.output - sequence.progress
        tokens = min(self.options.interval * self.page, room, left, sequence.remaining)
        sequence.progress += tokens
        return tokens

    def check(self):
        """Raise unless each page is in one hand and each context has its pages."""
        for free, total, tier in (
            (self.device_free, self.device_pages, "device"),
            (self.host_free, self.host_pages, "host"),
        ):
            hands = [free, *(getattr(s, tier) for s in self.running.values())]
            assert list(range(total)) == sorted(page for hand in hands for page in hand)
        for sequence in self.running.values():
            if sequence.status == "active":
                assert sequence.context <= len(sequence.device) * self.page
            if sequence.status in ("active", "suspended", "prefilled"):
                assert sequence.context <= len(sequence.host) * self.page
