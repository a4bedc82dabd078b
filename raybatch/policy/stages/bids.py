"""Which bid a source takes."""

from collections.abc import Mapping

from raybatch.policy.stages.messages import Bid

_MAX_EARLIEST = 3


def best_bidder(bids: Mapping[int, Bid]) -> int:
    """Return the bidder that gets the row.

    The half with the higher load is left out (of an odd number the smaller half), then all but the
    three with the earliest start; of these the first to answer is taken. Earlier answers and lower
    numbers win ties.

    Args:
        bids: by bidder, in order of arrival; at least one.

    Source: CascadeInfer, section 4.4.
    """
    # sorting is stable, so what arrived first stays first
    by_load = sorted(bids, key=lambda bidder: bids[bidder].load)
    lower = set(by_load[: (len(by_load) + 1) // 2])
    by_start = sorted(
        (bidder for bidder in bids if bidder in lower), key=lambda bidder: bids[bidder].start_s
    )
    earliest = set(by_start[:_MAX_EARLIEST])
    return next(bidder for bidder in bids if bidder in earliest)
