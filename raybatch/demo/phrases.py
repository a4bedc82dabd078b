"""The kinds of facts in the demo task and the phrasings of their statements and questions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One relation between a key and a value.

    A statement has the fields `{key}` and `{value}`, a question has `{key}`. `role` says what the
    key is; kinds of one role share their keys within a document.
    """

    name: str
    role: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


KINDS = (
    Kind(
        name="job",
        role="person",
        statements=(
            "{key} works as a {value}.",
            "{key} has been employed as a {value} for years.",
            "By trade, {key} is a {value}.",
        ),
        questions=(
            "What is the job of {key}?",
            "What does {key} do for a living?",
            "As what is {key} employed?",
        ),
    ),
    Kind(
        name="home",
        role="person",
        statements=(
            "{key} lives in {value}.",
            "The home of {key} is in {value}.",
            "{key} has a house in {value} now.",
        ),
        questions=(
            "Where does {key} live?",
            "In which town is the home of {key}?",
            "Where is the house of {key}?",
        ),
    ),
    Kind(
        name="birthday",
        role="person",
        statements=(
            "{key} was born in {value}.",
            "The birthday of {key} is in {value}.",
            "{key} celebrates a birthday in {value}.",
        ),
        questions=(
            "When was {key} born?",
            "When is the birthday of {key}?",
            "At what time of the year was {key} born?",
        ),
    ),
    Kind(
        name="food",
        role="person",
        statements=(
            "{key} likes to eat {value}.",
            "The favourite food of {key} is {value}.",
            "{key} eats {value} all the time.",
        ),
        questions=(
            "What does {key} like to eat?",
            "What is the favourite food of {key}?",
            "Which food does {key} like?",
        ),
    ),
    Kind(
        name="owner",
        role="object",
        statements=(
            "The {key} belongs to {value}.",
            "The owner of the {key} is {value}.",
            "The {key} is owned by {value}.",
        ),
        questions=(
            "Who owns the {key}?",
            "Who is the owner of the {key}?",
            "To whom does the {key} belong?",
        ),
    ),
    Kind(
        name="price",
        role="object",
        statements=(
            "The {key} costs {value}.",
            "The price of the {key} is {value}.",
            "The {key} sold for {value} last year.",
        ),
        questions=(
            "How much does the {key} cost?",
            "What is the price of the {key}?",
            "For how much was the {key} sold?",
        ),
    ),
    Kind(
        name="colour",
        role="object",
        statements=(
            "The {key} is painted {value}.",
            "The colour of the {key} is {value}.",
            "The surface of the {key} is {value}.",
        ),
        questions=(
            "What colour is the {key}?",
            "What is the colour of the {key}?",
            "In which colour is the {key} painted?",
        ),
    ),
    Kind(
        name="storage",
        role="object",
        statements=(
            "The {key} is kept in {value}.",
            "You can find the {key} in {value}.",
            "The {key} is stored in {value} at night.",
        ),
        questions=(
            "Where is the {key} kept?",
            "Where can you find the {key}?",
            "Where is the {key} stored?",
        ),
    ),
    Kind(
        name="animals",
        role="farm",
        statements=(
            "The farm at {key} keeps {value}.",
            "On the farm at {key} live {value}.",
            "The animals of the farm at {key} are {value}.",
        ),
        questions=(
            "Which animals live on the farm at {key}?",
            "What does the farm at {key} keep?",
            "Which animals does the farm at {key} have?",
        ),
    ),
    Kind(
        name="opening",
        role="building",
        statements=(
            "The {key} opens at {value}.",
            "The doors of the {key} open at {value}.",
            "Visitors may enter the {key} from {value} on.",
        ),
        questions=(
            "When does the {key} open?",
            "At what time does the {key} open?",
            "From what time may visitors enter the {key}?",
        ),
    ),
    Kind(
        name="weekday",
        role="event",
        statements=(
            "The {key} takes place on {value}.",
            "The day of the {key} is {value}.",
            "People come to the {key} on {value}.",
        ),
        questions=(
            "On which day is the {key}?",
            "On which day does the {key} take place?",
            "What is the day of the {key}?",
        ),
    ),
    Kind(
        name="ingredients",
        role="dish",
        statements=(
            "The {key} is made with {value}.",
            "For the {key} the cook takes {value}.",
            "The ingredients of the {key} are {value}.",
        ),
        questions=(
            "What is in the {key}?",
            "What are the ingredients of the {key}?",
            "With what is the {key} made?",
        ),
    ),
    Kind(
        name="code",
        role="lock",
        statements=(
            "The code for the {key} is {value}.",
            "To unlock the {key}, enter {value}.",
            "The {key} unlocks with {value} only.",
        ),
        questions=(
            "What is the code for the {key}?",
            "Which code unlocks the {key}?",
            "With what code does the {key} unlock?",
        ),
    ),
    Kind(
        name="note",
        role="fixture",
        statements=(
            'The note on the {key} says "{value}".',
            'A note on the {key} reads "{value}".',
            'On the {key} hangs a note with the words "{value}".',
        ),
        questions=(
            "What does the note on the {key} say?",
            "What is written in the note on the {key}?",
            "What are the words of the note on the {key}?",
        ),
    ),
)

NOT_STATED = "not stated"
