"""What must hold of the pages at a boundary, before its plan and after."""

from collections.abc import Iterable
from dataclasses import replace

from raybatch.policy.boundary.records import (
    BoundaryPlan,
    BoundarySnapshot,
    PageGrant,
    SequencePages,
    Status,
)

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
