"""One replica's part in moving rows between replicas: what it owns, gives away and gets."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from raybatch_lab.stages.messages import Ask, Award, Bid, Deal, Message, TradeRules, Word
from raybatch_lab.stages.receiving import Receiving
from raybatch_lab.stages.sending import Sending


class Trader:
    """Moves rows between one replica and others, as a deterministic state machine.

    The caller delivers messages and passes times. Every call returns the messages to deliver. The
    caller also copies KV: of the row in `copying`, and then calls `copied` or `withdraw`.

    A row has at most one owner at every moment, even if messages are lost, late, duplicated or out
    of order. The source owns it until the copy is complete. Then it sends the message that makes
    the target the owner, until the target acknowledges it. The epoch of a row counts its changes of
    owner, so that a late duplicate of this message has no effect.

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
        """Return the deal whose row is to be copied now; None if there is none."""
        return self._sending.copying

    @property
    def is_idle(self) -> bool:
        """Return whether no row is moving from or to this replica."""
        return not self._sending.outgoing and not self._receiving.won

    @property
    def num_won(self) -> int:
        """Return the number of rows that this replica has won and not received yet."""
        return len(self._receiving.won)

    def note_load(self, kv_tokens: float, tokens_per_s: float) -> None:
        """Set what later bids contain.

        Args:
            kv_tokens: KV tokens that this replica holds.
            tokens_per_s: tokens per second that it receives, above 0.
        """
        self._load, self._tokens_per_s = kv_tokens, tokens_per_s

    def add(self, row_id: int) -> None:
        """Make this replica the first owner of a row."""
        self._epochs[row_id] = 0

    def offer(
        self, row_id: int, length: int, candidates: Iterable[int], now_s: float
    ) -> list[Message]:
        """Offer a row of `length` tokens to candidate replicas.

        Nothing happens if this replica does not own the row, or already offers it.
        """
        if row_id not in self._epochs or row_id in self._sending.outgoing:
            return []
        return self._sending.offer(row_id, self._epochs[row_id], length, candidates, now_s)

    def copied(self, deal: Deal, now_s: float) -> list[Message]:
        """Make the target the owner of a row whose copy is complete and verified."""
        return self._sending.copied(deal, now_s)

    def withdraw(self, row_id: int, now_s: float) -> list[Message]:
        """Keep a row that was offered: its copy failed, it was preempted, or found no room."""
        return self._sending.withdraw(row_id, now_s)

    def end(self, row_id: int, now_s: float) -> list[Message]:
        """Forget a row that has finished here; nothing happens if this replica doesn't own it."""
        if self._epochs.pop(row_id, None) is None:
            return []
        return self._sending.withdraw(row_id, now_s)

    def lost(self, peer: int, now_s: float) -> list[Message]:
        """End all deals with a dead replica; the rows that it owned are lost."""
        return self._sending.lost(peer, now_s) + self._receiving.lost(peer, now_s)

    def tick(self, now_s: float) -> list[Message]:
        """Send what is due at this time, such as repeated messages; call it regularly."""
        return self._sending.tick(now_s) + self._receiving.tick(now_s)

    def receive(self, message: Message, now_s: float) -> list[Message]:
        """Process a message from another replica; return the answers."""
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
