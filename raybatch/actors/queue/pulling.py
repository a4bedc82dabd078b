"""When a replica pulls rows and how many, how often it reports, and what it gives back; no Ray."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
# a group is cut only for rows that cost so many times the prefix, which is then computed twice
CUT_WORTH = 8


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


@dataclass(slots=True)
class _Bundle:
    """Unstarted rows of one group; `is_whole` where the engine has no others of it."""

    is_whole: bool
    prefix_len: int
    requests: list[Request] = field(default_factory=list)

    def cost(self) -> int:
        return self.prefix_len + sum(map(_own_cost, self.requests))


def choose_rows(
    unstarted: Sequence[Request],
    num_open: Mapping[int, int],
    *,
    max_rows: int,
    max_cost: int | None = None,
) -> list[Request]:
    """Choose rows from the end, whole groups first.

    A group that is whole goes even if it has more than `max_rows` rows, where no smaller one does.
    Only where none fits is one cut, if its rows are worth the prefix that is then computed twice.

    Args:
        num_open: unfinished rows of each group in this engine.
        max_rows: rows to give, unless whole groups are larger.
        max_cost: prompt tokens and expected outputs to give at most; None knows no limit.
    """
    limit = max_cost if max_cost is not None else sum(_full_cost(r) for r in unstarted)
    bundles = _bundles(unstarted, num_open)[::-1]
    whole = [bundle for bundle in bundles if bundle.is_whole]
    chosen: list[Request] = []
    for bundle in whole:
        cost = bundle.cost()
        if len(chosen) + len(bundle.requests) <= max_rows and cost <= limit:
            chosen += bundle.requests
            limit -= cost
    if not chosen:
        chosen = next((bundle.requests for bundle in whole if bundle.cost() <= limit), [])
    if not chosen:
        pieces = (_piece(bundle, max_rows, limit - bundle.prefix_len) for bundle in bundles)
        chosen = next((piece for piece in pieces if piece), [])
    ids = {request.request_id for request in chosen}
    return [request for request in unstarted if request.request_id in ids]


def _bundles(unstarted: Sequence[Request], num_open: Mapping[int, int]) -> list[_Bundle]:
    """Return the bundles by their last row."""
    bundles: dict[tuple[int | None, int | None], _Bundle] = {}
    for request in unstarted:
        group = request.group_id
        is_alone = group is None
        key = (group, request.request_id if is_alone else None)
        bundle = bundles.pop(key, None) or _Bundle(is_alone, 0 if is_alone else request.prefix_len)
        bundle.requests.append(request)
        if group is not None:
            bundle.is_whole = len(bundle.requests) == num_open.get(group, 0)
        # at the end, also where it was known
        bundles[key] = bundle
    return list(bundles.values())


def _piece(bundle: _Bundle, max_rows: int, max_cost: int) -> list[Request]:
    """Return the last rows of a group within the limits; none where they are not worth a cut."""
    piece: list[Request] = []
    cost = 0
    for request in reversed(bundle.requests):
        if len(piece) == max_rows or cost + _own_cost(request) > max_cost:
            break
        piece.append(request)
        cost += _own_cost(request)
    return piece if cost >= max(1, CUT_WORTH * bundle.prefix_len) else []


def _own_cost(request: Request) -> int:
    return _full_cost(request) - request.prefix_len


def _full_cost(request: Request) -> int:
    sampling, expected = request.sampling, request.expected_output_len
    if expected is None and (likely := request.likely_output_lens):
        expected = -(-sum(likely) // len(likely))
    output = sampling.max_tokens if expected is None else min(expected, sampling.max_tokens)
    return len(request.prompt_token_ids) + output * sampling.n
