"""The side that gets rows: bids, queues what it has won, and pulls one row at a time."""

from dataclasses import dataclass

from raybatch_lab.stages.messages import Award, Bid, Deal, Message, TradeRules, Word


@dataclass(kw_only=True, slots=True)
class Incoming:
    """A row that was won; owned by `Receiving`."""

    deal: Deal
    length: int
    source_load: float
    order: int  # of arrival
    num_failures: int = 0
    was_tried: bool = False  # since the last pause


class Receiving:
    """The rows that one replica has won and not got yet, the highest load of a source first.

    It pulls one at a time. A source that sends another row is passed over; after too many such
    failures of one row it is told, and nothing else is pulled until that row comes. Sending never
    waits for receiving, so two replicas that wait for each other's rows both get them.

    Source: CascadeInfer, section 4.4.
    """

    def __init__(self, replica: int, rules: TradeRules) -> None:
        self._replica, self._rules = replica, rules
        self._won: dict[Deal, Incoming] = {}
        self._current: Deal | None = None  # asked for, or on its way
        self._since_s = 0.0  # of the last word to a source
        self._num_awards = 0

    @property
    def won(self) -> dict[Deal, Incoming]:
        """Return the rows won and not got yet; read only."""
        return self._won

    def bid(self, message: Message, load: float, tokens_per_s: float) -> list[Message]:
        """Answer an ask with the load, and with the time that rows won before will take."""
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
        """Wait for a row whose copy has begun, also where another was asked for since."""
        if message.deal in self._won:
            self._current, self._since_s = message.deal, now_s
        return []

    def end(self, deal: Deal, now_s: float) -> list[Message]:
        """Forget a row that has come, or that will not come."""
        self._won.pop(deal, None)
        if deal == self._current:
            self._current = None
        return self._pull_next(now_s)

    def lost(self, peer: int, now_s: float) -> list[Message]:
        """Forget the rows of a replica that is gone."""
        messages: list[Message] = []
        for deal in [deal for deal in self._won if deal.source == peer]:
            messages += self.end(deal, now_s)
        return [message for message in messages if message.receiver != peer]

    def tick(self, now_s: float) -> list[Message]:
        """Ask again where no answer came, and begin again where all sources were busy."""
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
