"""A few numbers that matter, large."""

from collections.abc import Sequence
from dataclasses import dataclass

from raybatch.pictures.svg import drawing, rect, text

__all__ = ["Card", "draw_cards"]

_WIDTH, _HEIGHT, _GAP = 960, 84, 14
# characters of a number that fit a card in large type where there are five of them
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
    """Draw numbers beside each other."""
    width = (_WIDTH - _GAP * (len(cards) - 1)) / max(1, len(cards))
    parts = []
    for i, card in enumerate(cards):
        x = i * (width + _GAP)
        kind = {None: "big", True: "big good", False: "big bad"}[card.is_good]
        kind += " long" if len(card.value) > _MAX_BIG else ""
        parts.append(rect(x + 0.5, 0.5, width - 1, _HEIGHT - 1, rx=6, class_="card"))
        parts.append(text(x + 16, 28, card.name, class_="axis"))
        parts.append(text(x + 16, 64, card.value, class_=kind))
    said = ", ".join(f"{card.name} {card.value}" for card in cards)
    return drawing(_WIDTH, _HEIGHT, f"{label}: {said}", parts)
