"""The demo task: documents of plain facts and questions that ask about one fact each.

Its words and phrases are in `task.yaml`. This module does not use Arrow or models; all randomness
comes from the caller's generator.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

Card = TypeVar("Card")

# the prompt: content of the only user message; the document comes first, as a shared prefix
PROMPT = "{document}\n\nQuestion: {question}"
NOT_STATED = "not stated"


@dataclass(frozen=True, slots=True, kw_only=True)
class FactKind:
    """One relation between a key and a value.

    Kinds of one role share their keys within a document. Templates have the fields `{key}` and
    `{value}`; `value` names the lists that it is drawn from; "" if `_make_value` makes it.
    """

    name: str
    role: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value: str = ""


_DATA = yaml.safe_load(Path(__file__).with_name("task.yaml").read_text("utf-8"))
WORDS: dict[str, tuple[str, ...]] = {
    name: tuple(entries.split() if isinstance(entries, str) else entries)
    for name, entries in _DATA["words"].items()
}
KINDS = tuple(
    FactKind(**kind | {name: tuple(kind[name]) for name in ("statements", "questions")})
    for kind in _DATA["kinds"]
)
KIND_BY_NAME = {kind.name: kind for kind in KINDS}

_ROLES: dict[str, str] = _DATA["roles"]
# words of the roles whose keys are single words
_KEY_WORDS = {
    role: WORDS[template.strip("{}")] for role, template in _ROLES.items() if " " not in template
}
_NUMBERS = {
    "numbers": tuple(str(number) for number in range(30, 100)),
    "hours": tuple(str(hour) for hour in range(6, 22)),
}
_CLAUSE = "{note_verbs} {note_adjectives} {note_nouns} {note_tails}"
_MISSING_FRACTION = 0.1
_MAX_FACTS = 60
# facts of one kind need distinct keys
_MAX_FACTS_OF_FEW_KINDS = min(len(entries) for entries in _KEY_WORDS.values())


class Fact(NamedTuple):
    """One relation of a document: for `kind` and `key` the answer is `answer`, word for word."""

    kind: str
    key: str
    answer: str


class Document(NamedTuple):
    """A text and the facts it states, in the order of its sentences."""

    text: str
    facts: tuple[Fact, ...]


class Question(NamedTuple):
    """A question about one document; `kind` is the kind of fact, or "missing" if not stated."""

    text: str
    answer: str
    kind: str


class _Deck:
    """Deals the words of each list without repeats until the list is used up."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._piles: dict[Sequence[object], list[object]] = {}

    def __getitem__(self, name: str) -> str:
        return self.deal(WORDS.get(name) or _NUMBERS[name])

    def deal(self, cards: Sequence[Card]) -> Card:
        if not self._piles.get(cards):
            self._piles[cards] = self._rng.sample(cards, len(cards))
        return self._piles[cards].pop()  # type: ignore[return-value]

    def fill(self, template: str) -> str:
        """Return a text whose fields, names of lists, are dealt from left to right."""
        return template.format_map(self)


def make_document(
    rng: random.Random, num_facts: int, *, kinds: Sequence[FactKind] = KINDS
) -> Document:
    """Write a document that states `num_facts` unambiguous facts, one a sentence.

    No two of its facts share kind and key. 18 to 32 facts give about 150 to 320 tokens. A document
    has at most 60 facts, or 16 with a selection of kinds. Fewer kinds mean more facts that differ
    in the key only.

    Raises:
        ValueError: `num_facts` is out of its range.
    """
    limit = _MAX_FACTS if len(kinds) == len(KINDS) else _MAX_FACTS_OF_FEW_KINDS
    if not 1 <= num_facts <= limit:
        raise ValueError(f"num_facts={num_facts} must be from 1 to {limit} with {len(kinds)} kinds")
    deck = _Deck(rng)
    keys = _deal_keys(deck, num_facts, len(kinds))
    candidates = [(kind, key) for kind in kinds for key in keys[kind.role]]
    facts, sentences = [], []
    for kind, key in rng.sample(candidates, num_facts):
        value = _make_value(kind, deck, rng, keys["person"])
        facts.append(Fact(kind.name, key, value))
        sentences.append(rng.choice(kind.statements).format(key=key, value=value))
    return Document(" ".join(sentences), tuple(facts))


def make_questions(document: Document, rng: random.Random, count: int) -> tuple[Question, ...]:
    """Ask `count` questions about a document; about one in ten has the answer "not stated".

    Every fact is asked once before one is asked again; phrasings are drawn at random, so repeated
    questions are possible when `count` exceeds the number of facts.
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
    keys = {}
    for role, template in _ROLES.items():
        number = 2 + num_facts // 5 if role in ("person", "object") else 1 + num_facts // 8
        number = number if num_kinds == len(KINDS) else num_facts
        keys[role] = [deck.fill(template) for _ in range(number)]
    return keys


def _missing_fact(document: Document, rng: random.Random) -> Fact:
    """Make a fact the document does not state, half the time about a key that it mentions."""
    stated = {(fact.kind, fact.key) for fact in document.facts}
    while True:
        kind = rng.choice(KINDS)
        keys = [f.key for f in document.facts if KIND_BY_NAME[f.kind].role == kind.role]
        is_known = bool(keys) and rng.random() < 0.5
        if is_known:
            key = rng.choice(keys)
        elif kind.role in _KEY_WORDS:
            key = rng.choice(_KEY_WORDS[kind.role])
        else:
            key = _Deck(rng).fill(_ROLES[kind.role])
        if (kind.name, key) not in stated and (is_known or key not in document.text):
            return Fact(kind.name, key, NOT_STATED)


def _make_value(kind: FactKind, deck: _Deck, rng: random.Random, people: list[str]) -> str:
    match kind.name:
        case "owner":
            return rng.choice(people)
        case "animals" | "ingredients":
            items = [deck[kind.name] for _ in range(rng.randint(2, 4))]
            return f"{', '.join(items[:-1])} and {items[-1]}"
        case "note":
            num_clauses = rng.choice((1, 1, 1, 1, 2, 2, 3, 4))
            note = " then ".join(deck.fill(_CLAUSE) for _ in range(num_clauses))
            return note[0].upper() + note[1:]
    return deck.fill(kind.value)
