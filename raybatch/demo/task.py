"""The demo task: documents of plain facts and questions that ask about one fact each.

Nothing here touches files, Arrow or models; all randomness comes from the caller's generator.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from raybatch.demo import words
from raybatch.demo.phrases import KINDS, NOT_STATED, Kind

Card = TypeVar("Card")

# the prompt: content of the only user message; the document comes first, as a shared prefix
PROMPT = "{document}\n\nQuestion: {question}"

KIND_BY_NAME = {kind.name: kind for kind in KINDS}

_KEY_WORDS = {
    "object": words.OBJECTS,
    "building": words.BUILDINGS,
    "event": words.EVENTS,
    "dish": words.DISHES,
    "lock": words.LOCKS,
    "fixture": words.FIXTURES,
}
_MISSING_FRACTION = 0.1
_MAX_FACTS = 60
# each fact of a single kind needs a key of its own
_MAX_FACTS_OF_FEW_KINDS = min(len(entries) for entries in _KEY_WORDS.values())


@dataclass(frozen=True, slots=True)
class Fact:
    """One relation of a document: for `kind` and `key` the answer is `answer`, word for word."""

    kind: str
    key: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the facts it states, in the order of its sentences."""

    text: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one document; `kind` is the kind of fact, or "missing" when not stated."""

    text: str
    answer: str
    kind: str


class _Deck:
    """Deals the words of each list without repeats until the list is used up."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._piles: dict[Sequence[object], list[object]] = {}

    def deal(self, cards: Sequence[Card]) -> Card:
        pile = self._piles.get(cards)
        if not pile:
            pile = self._piles[cards] = self._rng.sample(cards, len(cards))
        return pile.pop()  # type: ignore[return-value]


def make_document(rng: random.Random, num_facts: int, *, kinds: Sequence[Kind] = KINDS) -> Document:
    """Write a document that states `num_facts` unambiguous facts, one a sentence.

    Args:
        rng: Source of all choices.
        num_facts: Number of sentences, 1 to 60, or to 16 where not all kinds are asked for; 18 to
            32 give about 150 to 320 tokens.
        kinds: Kinds of facts to draw from; fewer kinds mean more facts that differ in the key only.

    Returns:
        The document; no two of its facts share kind and key.

    Raises:
        ValueError: `num_facts` is out of its range.
    """
    limit = _MAX_FACTS if len(kinds) == len(KINDS) else _MAX_FACTS_OF_FEW_KINDS
    if not 1 <= num_facts <= limit:
        raise ValueError(f"num_facts={num_facts} is not in 1..{limit} for {len(kinds)} kinds")
    deck = _Deck(rng)
    keys = _deal_keys(deck, num_facts, len(kinds))
    candidates = [(kind, key) for kind in kinds for key in keys[kind.role]]
    facts, sentences = [], []
    for kind, key in rng.sample(candidates, num_facts):
        value = _make_value(kind.name, deck, rng, keys["person"])
        facts.append(Fact(kind.name, key, value))
        sentences.append(rng.choice(kind.statements).format(key=key, value=value))
    return Document(" ".join(sentences), tuple(facts))


def make_questions(document: Document, rng: random.Random, count: int) -> tuple[Question, ...]:
    """Ask `count` questions about a document; about one in ten has the answer "not stated".

    Every fact is asked once before one is asked again; phrasings are drawn at random, so repeated
    questions are possible when `count` exceeds the number of facts.

    Args:
        document: The document to ask about.
        rng: Source of all choices.
        count: Number of questions.
    """
    deck = _Deck(rng)
    questions = []
    for _ in range(count):
        is_missing = rng.random() < _MISSING_FRACTION
        fact = _missing_fact(document, rng) if is_missing else deck.deal(document.facts)
        text = rng.choice(KIND_BY_NAME[fact.kind].questions).format(key=fact.key)
        questions.append(Question(text, fact.answer, "missing" if is_missing else fact.kind))
    return tuple(questions)


def _deal_keys(deck: _Deck, num_facts: int, num_kinds: int) -> dict[str, list[str]]:
    """Choose the entities of a document: few enough that most have several facts."""
    is_full = num_kinds == len(KINDS)
    num_shared = 2 + num_facts // 5 if is_full else num_facts
    num_single = 1 + num_facts // 8 if is_full else num_facts
    return {
        "person": [_make_person(deck) for _ in range(num_shared)],
        "object": [deck.deal(words.OBJECTS) for _ in range(num_shared)],
        "farm": [_make_place(deck) for _ in range(num_single)],
    } | {
        role: [deck.deal(_KEY_WORDS[role]) for _ in range(num_single)]
        for role in ("building", "event", "dish", "lock", "fixture")
    }


def _make_person(deck: _Deck) -> str:
    return f"{deck.deal(words.FIRST_NAMES)} {deck.deal(words.LAST_NAMES)}"


def _make_place(deck: _Deck) -> str:
    return f"{deck.deal(words.PLACE_FIRST)} {deck.deal(words.PLACE_SECOND)}"


def _missing_fact(document: Document, rng: random.Random) -> Fact:
    """Make a fact the document does not state, half the time about a key that it mentions."""
    stated = {(fact.kind, fact.key) for fact in document.facts}
    while True:
        kind = rng.choice(KINDS)
        keys = [f.key for f in document.facts if KIND_BY_NAME[f.kind].role == kind.role]
        is_known = bool(keys) and rng.random() < 0.5
        key = rng.choice(keys) if is_known else _make_key(kind.role, rng)
        if (kind.name, key) not in stated and (is_known or key not in document.text):
            return Fact(kind.name, key, NOT_STATED)


def _make_key(role: str, rng: random.Random) -> str:
    deck = _Deck(rng)
    if role == "person":
        return _make_person(deck)
    if role == "farm":
        return _make_place(deck)
    return rng.choice(_KEY_WORDS[role])


def _make_value(kind: str, deck: _Deck, rng: random.Random, people: list[str]) -> str:
    deal = deck.deal
    match kind:
        case "job":
            return deal(words.JOBS)
        case "home":
            return _make_place(deck)
        case "birthday":
            return deal(words.MONTHS)
        case "food":
            return deal(words.FOODS)
        case "owner":
            return rng.choice(people)
        case "price":
            return f"{deal(range(30, 100))} coins"
        case "colour":
            return deal(words.COLOURS)
        case "storage":
            return f"{deal(words.CONTAINERS)} {deal(range(30, 100))}"
        case "animals":
            return _make_list([deal(words.ANIMALS) for _ in range(rng.randint(2, 4))])
        case "opening":
            return f"{deal(range(6, 22))}:00"
        case "weekday":
            return deal(words.WEEKDAYS)
        case "ingredients":
            return _make_list([deal(words.INGREDIENTS) for _ in range(rng.randint(2, 4))])
        case "code":
            return f"{deal(words.NOTE_ADJECTIVES)} {deal(range(30, 100))}"
        case "note":
            return _make_note(deck, rng)
    raise AssertionError(f"kind {kind!r} has no values")


def _make_list(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _make_note(deck: _Deck, rng: random.Random) -> str:
    clauses = [_make_clause(deck) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4)))]
    note = " then ".join(clauses)
    return note[0].upper() + note[1:]


def _make_clause(deck: _Deck) -> str:
    parts = (words.NOTE_VERBS, words.NOTE_ADJECTIVES, words.NOTE_NOUNS, words.NOTE_TAILS)
    verb, adjective, noun, tail = (deck.deal(part) for part in parts)
    return f"{verb} {adjective} {noun} {tail}"
