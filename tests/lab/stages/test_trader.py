"""One trade at a time: what is said, and what follows when something goes wrong."""

from raybatch_lab.stages.messages import Ask, Award, Bid, Deal, Message, Word
from tests.lab.stages.network import RULES, Network


def words(network):
    return [message.says for message in network.flying]


def deliver_all(network):
    while network.flying:
        network.deliver(0)


def test_a_row_goes_to_the_replica_with_the_lower_load():
    network = Network([[0], [], []])
    network.traders[1].note_load(900.0, 10.0)
    network.traders[2].note_load(100.0, 10.0)
    network.offer(0, 0)
    network.settle()
    assert [{}, {}, {0: 1}] == [dict(trader.epochs) for trader in network.traders]


def test_a_trade_is_ask_bid_award_pull_start_given_taken():
    network = Network([[4], []])
    network.offer(0, 4)
    received = []
    while network.flying or network.traders[0].copying:
        if network.flying:
            received.append(network.flying[0].says)
            network.deliver(0)
        else:
            network.copied(0)
    assert [Ask(), Bid(load=0.0, start_s=0.0), Award(length=5, load=5.0)] == received[:3]
    assert [Word.PULL, Word.START, Word.GIVEN, Word.TAKEN] == received[3:]


def test_a_bid_says_how_long_rows_won_before_will_take():
    network = Network([[9], [5], []])
    network.traders[2].note_load(0.0, 2.0)
    for replica, row in ((0, 9), (1, 5)):
        network.send(network.traders[replica].offer(row, row + 1, [2], 0.0))
        for _ in range(3):
            network.deliver(0)
        # what would end the first trade is lost
        network.flying.clear()
    deal = Deal(7, 0, 1, 99)
    ask = Message(deal=deal, sender=1, receiver=2, says=Ask())
    (answer,) = network.traders[2].receive(ask, 0.0)
    assert Bid(load=0.0, start_s=(10 + 6) / 2.0) == answer.says


def test_a_row_without_bids_stays():
    network = Network([[0], []])
    network.offer(0, 0)
    network.flying.clear()
    network.tick(RULES.bid_wait_s)
    assert (True, {0: 0}) == (network.traders[0].is_idle, dict(network.traders[0].epochs))


def test_a_bid_that_is_missing_is_not_waited_for():
    network = Network([[0], [], []])
    network.offer(0, 0)
    del network.flying[0]
    network.deliver(0)
    network.deliver(0)
    assert [] == network.flying
    network.tick(RULES.bid_wait_s)
    assert [Award(length=1, load=1.0)] == words(network)


def test_the_source_owns_a_row_until_its_copy_is_complete():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    assert {0: 0} == network.traders[0].epochs
    network.copied(0)
    assert ({}, {}) == tuple(dict(trader.epochs) for trader in network.traders)
    deliver_all(network)
    assert {0: 1} == network.traders[1].epochs


def test_the_word_that_gives_a_row_is_repeated_until_it_is_acknowledged():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    network.copied(0)
    for _ in range(3):
        network.flying.clear()
        network.tick(RULES.resend_s)
    assert Word.GIVEN in words(network)
    network.settle()
    assert {0: 1} == network.traders[1].epochs


def test_a_late_copy_of_the_word_that_gives_a_row_gives_nothing():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    network.copied(0)
    late = network.flying[0]
    network.settle()
    network.offer(1, 0)
    network.settle()
    assert {0: 2} == network.traders[0].epochs
    network.traders[1].receive(late, network.now_s)
    assert {} == network.traders[1].epochs


def test_a_copy_that_failed_leaves_the_row_with_its_source():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    network.send(network.traders[0].withdraw(0, 0.0))
    deliver_all(network)
    assert {0: 0} == network.traders[0].epochs
    assert network.traders[0].is_idle
    assert network.traders[1].is_idle


def test_a_row_that_was_handed_over_is_not_taken_back():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    network.copied(0)
    assert [] == network.traders[0].withdraw(0, 0.0)


def test_a_row_that_ends_at_its_source_is_not_moved():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    deal = network.traders[0].copying
    network.send(network.traders[0].end(0, 0.0))
    assert [] == network.traders[0].copied(deal, 0.0)
    deliver_all(network)
    assert ({}, True) == (dict(network.traders[1].epochs), network.traders[1].is_idle)


def test_a_busy_source_is_passed_over_for_the_next():
    # 2 has won rows 5 and 6 of 0 and row 1 of 1, and 0 is sending row 5
    network = Network([[5, 6], [1], []])
    for row in (5, 6):
        network.send(network.traders[0].offer(row, 50, [2], 0.0))
        deliver_all(network)
    network.send(network.traders[1].offer(1, 2, [2], 0.0))
    deliver_all(network)
    assert (5, None) == (network.traders[0].copying.row_id, network.traders[1].copying)
    network.copied(0)
    deliver_all(network)
    # the higher load of its source is first
    assert 6 == network.traders[0].copying.row_id


def test_a_starving_row_is_sent_next_and_waited_for():
    # 0 sends to 1 all the time, and 2 wants one of its rows
    network = Network([[*range(9)], [], []])
    trader = network.traders[0]
    for row in range(8):
        network.send(trader.offer(row, 10, [1], 0.0))
        deliver_all(network)
    network.send(trader.offer(8, 10, [2], 0.0))
    deliver_all(network)
    for _ in range(RULES.max_failures):
        network.tick(RULES.resend_s)
        deliver_all(network)
    first = trader.copying.row_id
    network.copied(0)
    deliver_all(network)
    assert (0, 8) == (first, trader.copying.row_id)


def test_two_that_wait_for_each_other_both_get_their_rows():
    network = Network([[*range(4)], [*range(4, 8)]])
    for row in range(8):
        network.offer(row // 4, row)
    network.settle()
    assert [[4, 5, 6, 7], [0, 1, 2, 3]] == [sorted(trader.epochs) for trader in network.traders]


def test_rows_on_their_way_to_a_replica_that_is_gone_stay():
    network = Network([[0], [], []])
    network.send(network.traders[0].offer(0, 1, [1], 0.0))
    deliver_all(network)
    network.send(network.traders[0].lost(1, 0.0))
    assert ({0: 0}, True) == (dict(network.traders[0].epochs), network.traders[0].is_idle)


def test_rows_of_a_replica_that_is_gone_are_not_waited_for():
    network = Network([[0], []])
    network.offer(0, 0)
    deliver_all(network)
    network.traders[1].lost(0, 0.0)
    assert network.traders[1].is_idle


def test_a_bidder_that_is_gone_is_not_waited_for():
    network = Network([[0], [], []])
    network.offer(0, 0)
    network.deliver(0)
    network.deliver(1)
    network.flying.clear()
    network.send(network.traders[0].lost(2, 0.0))
    assert [Award(length=1, load=1.0)] == words(network)


def test_a_row_of_another_replica_cannot_be_offered():
    network = Network([[0], []])
    assert [] == network.traders[1].offer(0, 1, [0], 0.0)


def test_a_row_that_came_from_nowhere_can_be_offered():
    network = Network([[], []])
    network.traders[0].add(3)
    assert 1 == len(network.traders[0].offer(3, 10, [1], 0.0))


def withdrawn_then_offered_again():
    """Return a network in which row 0 was to go to replica 1, and is asked about once more."""
    network = Network([[0], [], []])
    network.send(network.traders[0].offer(0, 1, [1], 0.0))
    deliver_all(network)
    deal = network.traders[0].copying
    network.send(network.traders[0].withdraw(0, 0.0))
    network.flying.clear()
    network.send(network.traders[0].offer(0, 1, [1, 2], 0.0))
    network.flying.clear()
    return network, deal


def test_a_late_pull_of_an_earlier_attempt_is_told_so():
    network, deal = withdrawn_then_offered_again()
    pull = Message(deal=deal, sender=1, receiver=0, says=Word.PULL)
    network.send(network.traders[0].receive(pull, 0.0))
    assert [Word.WITHDRAWN] == words(network)


def test_a_late_bid_of_an_earlier_attempt_does_not_count():
    network, deal = withdrawn_then_offered_again()
    bid = Message(deal=deal, sender=1, receiver=0, says=Bid(load=0.0, start_s=0.0))
    network.traders[0].receive(bid, 0.0)
    network.send(network.traders[0].tick(RULES.bid_wait_s))
    assert [] == words(network)


def test_a_late_award_of_a_row_that_came_is_not_answered():
    network = Network([[0], []])
    network.offer(0, 0)
    network.deliver(0)
    network.deliver(0)
    award = network.flying[0]
    network.settle()
    assert [] == network.traders[1].receive(award, network.now_s)


def test_rows_of_the_source_with_the_highest_load_come_first():
    network = Network([[0], [1], [2], []])
    trader = network.traders[3]

    def award(source, load):
        deal = Deal(source, 0, source, 1)
        says = Award(length=1, load=load)
        return trader.receive(Message(deal=deal, sender=source, receiver=3, says=says), 0.0)

    (pull,) = award(0, 5.0)
    assert [] == award(1, 10.0) + award(2, 99.0)
    gone = Message(deal=pull.deal, sender=0, receiver=3, says=Word.WITHDRAWN)
    assert [2] == [message.receiver for message in trader.receive(gone, 0.0)]
