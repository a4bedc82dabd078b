"""The receiving side: bids for rows, queues those that it won, and pulls one row at a time."""

from dataclasses import dataclass

from raybatch_lab.stages.messages import Award, Bid, Deal, Message, TradeRules, Word


@dataclass(kw_only=True, slots=True)
class Incoming:
    """A row that a replica has won and not received yet; owned by `Receiving`."""

    deal: Deal
    length: int
    source_load: float
    order: int  # of arrival
    num_failures: int = 0
    was_tried: bool = False  # since the last pause


class Receiving:
    """Receives the rows that one replica has won, those of the source with the highest load first.

    It pulls one row at a time. While a source is busy sending another row, rows of other sources
    come first. After too many such failures a row is starving: its source sends it next, and this
    replica pulls no other row until it has come. Sending never waits for receiving, so there is no
    deadlock.

    Source: CascadeInfer, section 4.4.
    """

    def __init__(self, replica: int, rules: TradeRules) -> None:
        self._replica, self._rules = replica, rules
        self._won: dict[Deal, Incoming] = {}
        self._current: Deal | None = None  # asked for, or on its way
        self._since_s = 0.0  # of the last message to a source
        self._num_awards = 0

    @property
    def won(self) -> dict[Deal, Incoming]:
        """Return the rows won and not received yet, by deal; read only."""
        return self._won

    def bid(self, message: Message, load: float, tokens_per_s: float) -> list[Message]:
        """Answer an `Ask` with a bid: the load, and the seconds until earlier rows have come."""
        queued = sum(row.length for row in self._won.values())
        bid = Bid(load=load, start_s=queued / tokens_per_s)
        return [self._to(message.deal, bid)]

    def on_award(self, message: Message, award: Award, now_s: float) -> list[Message]:
        if message.deal not in self._won:
            self._num_awards += 1
            self._won[message.deal] = Incoming(
                deal=message.deal,
                length=award.length,
                source_load=award.load,
                order=self._num_awards,
            )
        return self._pull_next(now_s)

    def on_busy(self, message: Message, now_s: float) -> list[Message]:
        row = self._won.get(message.deal)
        if row is None or message.deal != self._current or self._is_starving(row):
            return []
        row.num_failures += 1
        if self._is_starving(row):
            return self._ask_for(row, now_s)
        row.was_tried, self._current = True, None
        return self._pull_next(now_s)

    def on_start(self, message: Message, now_s: float) -> list[Message]:
        """Wait for the row whose copy has begun, even if another one was pulled since."""
        if message.deal in self._won:
            self._current, self._since_s = message.deal, now_s
        return []

    def end(self, deal: Deal, now_s: float) -> list[Message]:
        """Forget a row that has arrived or was withdrawn, and pull the next one."""
        self._won.pop(deal, None)
        if deal == self._current:
            self._current = None
        return self._pull_next(now_s)

    def lost(self, peer: int, now_s: float) -> list[Message]:
        """Forget the rows won from a dead replica, and pull the next one."""
        messages: list[Message] = []
        for deal in [deal for deal in self._won if deal.source == peer]:
            messages += self.end(deal, now_s)
        return [message for message in messages if message.receiver != peer]

    def tick(self, now_s: float) -> list[Message]:
        """Repeat a pull that got no answer, or retry all rows if all sources were busy."""
        if now_s - self._since_s < self._rules.resend_s:
            return []
        if self._current is not None:
            return self._ask_for(self._won[self._current], now_s)
        for row in self._won.values():
            row.was_tried = False
        return self._pull_next(now_s)

    def _pull_next(self, now_s: float) -> list[Message]:
        rows = [row for row in self._won.values() if not row.was_tried]
        if self._current is not None or not rows:
            return []
        return self._ask_for(min(rows, key=self._rank), now_s)

    def _rank(self, row: Incoming) -> tuple[bool, float, int]:
        return not self._is_starving(row), -row.source_load, row.order

    def _is_starving(self, row: Incoming) -> bool:
        return row.num_failures > self._rules.max_failures

    def _ask_for(self, row: Incoming, now_s: float) -> list[Message]:
        self._current, self._since_s = row.deal, now_s
        return [self._to(row.deal, Word.STARVING if self._is_starving(row) else Word.PULL)]

    def _to(self, deal: Deal, says: Bid | Word) -> Message:
        return Message(deal=deal, sender=self._replica, receiver=deal.source, says=says)
