"""The rows that one engine has, and how much of their prompts it must compute; no Ray."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from raybatch.records.types import Request


class _OpenRow(NamedTuple):
    num_samples: int
    group: int | None
    prompt_tokens: int
    own_tokens: int


class OpenRows:
    """Unfinished rows by request id, and sums over all rows that came in.

    The own tokens of a row are those beyond the prefix of its group, if the engine had other rows
    of the group when it came in, else the whole prompt.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _OpenRow] = {}
        self._groups: Counter[int] = Counter()
        self._num_rows = 0
        self._prompt_tokens = 0
        self._own_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._rows

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            prompt = own = len(request.prompt_token_ids)
            if request.group_id is not None:
                own -= request.prefix_len if self._groups[request.group_id] else 0
                self._groups[request.group_id] += 1
            row = _OpenRow(request.sampling.n, request.group_id, prompt, own)
            self._rows[request.request_id] = row
            self._sum(row, 1)

    def close(self, request_id: int) -> None:
        row = self._rows.pop(request_id)
        if row.group is not None:
            self._groups[row.group] -= 1
            if not self._groups[row.group]:
                del self._groups[row.group]

    def give_back(self, request_id: int) -> None:
        """Forget a row as if it had never been added."""
        self._sum(self._rows[request_id], -1)
        self.close(request_id)

    def num_samples(self, request_id: int) -> int:
        """Return the samples of an unfinished row, 0 for others."""
        row = self._rows.get(request_id)
        return 0 if row is None else row.num_samples

    def between(self, first_id: int, last_id: int) -> list[int]:
        """Return the unfinished rows with ids in this range, both ends included."""
        return [request_id for request_id in self._rows if first_id <= request_id <= last_id]

    def groups(self) -> Mapping[int, int]:
        """Return how many unfinished rows each group has; read only."""
        return self._groups

    def mean_own_tokens(self) -> float:
        """Return the own tokens of a row, on average over all rows that came in."""
        return self._own_tokens / max(1, self._num_rows)

    def own_fraction(self) -> float:
        """Return the own tokens as a share of the prompts of all rows that came in."""
        return self._own_tokens / max(1, self._prompt_tokens) if self._own_tokens else 1.0

    def _sum(self, row: _OpenRow, sign: int) -> None:
        self._num_rows += sign
        self._prompt_tokens += sign * row.prompt_tokens
        self._own_tokens += sign * row.own_tokens
