"""When a replica pulls rows and how many, and how often it reports; no clock, no Ray."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Self

from raybatch.actors.wire.records import Room
from raybatch.records.types import Capacity, Request

# token budgets of steps that wait in an engine beyond what runs
LEAD_STEPS = 4
REPORT_EVERY_S = 0.05
# counters are sent so often even if no row finished
HEARTBEAT_S = 1.0
# tokens that a sequence has to gain before they are reported
MIN_NEW_TOKENS = 256
# with a prefix cache that has everything, the tokens to pull would be unbounded
_MIN_UNCACHED_FRACTION = 1 / 16
# short rows: enough for the time of a round trip to the coordinator
_MIN_LEAD_ROWS = 64


class Lead(NamedTuple):
    """How much should wait in an engine beyond what runs."""

    rows: int
    tokens: int

    @classmethod
    def of(cls, capacity: Capacity, *, min_tokens: int) -> Self:
        """Return what the steps of an engine want, `min_tokens` at the least."""
        tokens = max(min_tokens, 2 * (capacity.max_batched_tokens or 0))
        return cls(max(_MIN_LEAD_ROWS, capacity.max_num_seqs // 4), tokens)


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
        # unfinished rows of each group
        self.groups: Counter[int] = Counter()
        self._num_rows = self._prompt_tokens = self._own_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            prompt = own = len(request.prompt_token_ids)
            if request.group_id is not None:
                own -= request.prefix_len if self.groups[request.group_id] else 0
                self.groups[request.group_id] += 1
            row = _OpenRow(request.sampling.n, request.group_id, prompt, own)
            self._rows[request.request_id] = row
            self._sum(row, 1)

    def close(self, request_id: int) -> None:
        group = self._rows.pop(request_id).group
        if group is not None:
            self.groups[group] -= 1
            if not self.groups[group]:
                del self.groups[group]

    def give_back(self, request_id: int) -> None:
        """Forget a row as if it had never been added."""
        self._sum(self._rows[request_id], -1)
        self.close(request_id)

    def num_samples(self, request_id: int) -> int:
        """Return the samples of an unfinished row, 0 for others."""
        return self._rows[request_id].num_samples if request_id in self._rows else 0

    def between(self, first_id: int, last_id: int) -> list[int]:
        """Return the unfinished rows with ids in this range, both ends included."""
        return [request_id for request_id in self._rows if first_id <= request_id <= last_id]

    def mean_own_tokens(self) -> float:
        return self._own_tokens / max(1, self._num_rows)

    def own_fraction(self) -> float:
        """Return the own tokens as a share of the prompts of all rows that came in."""
        return self._own_tokens / max(1, self._prompt_tokens) if self._own_tokens else 1.0

    def _sum(self, row: _OpenRow, sign: int) -> None:
        self._num_rows += sign
        self._prompt_tokens += sign * row.prompt_tokens
        self._own_tokens += sign * row.own_tokens


def room_for(
    lead: Lead, rows: OpenRows, *, num_waiting: int, cached_fraction: float
) -> Room | None:
    """Return how much to pull, or None while enough waits.

    Args:
        num_waiting: rows that the engine has got and not started.
        cached_fraction: of the prompt tokens so far, those whose KV was there.
    """
    # what is cached beyond the prefixes of groups, which count once anyway
    uncached = (1 - cached_fraction) / rows.own_fraction()
    uncached = min(1.0, max(_MIN_UNCACHED_FRACTION, uncached))
    tokens = int(lead.tokens / uncached - num_waiting * rows.mean_own_tokens())
    num_rows = lead.rows - num_waiting
    is_hungry = 2 * tokens >= lead.tokens and 2 * num_rows >= lead.rows
    return Room(tokens=tokens, rows=num_rows) if is_hungry else None
