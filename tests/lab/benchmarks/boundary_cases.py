"""Snapshots of a page boundary in few words: pages of four tokens, free pages worked out."""

from boundary.records import BoundarySnapshot, PageGrant, SequencePages

PAGE = 4


def pages(tokens):
    return -(-tokens // PAGE)


def active(id, context, *, remaining=100, device=None, host=None, **more):
    return SequencePages(
        id=id,
        status="active",
        context_tokens=context,
        remaining_tokens=remaining,
        device_pages=pages(context) if device is None else device,
        host_pages=pages(context) if host is None else host,
        **more,
    )


def stored(id, context, *, remaining=100, host=None, status="suspended", **more):
    return SequencePages(
        id=id,
        status=status,
        context_tokens=context,
        remaining_tokens=remaining,
        host_pages=pages(context) if host is None else host,
        **more,
    )


def pending(id, context, *, remaining=100, status="waiting", **more):
    return SequencePages(
        id=id, status=status, context_tokens=context, remaining_tokens=remaining, **more
    )


def snapshot(*sequences, device=1000, host=1000, **more):
    return BoundarySnapshot(
        sequences=sequences,
        page_tokens=PAGE,
        device_pages=device,
        device_free=device - sum(sequence.device_pages for sequence in sequences),
        host_pages=host,
        host_free=host - sum(sequence.host_pages for sequence in sequences),
        **{"max_active": 8} | more,
    )


def grants(**pages_of):
    """Return grants from `s1=2` for two pages to sequence 1."""
    return tuple(PageGrant(id=int(name[1:]), num_pages=n) for name, n in pages_of.items())
