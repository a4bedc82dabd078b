"""Input and decisions of a page boundary: plain records of pages, and checks that they add up.

A page is `page_tokens` positions of KV cache. Host memory keeps the KV of every sequence that has
any, even while the device has it: the copies are equal when the snapshot of a boundary is taken.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from raybatch.errors import ConfigError, range_text

VictimOrder = Literal["least", "most", "lifo"]
Status = Literal["active", "suspended", "prefilled", "evicted", "waiting"]
# statuses of sequences with host pages
_HOLDERS: tuple[Status, ...] = ("active", "suspended", "prefilled")
_FREE_PAGES = ("watermark_pages", "margin_pages", "headroom_pages")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryOptions:
    """How pages are reserved, which sequences yield, and when prompts are computed."""

    initial: int = 2  # device pages beyond its context that a sequence is loaded with
    # device pages that a sequence gets if its pages do not last until the next boundary
    extension: int = 2
    interval: int = 1  # pages of tokens between two boundaries
    # which sequence yields first among equal priorities: the one with the least progress, with the
    # most progress, or the one that came last
    victims: VictimOrder = "least"
    # boundaries after which a sequence is loaded or prefilled before all that waited less
    max_wait: int = 8
    watermark_pages: int = 0  # host pages that stay free while more than one sequence has any
    margin_pages: int = 0  # host pages that stay free beyond what active sequences grow by
    headroom_pages: int = 0  # device pages that no sequence may need
    # boundaries for whose growth a prefill round leaves host memory free, and the fewest boundaries
    # that decode between two rounds
    lookahead: int = 4
    # fewest sequences of a prefill round, as a multiple of those that can decode
    refill_ratio: float = 0.25

    def __post_init__(self) -> None:
        for name in ("interval", "lookahead", "max_wait", *_FREE_PAGES, "refill_ratio"):
            value, least = getattr(self, name), 1 if name in ("interval", "lookahead") else 0
            if not least <= value < float("inf"):
                allowed = range_text(f"at least {least}", value)
                raise ConfigError(f"{name} must be {allowed}, got {value}")
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
    """A sequence at a boundary."""

    id: int  # unique; a sequence that came later has a larger one
    # active (pages on the device and in host memory), suspended (in host memory alone, since it
    # yielded), prefilled (the same, since it was prefilled), evicted (no pages; all its tokens have
    # to be prefilled again) or waiting (no pages yet)
    status: Status
    context_tokens: int  # tokens whose KV it has; without pages, those to prefill
    remaining_tokens: int  # that it may still generate; 0 for a sequence that has ended
    device_pages: int = 0
    host_pages: int = 0
    progress_tokens: int = 0  # decoded, part of the context
    waited: int = 0  # boundaries since its status changed; 0 for an active sequence
    priority: int = 0  # larger ones yield later and are taken earlier

    @property
    def is_pending(self) -> bool:
        """Whether its tokens have to be prefilled before it can decode."""
        return self.status in ("waiting", "evicted")


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundarySnapshot:
    """One engine at a page boundary, after its host memory has caught up with its device.

    Free pages belong to no sequence. A sequence that is prefilled gets host pages for at least
    `host_chunk_tokens` more tokens.
    """

    sequences: tuple[SequencePages, ...]
    page_tokens: int
    device_pages: int
    device_free: int
    host_pages: int
    host_free: int
    max_active: int
    host_chunk_tokens: int = 0
    boundaries_since_prefill: int = 0  # boundaries that decoded since the last prefill round

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageGrant:
    id: int
    num_pages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryPlan:
    """Decisions at a boundary, carried out in the order of the fields, ids ascending in each."""

    release: tuple[int, ...] = ()  # ended by themselves; all their pages become free
    # cannot get another token even alone: they end with the finish reason "capacity" and the tokens
    # generated so far, and all their pages become free
    over_capacity: tuple[int, ...] = ()
    # give up all their pages and keep their tokens, which are prefilled again
    evict: tuple[int, ...] = ()
    suspend: tuple[int, ...] = ()  # give up their device pages; host memory has them
    extend: tuple[PageGrant, ...] = ()  # device pages for active sequences
    grow: tuple[PageGrant, ...] = ()  # host pages for sequences that will decode
    # device pages for suspended and prefilled sequences, which become active
    load: tuple[PageGrant, ...] = ()
    # host pages for waiting and evicted sequences. If there are any, these sequences are prefilled
    # before the next boundary and nothing decodes.
    prefill: tuple[PageGrant, ...] = ()

    @property
    def is_prefill(self) -> bool:
        """Whether the next phase computes prompts instead of decoding."""
        return bool(self.prefill)


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
        raise RuntimeError("page boundary: sequence ids repeat")
    for sequence in sequences:
        broken = _broken_rule(sequence, page)
        if broken:
            raise RuntimeError(f"page boundary: {broken}: {sequence}")


def _broken_rule(sequence: SequencePages, page: int) -> str | None:
    is_active, has_host = sequence.status == "active", sequence.status in _HOLDERS
    context, device_pages, host_pages = (
        sequence.context_tokens,
        sequence.device_pages,
        sequence.host_pages,
    )
    least = min(context, sequence.remaining_tokens, device_pages, host_pages, sequence.waited)
    rules = {
        "a count is negative": least >= 0,
        "progress is no part of the context": 0 <= sequence.progress_tokens <= context,
        "device pages without being active": is_active or not device_pages,
        "host pages without a KV cache": has_host or not host_pages,
        "a context beyond its device pages": not is_active or context <= device_pages * page,
        "a context beyond its host pages": not has_host or context <= host_pages * page,
    }
    return next((text for text, holds in rules.items() if not holds), None)


def apply_plan(snapshot: BoundarySnapshot, plan: BoundaryPlan) -> BoundarySnapshot:
    """Return the snapshot after the plan is carried out.

    It has no ended sequences, and the sequences of a prefill round have the status "prefilled".

    Raises:
        RuntimeError: a decision names a sequence that does not exist or has the wrong status, two
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
    books.add(plan.extend, ("active",), "device_pages")
    books.add(plan.load, ("suspended", "prefilled"), "device_pages", becomes="active")
    books.add(plan.grow, ("active",), "host_pages")
    books.add(plan.prefill, ("evicted", "waiting"), "host_pages", becomes="prefilled")
    if plan.prefill and (plan.extend or plan.load or plan.grow):
        raise RuntimeError("page boundary: a plan with a prefill round grants pages for decoding")
    after = books.close()
    active = [sequence for sequence in after.sequences if sequence.status == "active"]
    if plan.prefill and active:
        raise RuntimeError(f"page boundary: {len(active)} sequences active in a prefill round")
    if len(active) > after.max_active:
        raise RuntimeError(
            f"page boundary: {len(active)} sequences are active, at most {after.max_active} may be"
        )
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

    def move(self, id: int, allowed: tuple[Status, ...], status: Status, **pages: int) -> None:
        sequence = self._find(id, allowed)
        self._sequences[id] = replace(sequence, status=status, waited=0, **pages)
        self._moved.add(id)

    def untouched(self, ids: Iterable[int]) -> None:
        """Raise unless each id occurs once and the plan takes no pages from its sequence."""
        seen = set(self._moved)
        for id in ids:
            if id in seen:
                raise RuntimeError(f"page boundary: two decisions about sequence {id}")
            seen.add(id)

    def add(
        self,
        grants: Iterable[PageGrant],
        allowed: tuple[Status, ...],
        tier: str,
        becomes: Status | None = None,
    ) -> None:
        for grant in grants:
            sequence = self._find(grant.id, allowed)
            if grant.num_pages < 1:
                raise RuntimeError(f"page boundary: a grant of {grant.num_pages} pages")
            if becomes is not None:
                sequence = replace(sequence, status=becomes, waited=0)
            held = getattr(sequence, tier) + grant.num_pages
            self._sequences[grant.id] = replace(sequence, **{tier: held})

    def close(self) -> BoundarySnapshot:
        sequences, before = tuple(self._sequences.values()), self._snapshot
        return replace(
            before,
            sequences=sequences,
            device_free=before.device_pages - sum(one.device_pages for one in sequences),
            host_free=before.host_pages - sum(one.host_pages for one in sequences),
        )

    def _find(self, id: int, allowed: tuple[Status, ...] = get_args(Status)) -> SequencePages:
        if id not in self._sequences:
            raise RuntimeError(
                f"page boundary: a decision names sequence {id}, which does not exist"
            )
        sequence = self._sequences[id]
        if sequence.status not in allowed:
            raise RuntimeError(
                f"page boundary: sequence {id} is {sequence.status}, a decision about it "
                f"needs one of {', '.join(allowed)}"
            )
        return sequence
