"""Training batches: each row is one document followed by many question-and-answer pairs.

A pair sees the chat head, the document and itself, at the positions it would have as the only
question of a prompt, so a row trains many prompts for the price of one document.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from demo_training.model import BLOCK, Masks
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from raybatch.demo.task import KINDS, PROMPT, Document, Question, make_document, make_questions

_HEAD, _TAIL = PROMPT.split("{document}")


class Batch(NamedTuple):
    """One training batch; `chosen` and `labels` pair a flat token index with its next token."""

    ids: Tensor  # [rows, tokens]
    positions: Tensor  # [rows, tokens]
    masks: Masks
    chosen: Tensor  # [n]
    labels: Tensor  # [n]
    pair_ids: Tensor  # [n], which pair a label belongs to
    kinds: list[str]  # kind of each pair


def document_text(document: Document) -> str:
    """Render the prefix that all prompts of a document share."""
    return f"<|im_start|>user\n{_HEAD}{document.text}\n\n"


def pair_texts(question: Question) -> tuple[str, str]:
    """Render the text after the document: the rest of the prompt, and the answer with its end."""
    rest = _TAIL.removeprefix("\n\n").format(question=question.text)
    return f"{rest}<|im_end|>\n<|im_start|>assistant\n", f"{question.answer}<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The sizes of a batch; documents longer than `doc_len` tokens are drawn again."""

    num_rows: int
    num_blocks: int
    doc_len: int
    min_facts: int
    max_facts: int
    num_kinds: int = len(KINDS)

    @property
    def row_len(self) -> int:
        """Tokens per row."""
        return self.doc_len + self.num_blocks * BLOCK


def draw_document(rng: random.Random, shape: BatchShape) -> Document:
    """Draw one document with the numbers of facts and kinds of the batch."""
    num_facts = rng.randint(shape.min_facts, shape.max_facts)
    return make_document(rng, num_facts, kinds=rng.sample(KINDS, shape.num_kinds))


def make_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, shape: BatchShape) -> Batch:
    """Draw documents and pack each into a row with as many pairs as fit.

    Args:
        tokenizer: The demo tokenizer.
        rng: Source of the documents.
        shape: Sizes of the batch.
    """
    rows = _Rows(shape)
    for row in range(shape.num_rows):
        head: list[int] = []
        while not head or len(head) > shape.doc_len:
            document = draw_document(rng, shape)
            head = tokenizer.backend_tokenizer.encode(document_text(document)).ids
        questions = make_questions(document, rng, 3 * shape.num_blocks)
        texts = [text for question in questions for text in pair_texts(question)]
        pieces = [e.ids for e in tokenizer.backend_tokenizer.encode_batch(texts)]
        rows.fill(row, head, list(zip(pieces[::2], pieces[1::2], questions, strict=True)))
    return rows.finish()


class _Rows:
    """Fills the arrays of a batch row by row."""

    def __init__(self, shape: BatchShape) -> None:
        self.shape = shape
        self.ids = np.zeros((shape.num_rows, shape.row_len), np.int64)
        self.positions = np.zeros((shape.num_rows, shape.row_len), np.int64)
        # which pair a token belongs to; the document's tokens share one value, padding has none
        self.owners = np.full((shape.num_rows, shape.row_len), -1)
        self.chosen: list[int] = []
        self.labels: list[int] = []
        self.pair_ids: list[int] = []
        self.kinds: list[str] = []

    def fill(
        self, row: int, head: list[int], pairs: Sequence[tuple[list[int], list[int], Question]]
    ) -> None:
        """Write one document and its pairs, each into the first block with room for it."""
        self._write(row, 0, head, 0, 0)
        room = [BLOCK] * self.shape.num_blocks
        for i, (prompt, answer, question) in enumerate(pairs):
            size = len(prompt) + len(answer)
            block = next((b for b, free in enumerate(room) if free >= size), None)
            if block is None:
                continue
            start = self.shape.doc_len + (block + 1) * BLOCK - room[block]
            room[block] -= size
            self._write(row, start, prompt + answer, len(head), i + 1)
            first = row * self.shape.row_len + start + len(prompt) - 1
            self.chosen.extend(range(first, first + len(answer)))
            self.labels.extend(answer)
            self.pair_ids.extend([len(self.kinds)] * len(answer))
            self.kinds.append(question.kind)

    def _write(self, row: int, at: int, ids: list[int], position: int, owner: int) -> None:
        span = slice(at, at + len(ids))
        self.ids[row, span] = ids
        self.positions[row, span] = np.arange(position, position + len(ids))
        self.owners[row, span] = owner

    def finish(self) -> Batch:
        """Turn the arrays into tensors and build the masks."""
        owners, doc_len = torch.from_numpy(self.owners), self.shape.doc_len
        blocks = owners[:, doc_len:].unflatten(1, (-1, BLOCK))
        own = (blocks[..., None, :] == blocks[..., :, None]).tril()
        return Batch(
            torch.from_numpy(self.ids),
            torch.from_numpy(self.positions),
            Masks(_additive(owners[:, :doc_len] == 0), _additive(own)),
            *(torch.tensor(x) for x in (self.chosen, self.labels, self.pair_ids)),
            self.kinds,
        )


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
