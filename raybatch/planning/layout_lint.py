"""Advice on the order of the fields of a prompt template, from a sample of rows.

Engines share the beginnings of prompts, so text that many rows have in common should come first.
The user's template is never changed here. Fields are opaque values: two rows share a field if they
have the same value, not if two values begin alike. Only whole KV blocks are shared, counted for a
cache that holds everything.

    head  [label value] [label value] [label value]  tail
          `------- fields, in any order ----------'
"""

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import pyarrow as pa

from raybatch.backends.endpoint import PromptTokenizer
from raybatch.inputs.file_slices import ROWS_PER_TABLE, read_slices
from raybatch.inputs.schemas import in_common_schema
from raybatch.inputs.source import Source
from raybatch.records.arrays import GOLDEN, Ints, mix64
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import PromptTemplate, prompt_texts
from raybatch.text.chat import PromptError

SAMPLE_ROWS = 50_000
# a smaller gain is not worth another prompt
_MIN_GAIN = 0.01
# characters of a field that are tokenized; tokens of further values are extrapolated
_EXACT_CHARS = 4 << 20
# characters shown of a template
_SHOWN_CHARS = 60
# most fields for which all 2^n sets are tried; six fields take 64 sorts of the rows
MAX_EXACT_FIELDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateField:
    """One field of a template over all rows; arrays are read only."""

    name: str
    value_ids: Ints  # [R], equal where the values are equal
    num_tokens: Ints  # [R]
    label_tokens: int = 0  # fixed text that moves with the field, such as "Question: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """An order of fields, and the share of prompt tokens found in a cache of unlimited size."""

    fields: tuple[str, ...]
    hit_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutAdvice:
    """The order in use, and the one with the highest hit rate; the former if none is better.

    `num_rows` is the number of rows looked at; `crosses_messages`: fields move to another message.
    """

    used: Layout
    best: Layout
    num_rows: int
    is_sample: bool = False
    crosses_messages: bool = False

    @property
    def text(self) -> str:
        """The advice in words, if another order is better."""
        used, best = (f"{100 * layout.hit_rate:.0f} %" for layout in (self.used, self.best))
        where = f", in a sample of {self.num_rows:,} rows" if self.is_sample else ""
        crossing = ", and moves text from one message to another" if self.crosses_messages else ""
        change = _change(self.used.fields, self.best.fields)
        return f"{change} raises the hit rate from {used} to {best}{crossing}{where}"


def lint_layout(
    config: StageConfig,
    tables: Iterable[pa.Table],
    count_tokens: Callable[[str], int],
    *,
    num_rows: int | None = None,
    max_rows: int = SAMPLE_ROWS,
) -> LayoutAdvice | None:
    """Return advice for a better order of the template's fields; None if none saves enough.

    Also None without a template, with fewer than two fields, or with a repeated field.

    Args:
        tables: rows sampled across the input, with the columns of the template.
        count_tokens: returns the number of tokens of a text, without begin and end tokens.
        num_rows: rows of the whole input; None if the sample is all of it.

    Raises:
        ConfigError: the template is malformed, or a table lacks one of its columns.
    """
    if not can_change_layout(config):
        return None
    templates, fields = _templates(config), _occurrences(config)
    values = [_Values(count_tokens) for _ in fields]
    num_sampled = 0
    for table in tables:
        table = table.slice(0, max_rows - num_sampled)
        num_sampled += table.num_rows
        for row in zip(*(template.field_texts(table) for template in templates), strict=True):
            # rows whose prompts cannot be rendered are skipped
            texts = [texts for texts in row if not isinstance(texts, PromptError)]
            if len(texts) == len(row):
                for of_field, text in zip(values, chain.from_iterable(texts), strict=True):
                    of_field.add(text)
        if num_sampled >= max_rows:
            break
    head, labels, tail = _split([piece for template in templates for piece in template.layout])
    advice = advise_layout(
        [
            of_field.field(name, count_tokens(label))
            for name, label, of_field in zip(fields, labels, values, strict=True)
        ],
        head_tokens=count_tokens(head),
        tail_tokens=count_tokens(tail),
        block_size=config.engine.block_size_tokens,
    )
    if advice.best.hit_rate - advice.used.hit_rate < _MIN_GAIN:
        return None
    used, best = (_by_message(order.fields, templates) for order in (advice.used, advice.best))
    return replace(
        advice,
        num_rows=num_sampled,
        is_sample=num_rows is not None and num_sampled < num_rows,
        crosses_messages=best != used,
    )


def can_change_layout(config: StageConfig) -> bool:
    """Return whether the stage's templates have fields that could be reordered."""
    return len(_occurrences(config)) > 1 and not _repeated(config)


def why_layout_is_not_linted(config: StageConfig) -> str:
    """Return the reason why no other order of a template's fields was tried; "" if some were."""
    repeated = _repeated(config)
    if not repeated or len(set(_occurrences(config))) < 2:
        return ""
    names = ", ".join(f"{{{name}}}" for name in repeated)
    return f"no other order of the fields was tried, because {names} is repeated"


def without_columns(config: StageConfig) -> str:
    """Return the stage's template if it names no column, so that all prompts are equal; else ""."""
    templates = _templates(config)
    if not templates or _occurrences(config):
        return ""
    text = templates[-1].text
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def lint_source(
    source: Source, config: StageConfig, tokenizer: PromptTokenizer, *, max_rows: int = SAMPLE_ROWS
) -> LayoutAdvice | None:
    """Return the advice of `lint_layout` for a sample of a source.

    Raises:
        ConfigError: the template is malformed, or the source lacks one of its columns.
    """
    columns = _occurrences(config)
    for template in _templates(config):
        template.check(source.schema.names)
    if len(columns) < 2:
        return None
    tables = sample_tables(source, list(dict.fromkeys(columns)), max_rows=max_rows)
    count = token_counter(tokenizer)
    return lint_layout(config, tables, count, num_rows=source.num_rows, max_rows=max_rows)


def sample_tables(source: Source, columns: Sequence[str], *, max_rows: int) -> Iterator[pa.Table]:
    """Yield about `max_rows` rows of some columns, from slices spread evenly over a source.

    A Parquet slice is read from its start up to its share of rows; a JSONL file is read completely,
    and its rows are spread over it.
    """
    schema = pa.schema([source.schema.field(name) for name in columns])
    num_slices = min(len(source.slices), max(1, max_rows // ROWS_PER_TABLE))
    chosen = np.linspace(0, len(source.slices) - 1, num_slices).astype(np.int64)
    parts = [source.slices[index] for index in chosen.tolist()]
    for i, (part, tables) in enumerate(read_slices(parts, columns=columns)):
        wanted = max_rows * (i + 1) // num_slices - max_rows * i // num_slices
        share = 1.0 if part.row_groups is not None else min(1.0, wanted / part.num_rows)
        taken = 0
        for table in tables:
            table = in_common_schema(table, schema)
            rows = table.slice(0, min(math.ceil(share * table.num_rows), wanted - taken))
            taken += rows.num_rows
            yield rows
            if taken >= wanted:
                break


def token_counter(tokenizer: PromptTokenizer) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, without those added around a prompt.

    A text that cannot be tokenized counts as 0: its row fails.
    """

    def count(text: str) -> int:
        try:
            return len(tokenizer.read(text).known_ids)
        except PromptError:
            return 0

    # a tokenizer that adds no tokens refuses the empty prompt
    around = count("")
    return lambda text: max(0, count(text) - around)


def _templates(config: StageConfig) -> list[PromptTemplate]:
    # users cannot change the order of query and document
    texts = prompt_texts(config) if config.query is None else []
    return [PromptTemplate(text) for text in texts]


def _occurrences(config: StageConfig) -> list[str]:
    """Return the fields of all templates in order, with repetitions."""
    pieces = [piece for template in _templates(config) for piece in template.layout]
    return [name for _, name in pieces if name is not None]


def _repeated(config: StageConfig) -> list[str]:
    return [name for name, times in Counter(_occurrences(config)).items() if times > 1]


def _by_message(fields: Sequence[str], templates: Sequence[PromptTemplate]) -> list[frozenset[str]]:
    """Return the fields of each message if messages keep their numbers of fields."""
    left = iter(fields)
    return [frozenset(islice(left, len(template.fields))) for template in templates]


def _split(pieces: Sequence[tuple[str, str | None]]) -> tuple[str, list[str], str]:
    """Return the text before all fields, the label of each field, and the text after them.

    A label is the text between two fields; the first one is the last line before the first field.
    """
    labels, pending = [], ""
    for text, name in pieces:
        pending += text
        if name is not None:
            labels.append(pending)
            pending = ""
    head, line_end, label = labels[0].rpartition("\n")
    return head + line_end, [label, *labels[1:]], pending


class _Values:
    """The values of one field by number, and their lengths."""

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        self._count_tokens = count_tokens
        self._numbers: dict[bytes, int] = {}
        self._lengths: list[int] = []
        self._rows: list[int] = []
        self._num_chars = self._num_tokens = 0

    def add(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        number = self._numbers.setdefault(digest, len(self._lengths))
        if number == len(self._lengths):
            self._lengths.append(self._length(text))
        self._rows.append(number)

    def field(self, name: str, label_tokens: int) -> TemplateField:
        rows = np.array(self._rows, np.int64)
        tokens = np.array(self._lengths, np.int64)[rows]
        return TemplateField(
            name=name, value_ids=rows, num_tokens=tokens, label_tokens=label_tokens
        )

    def _length(self, text: str) -> int:
        if self._num_chars >= _EXACT_CHARS:
            return round(len(text) * self._num_tokens / self._num_chars)
        num_tokens = self._count_tokens(text)
        self._num_chars += len(text)
        self._num_tokens += num_tokens
        return num_tokens


def advise_layout(
    fields: Sequence[TemplateField],
    *,
    head_tokens: int = 0,
    tail_tokens: int = 0,
    block_size: int = 1,
) -> LayoutAdvice:
    """Find the order of fields that shares most. O(2^n R log R) time, O(R) memory.

    Exact up to six fields, because what a leading set of fields shares does not depend on the
    order inside the set. For more fields, a greedy order is improved by moving single fields.
    """
    sharing = _Sharing(fields, head_tokens, tail_tokens, block_size)
    used = tuple(range(len(fields)))
    search = _best_order if len(fields) <= MAX_EXACT_FIELDS else _greedy_order
    candidate = search(sharing, len(fields))
    best = candidate if sharing.unique_blocks(candidate) < sharing.unique_blocks(used) else used
    layouts = [
        Layout(fields=tuple(fields[i].name for i in order), hit_rate=sharing.hit_rate(order))
        for order in (used, best)
    ]
    return LayoutAdvice(used=layouts[0], best=layouts[1], num_rows=sharing.num_rows)


class _Sharing:
    """Counts the distinct KV blocks that each field adds behind each set of fields."""

    def __init__(
        self, fields: Sequence[TemplateField], head_tokens: int, tail_tokens: int, block_size: int
    ) -> None:
        assert fields, "a template without fields has no order to advise on"
        self.head_tokens, self.tail_tokens, self.block_size = head_tokens, tail_tokens, block_size
        self.num_rows = len(fields[0].value_ids)
        # pseudorandom keys of values. Their sum over fields identifies a combination of values;
        # among n combinations, two collide with probability n^2 / 2^65
        self.keys = [
            mix64(field.value_ids.astype(np.uint64) + np.uint64(salt * int(GOLDEN) % 2**64))
            for salt, field in enumerate(fields, start=1)
        ]
        self.tokens = [field.num_tokens.astype(np.int64) + field.label_tokens for field in fields]
        self.labels = [field.label_tokens for field in fields]
        self.label_blocks: dict[tuple[frozenset[int], int], int] = {}
        self.value_blocks: dict[tuple[frozenset[int], int], int] = {}

    def added_blocks(self, before: frozenset[int], field: int) -> int:
        """Return the distinct blocks that end inside `field` when it follows the set `before`."""
        together = before | {field}
        for members, known in ((before, self.label_blocks), (together, self.value_blocks)):
            if (members, field) not in known:
                self._measure(members)
        return self.label_blocks[before, field] + self.value_blocks[together, field]

    def unique_blocks(self, order: Sequence[int]) -> int:
        """Return the distinct blocks behind the head with the fields in `order`."""
        return sum(self.added_blocks(frozenset(order[:i]), field) for i, field in enumerate(order))

    def saved_blocks(self, before: frozenset[int], field: int) -> int:
        """Return the cached blocks of `field` that rows find when it follows the set `before`."""
        rows = np.arange(self.num_rows)
        end, start = self._tokens(before | {field}, rows), self._tokens(before, rows)
        blocks = end // self.block_size - start // self.block_size
        return int(blocks.sum()) - self.added_blocks(before, field)

    def hit_rate(self, order: Sequence[int]) -> float:
        """Return the share of prompt tokens that rows find in a cache of unlimited size."""
        if not self.num_rows:
            return 0.0
        prompts = self._tokens(frozenset(order), np.arange(self.num_rows))
        computed = self.head_tokens // self.block_size + self.unique_blocks(order)
        cached = int((prompts // self.block_size).sum()) - computed
        num_tokens = self.num_rows * (self.head_tokens + self.tail_tokens)
        num_tokens += sum(int(tokens.sum()) for tokens in self.tokens)
        return cached * self.block_size / max(num_tokens, 1)

    def _measure(self, members: frozenset[int]) -> None:
        """Count what each field adds as the last of `members`, and its label behind them.

        The label of the next field is the same for all rows with the same values before it.
        """
        key = np.zeros(self.num_rows, np.uint64)
        for field in members:
            key += self.keys[field]
        rows = np.unique(key, return_index=True)[1]
        end = self._tokens(members, rows)
        for field, label in enumerate(self.labels):
            if field in members:
                start = self._tokens(members - {field}, rows) + label
                blocks = end // self.block_size - start // self.block_size
                self.value_blocks[members, field] = int(np.maximum(blocks, 0).sum())
            else:
                blocks = (end + label) // self.block_size - end // self.block_size
                self.label_blocks[members, field] = int(blocks.sum())

    def _tokens(self, members: frozenset[int], rows: Ints) -> Ints:
        """Return the prompt lengths of `rows` up to the end of the last of `members`."""
        tokens = np.full(len(rows), self.head_tokens, np.int64)
        for field in members:
            tokens += self.tokens[field][rows]
        if len(members) == len(self.keys):
            # the last token of a prompt is always computed
            tokens += self.tail_tokens - 1
        return np.maximum(tokens, 0)


def _best_order(sharing: _Sharing, num_fields: int) -> tuple[int, ...]:
    best: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {frozenset(): (0, ())}
    for size in range(1, num_fields + 1):
        for subset in itertools.combinations(range(num_fields), size):
            members = frozenset(subset)
            best[members] = min(
                (best[rest][0] + sharing.added_blocks(rest, field), (*best[rest][1], field))
                for field, rest in ((field, members - {field}) for field in subset)
            )
    return best[frozenset(range(num_fields))][1]


def _greedy_order(sharing: _Sharing, num_fields: int) -> tuple[int, ...]:
    """Put next the field that saves most, then move single fields while that helps."""
    order: tuple[int, ...] = ()
    while len(order) < num_fields:
        placed = frozenset(order)
        left = [field for field in range(num_fields) if field not in placed]
        order += (max(left, key=lambda field: (sharing.saved_blocks(placed, field), -field)),)
    while True:
        # all orders that move one field
        rests = [(field, tuple(other for other in order if other != field)) for field in order]
        moves = [(*r[:i], field, *r[i:]) for field, r in rests for i in range(num_fields)]
        better = min(moves, key=lambda moved: (sharing.unique_blocks(moved), moved))
        if sharing.unique_blocks(better) >= sharing.unique_blocks(order):
            return order
        order = better


def _change(used: tuple[str, ...], best: tuple[str, ...]) -> str:
    """Describe the change from one order to the other."""
    moved = [
        name for name in used if [u for u in used if u != name] == [b for b in best if b != name]
    ]
    for name in moved:
        if best.index(name) < used.index(name):
            return f"putting {{{name}}} before {{{best[best.index(name) + 1]}}}"
    for name in moved:
        return f"putting {{{name}}} after {{{best[best.index(name) - 1]}}}"
    return "the order " + ", ".join(f"{{{name}}}" for name in best)
