"""The side that gives rows away: asks, awards, and sends one row at a time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from raybatch_lab.stages.messages import Ask, Award, Bid, Deal, Message, TradeRules, Word

# of those with a low load, bidders that may begin soonest
_MAX_EARLIEST = 3


class Phase(Enum):
    """Progress of a row that is given away; its source owns it until SENDING ends."""

    ASKING = "asking"
    AWARDED = "awarded"
    SENDING = "sending"
    GIVEN = "given"


@dataclass(kw_only=True, slots=True)
class Outgoing:
    """A row that a replica is giving away; owned by `Sending`."""

    deal: Deal
    length: int
    candidates: set[int]
    since_s: float  # of the phase, or of the last message sent in it
    phase: Phase = Phase.ASKING
    bids: dict[int, Bid] = field(default_factory=dict)  # in order of arrival
    target: int | None = None


class Sending:
    """Gives rows of one replica to others: `offer` a row; it copies one at a time.

    Args:
        hand_over: called with the id of a row when this replica stops being its owner.
    """

    def __init__(self, replica: int, rules: TradeRules, hand_over: Callable[[int], object]) -> None:
        self._replica, self._rules, self._hand_over = replica, rules, hand_over
        self._outgoing: dict[int, Outgoing] = {}
        self._urgent: list[int] = []
        self._sent: int | None = None  # the row that is being sent, until its target has it
        self._num_attempts = 0

    @property
    def outgoing(self) -> dict[int, Outgoing]:
        """Return the rows that are being given away, by id; read only."""
        return self._outgoing

    @property
    def copying(self) -> Deal | None:
        """Return the deal whose row is to be copied now; None if there is none."""
        row = None if self._sent is None else self._outgoing[self._sent]
        return row.deal if row is not None and row.phase is Phase.SENDING else None

    @property
    def load(self) -> float:
        """Return the total tokens of all rows that are being given away."""
        return float(sum(row.length for row in self._outgoing.values()))

    def offer(
        self, row_id: int, epoch: int, length: int, candidates: Iterable[int], now_s: float
    ) -> list[Message]:
        """Ask candidates for bids for a row of `length` tokens, which must not be offered yet.

        `candidates` are replica ids, and `epoch` is that of the row, see `Deal`.
        """
        assert row_id not in self._outgoing, f"row {row_id} is offered twice"
        self._num_attempts += 1
        deal = Deal(row_id, epoch, self._replica, self._num_attempts)
        row = Outgoing(deal=deal, length=length, candidates=set(candidates), since_s=now_s)
        if not row.candidates:
            return []
        self._outgoing[row_id] = row
        return [self._to(candidate, deal, Ask()) for candidate in sorted(row.candidates)]

    def on_bid(self, message: Message, bid: Bid, now_s: float) -> list[Message]:
        row = self._find(message.deal)
        if row is None or row.phase is not Phase.ASKING or message.sender not in row.candidates:
            return []
        row.bids.setdefault(message.sender, bid)
        return self._award(row, now_s) if len(row.bids) == len(row.candidates) else []

    def on_pull(self, message: Message, now_s: float, *, is_starving: bool) -> list[Message]:
        """Answer a target that pulls its row: begin the copy, or say why not."""
        row = self._find(message.deal)
        if row is None:
            return [self._to(message.sender, message.deal, Word.WITHDRAWN)]
        if row.phase is not Phase.AWARDED:
            word = Word.START if row.phase is Phase.SENDING else Word.GIVEN
            return [self._to(message.sender, message.deal, word)]
        if self._sent is None:
            return self._start(row, now_s)
        row_id = row.deal.row_id
        if not is_starving:
            return [self._to(message.sender, message.deal, Word.BUSY)]
        if row_id not in self._urgent:
            self._urgent.append(row_id)
        return []

    def on_taken(self, message: Message, now_s: float) -> list[Message]:
        row = self._find(message.deal)
        if row is None or row.phase is not Phase.GIVEN:
            return []
        return self._forget(row, now_s)

    def copied(self, deal: Deal, now_s: float) -> list[Message]:
        """Make the target the owner of a row whose copy is complete."""
        row = self._find(deal)
        if row is None or row.phase is not Phase.SENDING:
            # withdrawn while it was copied
            return []
        assert row.target is not None, f"row {deal.row_id} has no target"
        row.phase, row.since_s = Phase.GIVEN, now_s
        self._hand_over(deal.row_id)
        return [self._to(row.target, deal, Word.GIVEN)]

    def withdraw(self, row_id: int, now_s: float) -> list[Message]:
        """Cancel giving a row away, unless the target owns it already."""
        row = self._outgoing.get(row_id)
        if row is None or row.phase is Phase.GIVEN:
            return []
        messages = [] if row.target is None else [self._to(row.target, row.deal, Word.WITHDRAWN)]
        return messages + self._forget(row, now_s)

    def lost(self, peer: int, now_s: float) -> list[Message]:
        """Keep rows whose target is a dead replica; rows that it owned already are lost."""
        messages: list[Message] = []
        for row in list(self._outgoing.values()):
            if row.target == peer:
                messages += self._forget(row, now_s)
            elif row.phase is Phase.ASKING and peer in row.candidates:
                row.candidates.discard(peer)
                row.bids.pop(peer, None)
                if len(row.bids) == len(row.candidates):
                    messages += self._award(row, now_s)
        return messages

    def tick(self, now_s: float) -> list[Message]:
        """Choose among bids once the wait is over, and repeat messages that were not answered."""
        messages: list[Message] = []
        for row in list(self._outgoing.values()):
            waited_s = now_s - row.since_s
            if row.phase is Phase.ASKING:
                if waited_s >= self._rules.bid_wait_s:
                    messages += self._award(row, now_s)
            elif waited_s >= self._rules.resend_s:
                messages += self._again(row, now_s)
        return messages

    def _again(self, row: Outgoing, now_s: float) -> list[Message]:
        # the target requests a copy again
        if row.target is None or row.phase is Phase.SENDING:
            return []
        row.since_s = now_s
        if row.phase is Phase.GIVEN:
            return [self._to(row.target, row.deal, Word.GIVEN)]
        return [self._to(row.target, row.deal, Award(length=row.length, load=self.load))]

    def _award(self, row: Outgoing, now_s: float) -> list[Message]:
        """Give the row to the best bidder; without bids it stays where it is."""
        if not row.bids:
            return self._forget(row, now_s)
        row.target = best_bidder(row.bids)
        row.phase, row.since_s = Phase.AWARDED, now_s
        return [self._to(row.target, row.deal, Award(length=row.length, load=self.load))]

    def _start(self, row: Outgoing, now_s: float) -> list[Message]:
        assert row.target is not None, f"row {row.deal.row_id} has no target"
        row.phase, row.since_s = Phase.SENDING, now_s
        self._sent = row.deal.row_id
        return [self._to(row.target, row.deal, Word.START)]

    def _forget(self, row: Outgoing, now_s: float) -> list[Message]:
        """End a deal; if it was the one being sent, the longest starving row is next."""
        row_id = row.deal.row_id
        del self._outgoing[row_id]
        if row_id in self._urgent:
            self._urgent.remove(row_id)
        if self._sent != row_id:
            return []
        self._sent = None
        return self._start(self._outgoing[self._urgent.pop(0)], now_s) if self._urgent else []

    def _find(self, deal: Deal) -> Outgoing | None:
        row = self._outgoing.get(deal.row_id)
        return row if row is not None and row.deal == deal else None

    def _to(self, receiver: int, deal: Deal, says: Ask | Award | Word) -> Message:
        return Message(deal=deal, sender=self._replica, receiver=receiver, says=says)


def best_bidder(bids: Mapping[int, Bid]) -> int:
    """Return the bidder that gets the row.

    Of the half of bidders with the lower load, rounded up, it considers the three with the
    earliest start, and returns the one that answered first. Earlier answers win ties.

    Args:
        bids: bids by replica id, in order of arrival; at least one.

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
