"""What replicas tell each other while a row looks for another one: plain values, no machinery."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Deal(NamedTuple):
    """Identifies one attempt of a replica to give a row to another one.

    Args:
        epoch: how often the row has changed its owner before.
        source: replica that gives the row.
        attempt: number of the attempt, ascending at the source.
    """

    row_id: int
    epoch: int
    source: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """The source asks a candidate for a bid for the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bid:
    """The answer of a candidate to an `Ask`."""

    load: float  # KV tokens that it holds
    start_s: float  # seconds until it could begin to receive the row


@dataclass(frozen=True, kw_only=True, slots=True)
class Award:
    """The source tells the candidate that it chose to pull the row."""

    length: int  # tokens of the row
    load: float  # tokens of all rows that the source wants to give away


class Word(Enum):
    """Messages about a deal that carry no further data."""

    PULL = "pull"  # from the target: send it
    BUSY = "busy"  # from the source: it sends another
    STARVING = "starving"  # from the target: send it next
    START = "start"  # from the source: the copy begins
    GIVEN = "given"  # from the source: all is there, the row is the target's
    TAKEN = "taken"  # from the target: it has the row
    WITHDRAWN = "withdrawn"  # from the source: nothing comes of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message between two replicas; it may be lost, late or duplicated, or overtake others."""

    deal: Deal
    sender: int
    receiver: int
    says: Ask | Bid | Award | Word


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeRules:
    """Timeouts of the messages by which rows move.

    Args:
        bid_wait_s: seconds that a source waits for bids before it chooses among them.
        resend_s: seconds without an answer after which a message is sent again.
        max_failures: a row whose source was busy at more pulls than this is pulled as starving,
            so that its source sends it next.
    """

    bid_wait_s: float = 0.05
    resend_s: float = 0.5
    max_failures: int = 3
