"""Traders that send each other messages which get lost, doubled, late and out of order."""

import random

from raybatch_lab.stages.messages import Message, TradeRules, Word
from raybatch_lab.stages.trader import Trader

RULES = TradeRules(bid_wait_s=1.0, resend_s=2.0, max_failures=3)


class Network:
    """All messages on their way, and the rows of each trader.

    Args:
        rows: of each replica; a row's length is its id plus one.
    """

    def __init__(self, rows: list[list[int]]) -> None:
        self.traders = [Trader(i, RULES, rows=own) for i, own in enumerate(rows)]
        self.row_ids = sorted(row for own in rows for row in own)
        self.now_s = 0.0
        self.flying: list[Message] = []
        self.given: set = set()  # deals whose row was handed over
        self.taken: set = set()  # deals whose row the target has confirmed
        self.failures: dict = {}
        self.num_messages = 0

    def send(self, messages: list[Message]) -> None:
        self.num_messages += len(messages)
        for message in messages:
            if message.says is Word.GIVEN:
                self.given.add(message.deal)
            if message.says is Word.BUSY:
                self.failures[message.deal] = self.failures.get(message.deal, 0) + 1
        self.flying += messages

    def offer(self, replica: int, row: int) -> None:
        others = [i for i in range(len(self.traders)) if i != replica]
        self.send(self.traders[replica].offer(row, row + 1, others, self.now_s))

    def deliver(self, place: int, *, keeps: bool = False) -> None:
        message = self.flying[place]
        if not keeps:
            del self.flying[place]
        answers = self.traders[message.receiver].receive(message, self.now_s)
        if any(answer.says is Word.TAKEN for answer in answers):
            self.taken.add(message.deal)
        self.send(answers)

    def copied(self, replica: int) -> None:
        trader = self.traders[replica]
        if trader.copying is not None:
            self.send(trader.copied(trader.copying, self.now_s))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        for trader in self.traders:
            self.send(trader.tick(self.now_s))

    def check(self) -> None:
        """Raise AssertionError unless each row has one owner, or is on its way to one."""
        owned = [row for trader in self.traders for row in trader.epochs]
        on_the_way = [deal.row_id for deal in self.given - self.taken]
        assert self.row_ids == sorted(owned + on_the_way)

    def settle(self, max_rounds: int = 400) -> int:
        """Deliver everything, with copies and ticks, until nothing is on its way; the rounds."""
        for number in range(max_rounds):
            while self.flying:
                self.deliver(0)
                self.check()
            for replica in range(len(self.traders)):
                self.copied(replica)
            if not self.flying and all(trader.is_idle for trader in self.traders):
                return number
            self.tick(0.5)
            self.check()
        raise AssertionError(f"rows are on their way after {max_rounds} rounds")


def disturb(network: Network, choices: random.Random, num_events: int) -> None:
    """Let `num_events` things happen, in any order, and check the owners after each."""
    for _ in range(num_events):
        event = choices.choices(
            ("deliver", "lose", "double", "offer", "copied", "fail", "tick"), (12, 2, 2, 4, 4, 1, 2)
        )[0]
        replica = choices.randrange(len(network.traders))
        trader = network.traders[replica]
        if event in ("deliver", "lose", "double"):
            if network.flying:
                place = choices.randrange(len(network.flying))
                if event == "lose":
                    del network.flying[place]
                else:
                    network.deliver(place, keeps=event == "double")
        elif event == "offer" and trader.epochs:
            network.offer(replica, choices.choice(sorted(trader.epochs)))
        elif event == "copied":
            network.copied(replica)
        elif event == "fail" and trader.copying is not None:
            network.send(trader.withdraw(trader.copying.row_id, network.now_s))
        elif event == "tick":
            network.tick(choices.choice((0.1, 1.0, 3.0)))
        network.check()
