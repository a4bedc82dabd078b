"""Rows that change hands while messages are lost, doubled, late and out of order."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.stages.network import RULES, Network, disturb
from tests.tiers import examples

SEEDS = st.integers(0, 2**32)


@given(seed=SEEDS, num_replicas=st.integers(2, 5), rows_each=st.integers(0, 4))
@settings(max_examples=examples(60, full=3000))
def test_a_row_has_one_owner_whatever_happens_to_messages(seed, num_replicas, rows_each):
    rows = [list(range(i * rows_each, (i + 1) * rows_each)) for i in range(num_replicas)]
    disturb(Network(rows), random.Random(seed), 300)


@given(seed=SEEDS, num_replicas=st.integers(2, 5))
@settings(max_examples=examples(40, full=2000))
def test_all_deals_end_once_messages_arrive_again(seed, num_replicas):
    network = Network([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(num_replicas)])
    disturb(network, random.Random(seed), 200)
    network.settle()
    owned = [row for trader in network.traders for row in trader.epochs]
    assert network.row_ids == sorted(owned)


@given(seed=SEEDS)
@settings(max_examples=examples(40, full=2000))
def test_a_row_fails_a_bounded_number_of_times(seed):
    # all rows of three go to the fourth at once, which is sent one after the other
    choices = random.Random(seed)
    network = Network([[*range(6)], [*range(6, 12)], [*range(12, 18)], []])
    for replica in (0, 1, 2):
        for row in sorted(network.traders[replica].epochs):
            others = [3, (replica + 1) % 3]
            trader = network.traders[replica]
            network.send(trader.offer(row, row + 1, others, network.now_s))
    for _ in range(200):
        # a replica that gets a request answers before the next request
        while network.flying:
            network.deliver(choices.randrange(len(network.flying)))
        if choices.random() < 0.3:
            network.copied(choices.randrange(4))
        else:
            network.tick(choices.choice((0.1, 2.5)))
    network.settle()
    assert 0 < max(network.failures.values()) <= RULES.max_failures + 1


@given(seed=SEEDS)
@settings(max_examples=examples(20, full=500))
def test_messages_are_in_proportion_to_rows_and_peers(seed):
    choices = random.Random(seed)
    num_replicas, num_rows = choices.randrange(2, 7), choices.randrange(1, 9)
    network = Network([[*range(num_rows)], *([] for _ in range(num_replicas - 1))])
    for row in range(num_rows):
        network.offer(0, row)
    network.settle()
    # ask and bid with each peer; award, pull, busy or start, given and taken, some of them again
    assert network.num_messages <= num_rows * (2 * (num_replicas - 1) + 14)
