"""What replicas tell each other while a row looks for another one: plain values, no machinery."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Deal(NamedTuple):
    """One attempt to give a row away; no other attempt has the same.

    Args:
        epoch: how often the row has changed its owner before.
        attempt: ascending at the source.
    """

    row_id: int
    epoch: int
    source: int
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """From the source to each candidate: who takes this row?"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bid:
    """From a candidate to the source."""

    load: float  # KV tokens that it holds
    start_s: float  # seconds until it could begin to receive the row


@dataclass(frozen=True, kw_only=True, slots=True)
class Award:
    """From the source to the candidate that it chose."""

    length: int  # tokens of the row
    load: float  # tokens of all rows that the source wants to give away


class Word(Enum):
    """What needs nothing but the name of its deal."""

    PULL = "pull"  # from the target: send it
    BUSY = "busy"  # from the source: it sends another
    STARVING = "starving"  # from the target: send it next
    START = "start"  # from the source: the copy begins
    GIVEN = "given"  # from the source: all is there, the row is the target's
    TAKEN = "taken"  # from the target: it has the row
    WITHDRAWN = "withdrawn"  # from the source: nothing comes of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message between two replicas; it may be lost, late, doubled, or pass others."""

    deal: Deal
    sender: int
    receiver: int
    says: Ask | Bid | Award | Word


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeRules:
    """Patience of both sides.

    Args:
        bid_wait_s: for bids, from the first ask on.
        resend_s: until an answer counts as lost.
        max_failures: attempts to pull a row, all in vain, after which its source is told.
    """

    bid_wait_s: float = 0.05
    resend_s: float = 0.5
    max_failures: int = 3
