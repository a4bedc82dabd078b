"""A few numbers that matter, large."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from raybatch.pictures.svg import drawing, rect, text

_WIDTH, _HEIGHT = 180, 84
# characters of a number that fit a card in large type
_MAX_BIG = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One number.

    Args:
        name: what it counts.
        value: the number, in words.
        is_good: whether it is as it should be; None where that is no question.
    """

    name: str
    value: str
    is_good: bool | None = None


def draw_cards(cards: Sequence[Card], *, label: str) -> str:
    """Draw numbers beside each other, in as many lines as the page needs.

    Args:
        cards: from left to right.
        label: what a screen reader says before them.
    """
    drawn = "".join(_card(card) for card in cards)
    return f'<div class="cards" role="group" aria-label="{escape(label)}">{drawn}</div>'


def _card(card: Card) -> str:
    kind = {None: "big", True: "big good", False: "big bad"}[card.is_good]
    kind += " long" if len(card.value) > _MAX_BIG else ""
    parts = [
        rect(0.5, 0.5, _WIDTH - 1, _HEIGHT - 1, rx=6, class_="card"),
        text(16, 28, card.name, class_="axis"),
        text(16, 64, card.value, class_=kind),
    ]
    return drawing(_WIDTH, _HEIGHT, f"{card.name} {card.value}", parts)
