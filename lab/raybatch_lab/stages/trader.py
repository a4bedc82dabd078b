"""One replica's part in moving rows between replicas: what it owns, gives away and gets."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from raybatch_lab.stages.messages import Ask, Award, Bid, Deal, Message, TradeRules, Word
from raybatch_lab.stages.receiving import Receiving
from raybatch_lab.stages.sending import Sending


class Trader:
    """A state machine over messages and times that are given to it; same input, same output.

    A row has one owner at every moment, whatever is lost, late, doubled or out of order. Its source
    owns it until the copy is complete, and gives it up with the one message that makes the target
    its owner, repeated until that is acknowledged. Changes of owner are counted in the row's epoch,
    so that a late copy of that message gives nothing twice.

    Every call returns the messages to be delivered. KV is copied by others: `copying` says what,
    `copied` or `withdraw` says how it went.

    Source: CascadeInfer, section 4.4.
    """

    def __init__(self, replica: int, rules: TradeRules, *, rows: Iterable[int] = ()) -> None:
        self._epochs = dict.fromkeys(rows, 0)
        # of every row that ever came, as a message about it may be any time late
        self._seen: dict[int, int] = {}
        self._load, self._tokens_per_s = 0.0, 1.0
        self._sending = Sending(replica, rules, self._epochs.pop)
        self._receiving = Receiving(replica, rules)
        self._replica = replica

    @property
    def epochs(self) -> Mapping[int, int]:
        """Return the epoch of each row that this replica owns and may run."""
        return MappingProxyType(self._epochs)

    @property
    def copying(self) -> Deal | None:
        """Return the deal whose row is to be copied; None where none is."""
        return self._sending.copying

    @property
    def is_idle(self) -> bool:
        """Return whether no row is on its way from here or to here."""
        return not self._sending.outgoing and not self._receiving.won

    @property
    def num_won(self) -> int:
        """Return how many rows are to come here."""
        return len(self._receiving.won)

    def note_load(self, kv_tokens: float, tokens_per_s: float) -> None:
        """Note what bids will say: KV tokens held, and how fast rows come in, above 0."""
        self._load, self._tokens_per_s = kv_tokens, tokens_per_s

    def add(self, row_id: int) -> None:
        """Own a row that no replica had before."""
        self._epochs[row_id] = 0

    def offer(
        self, row_id: int, length: int, candidates: Iterable[int], now_s: float
    ) -> list[Message]:
        """Look for another replica for a row; nothing happens if it isn't owned or is offered."""
        if row_id not in self._epochs or row_id in self._sending.outgoing:
            return []
        return self._sending.offer(row_id, self._epochs[row_id], length, candidates, now_s)

    def copied(self, deal: Deal, now_s: float) -> list[Message]:
        """Give a row to its target, whose copy is complete and verified."""
        return self._sending.copied(deal, now_s)

    def withdraw(self, row_id: int, now_s: float) -> list[Message]:
        """Keep a row: its copy failed, it was preempted, or the target has no room."""
        return self._sending.withdraw(row_id, now_s)

    def end(self, row_id: int, now_s: float) -> list[Message]:
        """Forget a row that has ended here; nothing happens if this replica doesn't own it."""
        if self._epochs.pop(row_id, None) is None:
            return []
        return self._sending.withdraw(row_id, now_s)

    def lost(self, peer: int, now_s: float) -> list[Message]:
        """End all deals with a replica that is gone; what it owned is lost with it."""
        return self._sending.lost(peer, now_s) + self._receiving.lost(peer, now_s)

    def tick(self, now_s: float) -> list[Message]:
        """Do what is due at this time; to be called every so often."""
        return self._sending.tick(now_s) + self._receiving.tick(now_s)

    def receive(self, message: Message, now_s: float) -> list[Message]:
        """Answer a message."""
        match message.says:
            case Ask():
                return self._receiving.bid(message, self._load, self._tokens_per_s)
            case Bid() as bid:
                return self._sending.on_bid(message, bid, now_s)
            case Award() as award:
                if self._has_taken(message.deal):
                    return []
                return self._receiving.on_award(message, award, now_s)
            case Word() as word:
                return self._hear(message, word, now_s)

    def _hear(self, message: Message, word: Word, now_s: float) -> list[Message]:
        match word:
            case Word.PULL | Word.STARVING:
                is_starving = word is Word.STARVING
                return self._sending.on_pull(message, now_s, is_starving=is_starving)
            case Word.BUSY:
                return self._receiving.on_busy(message, now_s)
            case Word.START:
                return self._receiving.on_start(message, now_s)
            case Word.GIVEN:
                return self._take(message, now_s)
            case Word.TAKEN:
                return self._sending.on_taken(message, now_s)
            case Word.WITHDRAWN:
                return self._receiving.end(message.deal, now_s)

    def _take(self, message: Message, now_s: float) -> list[Message]:
        deal = message.deal
        if not self._has_taken(deal):
            self._epochs[deal.row_id] = self._seen[deal.row_id] = deal.epoch + 1
        taken = Message(deal=deal, sender=self._replica, receiver=message.sender, says=Word.TAKEN)
        return [taken, *self._receiving.end(deal, now_s)]

    def _has_taken(self, deal: Deal) -> bool:
        return self._seen.get(deal.row_id, 0) > deal.epoch
