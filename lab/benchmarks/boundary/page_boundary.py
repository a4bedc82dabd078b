"""Plans which sequences end, yield, grow or load at a page boundary: a pure policy over a snapshot.

Every `interval` pages of tokens an engine stops, copies new KV to host memory, and gets a plan.
The plan depends on the snapshot alone. Sequences are compared by total orders whose last key is
the id, so all ranks that see the same snapshot make the same plan.
"""

from collections.abc import Callable, Iterable

from boundary.records import (
    BoundaryOptions,
    BoundaryPlan,
    BoundarySnapshot,
    PageGrant,
    SequencePages,
    apply_plan,
    check_snapshot,
)

_VICTIM_KEYS: dict[str, Callable[[SequencePages], tuple[int, ...]]] = {
    "least": lambda sequence: (sequence.priority, sequence.progress_tokens, -sequence.id),
    "most": lambda sequence: (sequence.priority, -sequence.progress_tokens, -sequence.id),
    "lifo": lambda sequence: (sequence.priority, -sequence.id),
}


def plan_boundary(snapshot: BoundarySnapshot, options: BoundaryOptions) -> BoundaryPlan:
    """Plan a page boundary, in the order release, evict, suspend, extend, load, prefill.

    Until the next boundary every active sequence can decode `interval` pages of tokens, or all
    tokens that it may still generate, within the pages that the plan gives it on the device and in
    host memory. If the device has too few pages, victims are suspended. If host memory has too
    few, victims are evicted. A sequence that fills all the memory that one sequence can have ends
    with "capacity", so it is not reloaded without end.

    Candidates are loaded or prefilled first come, first served. A candidate that does not fit is
    skipped; after it has waited `max_wait` boundaries, none that waited less goes before it.

    Prompts are computed in prefill rounds, during which no sequence decodes. A round begins if no
    sequence is left to load, the device has room, and the round is large enough (`refill_ratio`).
    It continues until `max_active` sequences are prefilled, or until host memory has room only for
    the growth of `lookahead` boundaries. So no sequence is evicted for lack of host pages during
    these boundaries, and no further round begins. O(n log n) in the sequences of the snapshot.

    Raises:
        RuntimeError: the snapshot, or the state that the plan leads to, breaks a rule of
            `boundary.records`.

    Source: BatchGen (arXiv:2606.21712), section 5.3. This library adds the order of victims,
    ageing, host pages granted ahead, and the rules for prefill rounds.
    """
    check_snapshot(snapshot)
    boundary = _Boundary(snapshot, options)
    boundary.end()
    boundary.evict()
    boundary.suspend()
    boundary.extend()
    boundary.load()
    boundary.prefill()
    plan = boundary.plan()
    apply_plan(snapshot, plan)
    return plan


class _Boundary:
    """Builds one plan step by step; holds the free pages and the sequences of each kind."""

    def __init__(self, snapshot: BoundarySnapshot, options: BoundaryOptions) -> None:
        self._snapshot, self._options = snapshot, options
        self._device_free, self._host_free = snapshot.device_free, snapshot.host_free
        # most pages that one sequence can have if it is the only one
        capacity_pages = min(
            snapshot.device_pages - options.headroom_pages,
            snapshot.host_pages - options.host_reserve,
        )
        self._limit_tokens = max(0, capacity_pages) * snapshot.page_tokens
        self._victim_key = _VICTIM_KEYS[options.victims]
        self._active: dict[int, SequencePages] = {}
        # suspended and prefilled sequences, except those that this plan suspends
        self._stored: dict[int, SequencePages] = {}
        self._pending: list[SequencePages] = []
        self._released: list[SequencePages] = []
        self._over_capacity: list[SequencePages] = []
        self._evicted: list[SequencePages] = []
        self._suspended: list[SequencePages] = []
        self._extended: dict[int, int] = {}
        self._grown: dict[int, int] = {}
        self._loaded: dict[int, int] = {}
        self._prefilled: dict[int, int] = {}

    def _remaining(self, sequence: SequencePages) -> int:
        return min(sequence.remaining_tokens, self._limit_tokens - sequence.context_tokens)

    def _pages_after(self, sequence: SequencePages, tokens: int) -> int:
        """Return the pages of a sequence after `tokens` more tokens, or at its limit if earlier."""
        tokens = min(tokens, self._remaining(sequence))
        return self._snapshot.pages(sequence.context_tokens + tokens)

    def _host_growth(self, sequence: SequencePages, boundaries: int = 1) -> int:
        """Return the host pages that a sequence lacks for decoding until a later boundary."""
        tokens = boundaries * self._options.interval * self._snapshot.page_tokens
        return max(0, self._pages_after(sequence, tokens) - sequence.host_pages)

    def _extension(self, sequence: SequencePages) -> int:
        """Return the device pages to add to an active sequence, 0 if its pages suffice."""
        tokens = self._options.interval * self._snapshot.page_tokens
        if self._pages_after(sequence, tokens) <= sequence.device_pages:
            return 0
        return min(
            self._options.extension,
            self._pages_after(sequence, sequence.remaining_tokens) - sequence.device_pages,
        )

    def _load_pages(self, sequence: SequencePages) -> int:
        wanted = self._snapshot.pages(sequence.context_tokens) + self._options.initial
        return min(wanted, self._pages_after(sequence, sequence.remaining_tokens))

    def _by_wait(self, sequence: SequencePages) -> tuple[bool, int, bool, int, int]:
        """Return the sort key of a candidate: overdue, priority, recomputed, wait, id."""
        if self._is_overdue(sequence):
            return (False, 0, False, -sequence.waited, sequence.id)
        is_new = sequence.status == "waiting"
        return (True, -sequence.priority, is_new, -sequence.waited, sequence.id)

    def _is_overdue(self, sequence: SequencePages) -> bool:
        return sequence.waited >= self._options.max_wait

    def end(self) -> None:
        """Sort sequences by kind, and free the pages of those that have ended."""
        for sequence in self._snapshot.sequences:
            # fewest tokens that must fit in a sequence that is alone; the token that a prefill
            # generates needs no KV yet
            least = 0 if sequence.is_pending and sequence.context_tokens else 1
            if sequence.remaining_tokens == 0:
                self._released.append(sequence)
            elif self._remaining(sequence) < least:
                self._over_capacity.append(sequence)
            elif sequence.is_pending:
                self._pending.append(sequence)
            elif sequence.status == "active":
                self._active[sequence.id] = sequence
            else:
                self._stored[sequence.id] = sequence
        for sequence in (*self._released, *self._over_capacity):
            self._device_free += sequence.device_pages
            self._host_free += sequence.host_pages

    def evict(self) -> None:
        """Evict until host memory has room for the growth of active sequences."""
        options = self._options
        growth = sum(self._host_growth(sequence) for sequence in self._active.values())
        victims = self._victims((*self._active.values(), *self._stored.values()))
        while len(victims) > 1 and self._host_free < max(
            options.watermark_pages, growth + options.margin_pages
        ):
            victim = victims.pop()
            if victim.status == "active":
                growth -= self._host_growth(victim)
            self._evict(victim)

    def _victims(self, sequences: Iterable[SequencePages]) -> list[SequencePages]:
        """Return the sequences in the order in which they stay; the last one yields first."""
        return sorted(sequences, key=self._victim_key, reverse=True)

    def _evict(self, victim: SequencePages) -> None:
        (self._active if victim.status == "active" else self._stored).pop(victim.id)
        self._device_free += victim.device_pages
        self._host_free += victim.host_pages
        self._evicted.append(victim)

    def suspend(self) -> None:
        """Suspend until the device has room for the extensions of all that stay."""
        needed = sum(self._extension(sequence) for sequence in self._active.values())
        victims = self._victims(self._active.values())
        while needed > self._device_free or len(victims) > self._snapshot.max_active:
            victim = victims.pop()
            needed -= self._extension(victim)
            self._device_free += victim.device_pages
            self._suspended.append(self._active.pop(victim.id))

    def extend(self) -> None:
        """Grant active sequences the pages that they need until the next boundary."""
        for sequence in self._active.values():
            self._grant(self._extended, sequence, self._extension(sequence))
            self._grow(sequence)

    def _grant(self, grants: dict[int, int], sequence: SequencePages, num_pages: int) -> None:
        if num_pages:
            grants[sequence.id] = num_pages
            self._device_free -= num_pages

    def _grow(self, sequence: SequencePages) -> None:
        growth = self._host_growth(sequence)
        if growth:
            self._grown[sequence.id] = growth
            self._host_free -= growth

    def load(self) -> None:
        """Load candidates first come, first served; at least one becomes active, if any can."""
        candidates = sorted(self._stored.values(), key=self._by_wait)
        if candidates and not self._active:
            self._make_room(candidates[0])
            candidates = [sequence for sequence in candidates if sequence.id in self._stored]
        for sequence in candidates:
            if len(self._active) == self._snapshot.max_active:
                return
            if self._fits(sequence):
                self._grant(self._loaded, sequence, self._load_pages(sequence))
                self._grow(sequence)
                self._active[sequence.id] = self._stored.pop(sequence.id)
            elif self._is_overdue(sequence):
                return

    def _fits(self, sequence: SequencePages) -> bool:
        spare = max(0, self._host_free - self._options.margin_pages)
        has_host = self._host_growth(sequence) <= spare
        return has_host and self._load_pages(sequence) <= self._device_free

    def _make_room(self, first: SequencePages) -> None:
        """Evict stored sequences until `first` can be loaded; the device is empty."""
        victims = self._victims(s for s in self._stored.values() if s.id != first.id)
        while victims and not self._fits(first):
            self._evict(victims.pop())

    def prefill(self) -> None:
        """Turn the boundary into a prefill round, if one is due and large enough."""
        num_decodable = len(self._active) + len(self._stored) + len(self._suspended)
        if not self._is_prefill_due(num_decodable):
            return
        chosen = self._choose_round()
        if len(chosen) < max(1, self._options.refill_ratio * num_decodable):
            return
        self._suspended += [s for s in self._active.values() if s.id not in self._loaded]
        self._extended, self._grown, self._loaded = {}, {}, {}
        self._prefilled = chosen

    def _is_prefill_due(self, num_decodable: int) -> bool:
        if not self._pending or self._evicted or self._stored or self._suspended:
            return False
        if num_decodable == 0:
            return True
        first = min(self._pending, key=self._by_wait)
        has_room = (
            len(self._active) < self._snapshot.max_active
            and self._load_pages(first) <= self._device_free
        )
        return has_room and self._snapshot.boundaries_since_prefill >= self._options.lookahead

    def _choose_round(self) -> dict[int, int]:
        """Return the host pages of each sequence that a round would prefill."""
        ahead = self._options.lookahead
        growth = sum(self._host_growth(sequence, ahead) for sequence in self._active.values())
        # nothing grows while prompts are computed
        free = self._host_free + sum(self._grown.values()) - self._options.host_reserve - growth
        ahead_tokens = ahead * self._options.interval * self._snapshot.page_tokens
        tokens = max(self._snapshot.host_chunk_tokens, ahead_tokens)
        chosen: dict[int, int] = {}
        for sequence in sorted(self._pending, key=self._by_wait):
            num_pages = self._pages_after(sequence, tokens)
            if len(chosen) == self._snapshot.max_active:
                break
            if num_pages <= free:
                chosen[sequence.id] = num_pages
                free -= num_pages
            elif self._is_overdue(sequence):
                break
        return chosen

    def plan(self) -> BoundaryPlan:
        release, over_capacity, evict, suspend = (
            tuple(sorted(sequence.id for sequence in chosen))
            for chosen in (self._released, self._over_capacity, self._evicted, self._suspended)
        )
        extend, grow, load, prefill = (
            tuple(PageGrant(id=id, num_pages=pages) for id, pages in sorted(granted.items()))
            for granted in (self._extended, self._grown, self._loaded, self._prefilled)
        )
        return BoundaryPlan(
            release=release,
            over_capacity=over_capacity,
            evict=evict,
            suspend=suspend,
            extend=extend,
            grow=grow,
            load=load,
            prefill=prefill,
        )
