"""The rows of a simulated job: lengths alone, and requests without a text."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Self

import numpy as np

from raybatch.actors.queue.row_states import ALONE
from raybatch.actors.wire.records import RowGroups
from raybatch.errors import ConfigError
from raybatch.records.arrays import Ints
from raybatch.records.types import Request, Sampling, TokenIds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SimulatedRows:
    """The rows of a simulated job, in the order of its plan; arrays are int64 [R].

    Args:
        prompt: prompt tokens, including the prefix.
        output: tokens that each row generates, at least 1; the pool does not know them.
        max_tokens: limit of the output that the pool knows, at least `output`.
        group: prefix group, `ALONE` for a row without one.
        prefix: prompt tokens that all rows of the group share.
        expected: output tokens that a plan expects, known to the pool; None if there are none.
        likely: likely output lengths of every row, see `Request.likely_output_lens`.
    """

    prompt: Ints
    output: Ints
    max_tokens: Ints
    group: Ints
    prefix: Ints
    expected: Ints | None = None
    likely: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ConfigError("a simulated job needs rows, got none")
        if self.prompt.min() < 1 or self.output.min() < 1:
            raise ConfigError("a simulated row must have at least 1 prompt and 1 output token")
        if (self.max_tokens < self.output).any():
            raise ConfigError(
                "a simulated row has an output longer than its max_tokens; raise max_tokens"
            )

    @classmethod
    def of(cls, prompt: Ints, output: Ints, *, max_tokens: Ints | int | None = None) -> Self:
        """Return rows without prefix groups; `max_tokens` is the longest output by default."""
        most = int(output.max(initial=1)) if max_tokens is None else max_tokens
        return cls(
            prompt=prompt,
            output=output,
            max_tokens=np.broadcast_to(most, len(output)).astype(np.int64),
            group=np.full(len(prompt), ALONE, np.int64),
            prefix=np.zeros(len(prompt), np.int64),
        )

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def new_tokens(self) -> Ints:
        """Return the output tokens of each row by which a queue counts cost, int64 [R]."""
        return self.max_tokens if self.expected is None else self.expected

    @property
    def groups(self) -> RowGroups | None:
        if (self.group == ALONE).all():
            return None
        return RowGroups(group_ids=self.group, prefix_lens=self.prefix.astype(np.int32))

    @property
    def longest_tokens(self) -> int:
        """Return the largest sum of prompt tokens and `max_tokens` of a row."""
        return int((self.prompt + self.max_tokens).max())

    def with_oracle(self) -> Self:
        """Return the same rows with `expected` set to the true output lengths."""
        return replace(self, expected=self.output)

    def take(self, rows: Ints) -> Self:
        """Return the rows at these indices, in this order."""
        names = ("prompt", "output", "max_tokens", "group", "prefix")
        picked = {name: getattr(self, name)[rows] for name in names}
        expected = None if self.expected is None else self.expected[rows]
        return replace(self, **picked, expected=expected)

    def request(self, row: int) -> Request:
        """Return a row as a request; other rows have other tokens, except for a shared prefix."""
        group, prefix = int(self.group[row]), int(self.prefix[row])
        return Request(
            request_id=row,
            row_id=str(row),
            prompt_token_ids=_tokens(row, int(self.prompt[row]), group, prefix),
            sampling=_sampling(int(self.max_tokens[row])),
            group_id=None if group == ALONE else group,
            prefix_len=prefix,
            likely_output_lens=self.likely,
            expected_output_len=None if self.expected is None else int(self.expected[row]),
        )


def _tokens(row: int, num_tokens: int, group: int, prefix: int) -> TokenIds:
    own = np.broadcast_to(np.int32(row), (num_tokens - prefix,))
    if not prefix:
        return own
    return np.concatenate((np.full(prefix, -1 - group, np.int32), own))


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens)
