"""What a page boundary sees and decides: plain records of pages, and checks that they add up.

A page is `page_tokens` positions of KV cache. Host memory keeps the KV of every sequence that has
any, also while the device has it: at a boundary, before the snapshot is taken, both are equal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from raybatch.config import VictimOrder
from raybatch.errors import ConfigError, range_text

Status = Literal["active", "suspended", "prefilled", "evicted", "waiting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryOptions:
    """How pages are reserved, who yields, and when prompts are computed.

    Args:
        initial: device pages beyond its context that a sequence is loaded with.
        extension: device pages that it gets when those that it has end before the next boundary.
        interval: pages of tokens between two boundaries.
        victims: who yields first among equal priorities: the sequence with the least progress, the
            most progress, or the one that came last.
        max_wait: boundaries after which nobody who has waited less is loaded or prefilled before.
        watermark_pages: host pages that stay free while more than one sequence has any.
        margin_pages: host pages that stay free beyond what active sequences grow by.
        headroom_pages: device pages that no sequence may need.
        lookahead: boundaries whose growth stays free in host memory after a prefill round, and
            boundaries that decode between two rounds.
        refill_ratio: sequences of a prefill round at least, as a multiple of those that can decode.
    """

    initial: int = 2
    extension: int = 2
    interval: int = 1
    victims: VictimOrder = "least"
    max_wait: int = 8
    watermark_pages: int = 0
    margin_pages: int = 0
    headroom_pages: int = 0
    lookahead: int = 4
    refill_ratio: float = 0.25

    def __post_init__(self) -> None:
        for name in ("interval", "lookahead"):
            _check_at_least(name, getattr(self, name), 1)
        for name in ("max_wait", "watermark_pages", "margin_pages", "headroom_pages"):
            _check_at_least(name, getattr(self, name), 0)
        _check_at_least("refill_ratio", self.refill_ratio, 0)
        for name in ("initial", "extension"):
            if getattr(self, name) < self.interval:
                raise ConfigError(
                    f"{name} must be at least interval, the pages that a sequence may fill before "
                    f"the next boundary ({self.interval}), got {getattr(self, name)}"
                )
        if self.victims not in get_args(VictimOrder):
            names = ", ".join(get_args(VictimOrder))
            raise ConfigError(f"victims must be one of {names}, got {self.victims!r}")

    @property
    def host_reserve(self) -> int:
        """Host pages that no sequence may need, even alone."""
        return max(self.watermark_pages, self.margin_pages)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePages:
    """A sequence at a boundary.

    Args:
        id: unique; a sequence that came later has a larger one.
        status: active (pages on the device and in host memory), suspended (in host memory alone,
            since it yielded), prefilled (the same, since it was prefilled), evicted (no pages; all
            its tokens have to be prefilled again) or waiting (no pages yet).
        context_tokens: tokens whose KV it has; without pages, those to prefill.
        remaining_tokens: that it may still generate; 0 for a sequence that has ended.
        progress_tokens: that it has decoded, part of the context.
        waited: boundaries since it came into its status, for one that is not active.
        priority: larger ones yield later and are taken earlier.
    """

    id: int
    status: Status
    context_tokens: int
    remaining_tokens: int
    device_pages: int = 0
    host_pages: int = 0
    progress_tokens: int = 0
    waited: int = 0
    priority: int = 0

    @property
    def is_pending(self) -> bool:
        """Whether its tokens have to be prefilled before it can decode."""
        return self.status in ("waiting", "evicted")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundarySnapshot:
    """One engine at a page boundary, after its host memory has caught up with its device.

    Args:
        device_free: of them, in no sequence's hands.
        host_free: of them, in no sequence's hands.
        host_chunk_tokens: growth for which a sequence gets host pages when it is prefilled.
        boundaries_since_prefill: boundaries that decoded since the last prefill round.
    """

    sequences: tuple[SequencePages, ...]
    page_tokens: int
    device_pages: int
    device_free: int
    host_pages: int
    host_free: int
    max_active: int
    host_chunk_tokens: int = 0
    boundaries_since_prefill: int = 0

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageGrant:
    """Pages that a sequence gets in addition."""

    id: int
    num_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryPlan:
    """What happens at a boundary; carried out in the order of the fields, ids ascending in each.

    Args:
        release: ended by themselves; all their pages become free.
        over_capacity: cannot get another token even alone: they end with the finish reason
            "capacity" and what they have, and all their pages become free.
        evict: give up all their pages and keep their tokens, which are prefilled again.
        suspend: give up their device pages; host memory has them.
        extend: device pages for active sequences.
        grow: host pages for sequences that will decode.
        load: device pages for suspended and prefilled sequences, which become active.
        prefill: host pages for waiting and evicted sequences. Where there is any, they are
            prefilled before the next boundary and nothing decodes.
    """

    release: tuple[int, ...] = ()
    over_capacity: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    suspend: tuple[int, ...] = ()
    extend: tuple[PageGrant, ...] = ()
    grow: tuple[PageGrant, ...] = ()
    load: tuple[PageGrant, ...] = ()
    prefill: tuple[PageGrant, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether the next phase computes prompts instead of decoding."""
        return bool(self.prefill)


def _check_at_least(name: str, value: float, least: int) -> None:
    if not least <= value < float("inf"):
        raise ConfigError(f"{name} must be {range_text(f'at least {least}', value)}, got {value}")


_HOLDERS = ("active", "suspended", "prefilled")


def check_snapshot(snapshot: BoundarySnapshot) -> None:
    """Raise RuntimeError unless the pages of a snapshot add up and cover every context."""
    sequences, page = snapshot.sequences, snapshot.page_tokens
    if page < 1 or snapshot.max_active < 1:
        raise RuntimeError(
            f"page boundary: pages of {page} tokens and {snapshot.max_active} active sequences at "
            "most; both must be at least 1"
        )
    for tier in ("device", "host"):
        total, free = getattr(snapshot, f"{tier}_pages"), getattr(snapshot, f"{tier}_free")
        held = sum(getattr(sequence, f"{tier}_pages") for sequence in sequences)
        if free < 0 or free + held != total:
            raise RuntimeError(
                f"page boundary: {tier} memory has {total} pages, but {free} are free and "
                f"{held} are held"
            )
    if len({sequence.id for sequence in sequences}) != len(sequences):
        raise RuntimeError("page boundary: an id is there twice")
    for sequence in sequences:
        broken = _broken_rule(sequence, page)
        if broken:
            raise RuntimeError(f"page boundary: {broken}: {sequence}")


def _broken_rule(sequence: SequencePages, page: int) -> str | None:
    is_active, has_host = sequence.status == "active", sequence.status in _HOLDERS
    counts = (
        sequence.context_tokens,
        sequence.remaining_tokens,
        sequence.device_pages,
        sequence.host_pages,
        sequence.waited,
    )
    rules = (
        ("a count is negative", min(counts) >= 0),
        ("progress is no part of the context", 0 <= sequence.progress_tokens <= counts[0]),
        ("device pages without being active", is_active or not sequence.device_pages),
        ("host pages without a KV cache", has_host or not sequence.host_pages),
        (
            "a context beyond its device pages",
            not is_active or sequence.context_tokens <= sequence.device_pages * page,
        ),
        (
            "a context beyond its host pages",
            not has_host or sequence.context_tokens <= sequence.host_pages * page,
        ),
    )
    return next((text for text, holds in rules if not holds), None)


def apply_plan(snapshot: BoundarySnapshot, plan: BoundaryPlan) -> BoundarySnapshot:
    """Return the snapshot as it is once the plan is carried out.

    Sequences that end are gone; those that are prefilled count as such.

    Raises:
        RuntimeError: a decision names a sequence that is not there or of the wrong status, two
            decisions contradict each other, or pages do not add up afterwards.
    """
    books = _Books(snapshot)
    for ended in (*plan.release, *plan.over_capacity):
        books.end(ended)
    for evicted in plan.evict:
        books.move(evicted, _HOLDERS, "evicted", device_pages=0, host_pages=0)
    for suspended in plan.suspend:
        books.move(suspended, ("active",), "suspended", device_pages=0)
    books.untouched(grant.id for grant in (*plan.extend, *plan.load, *plan.prefill))
    for grant in plan.extend:
        books.add(grant, ("active",), "device_pages")
    for grant in plan.load:
        books.add(grant, ("suspended", "prefilled"), "device_pages", becomes="active")
    for grant in plan.grow:
        books.add(grant, ("active",), "host_pages")
    for grant in plan.prefill:
        books.add(grant, ("evicted", "waiting"), "host_pages", becomes="prefilled")
    if plan.prefill and (plan.extend or plan.load or plan.grow):
        raise RuntimeError("page boundary: a prefill round beside pages for decoding")
    after = books.close()
    active = [sequence for sequence in after.sequences if sequence.status == "active"]
    if plan.prefill and active:
        raise RuntimeError(f"page boundary: {len(active)} sequences active in a prefill round")
    if len(active) > after.max_active:
        raise RuntimeError(f"page boundary: {len(active)} active of {after.max_active} at most")
    check_snapshot(after)
    return after


class _Books:
    """Pages of each sequence while a plan is carried out."""

    def __init__(self, snapshot: BoundarySnapshot) -> None:
        self._snapshot = snapshot
        self._sequences = {sequence.id: sequence for sequence in snapshot.sequences}
        self._moved: set[int] = set()

    def end(self, id: int) -> None:
        self._find(id)
        del self._sequences[id]

    def move(self, id: int, allowed: tuple[str, ...], status: Status, **pages: int) -> None:
        sequence = self._find(id)
        self._check_status(sequence, allowed)
        self._sequences[id] = replace(sequence, status=status, waited=0, **pages)
        self._moved.add(id)

    def untouched(self, ids: Iterable[int]) -> None:
        """Raise unless each id is there once, and nothing was taken from it."""
        seen = set(self._moved)
        for id in ids:
            if id in seen:
                raise RuntimeError(f"page boundary: two decisions about sequence {id}")
            seen.add(id)

    def add(
        self,
        grant: PageGrant,
        allowed: tuple[str, ...],
        tier: str,
        *,
        becomes: Status | None = None,
    ) -> None:
        sequence = self._find(grant.id)
        self._check_status(sequence, allowed)
        if grant.num_pages < 1:
            raise RuntimeError(f"page boundary: a grant of {grant.num_pages} pages")
        held = getattr(sequence, tier) + grant.num_pages
        if becomes is not None:
            sequence = replace(sequence, status=becomes, waited=0)
        self._sequences[grant.id] = replace(sequence, **{tier: held})

    def close(self) -> BoundarySnapshot:
        sequences = tuple(self._sequences.values())
        device_held = sum(sequence.device_pages for sequence in sequences)
        host_held = sum(sequence.host_pages for sequence in sequences)
        return replace(
            self._snapshot,
            sequences=sequences,
            device_free=self._snapshot.device_pages - device_held,
            host_free=self._snapshot.host_pages - host_held,
        )

    def _find(self, id: int) -> SequencePages:
        if id not in self._sequences:
            raise RuntimeError(f"page boundary: a decision about sequence {id}, which is not there")
        return self._sequences[id]

    def _check_status(self, sequence: SequencePages, allowed: tuple[str, ...]) -> None:
        if sequence.status not in allowed:
            raise RuntimeError(
                f"page boundary: sequence {sequence.id} is {sequence.status}, a decision about it "
                f"needs one of {', '.join(allowed)}"
            )
