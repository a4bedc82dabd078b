"""Which bid wins."""

import pytest

from raybatch_lab.stages.messages import Bid
from raybatch_lab.stages.sending import best_bidder


def bids(*entries):
    return {bidder: Bid(load=load, start_s=start_s) for bidder, load, start_s in entries}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (bids((7, 9.0, 9.0)), 7),
        # the lower load, though it starts later
        (bids((0, 5.0, 0.0), (1, 1.0, 9.0)), 1),
        # of three two are left, and the first answer wins
        (bids((0, 9.0, 0.0), (1, 2.0, 5.0), (2, 1.0, 1.0)), 1),
        # of eight four are left, of these the three earliest, of these the first
        (bids(*((i, float(i), 1.0 if i else 9.0) for i in range(8))), 1),
        # equal loads: those that answered first
        (bids((3, 1.0, 0.0), (2, 1.0, 0.0), (1, 1.0, 0.0)), 3),
    ],
    ids=["alone", "load", "odd", "start", "tie"],
)
def test_low_load_then_early_start_then_the_first_answer(given, expected):
    assert expected == best_bidder(given)
