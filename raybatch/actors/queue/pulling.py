"""Decides when a replica pulls rows and how many, and which rows it gives back; no Ray."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from raybatch.actors.wire.records import Credit
from raybatch.records.types import Capacity, Request

# queued work of an engine beyond its running rows, in token budgets of steps
LEAD_STEPS = 4
# shortest interval between reports of a replica, and most reports of up to 200 replicas a second; a
# report takes the coordinator 2 to 3 ms
REPORT_EVERY_S, _REPORTS_PER_S = 0.1, 100
# longest interval that a pool of many replicas asks for; stealing and checkpoints see older rows
_MAX_REPORT_EVERY_S = 2.0
# time without results after which counters are reported
HEARTBEAT_S = 1.0
# new tokens of a sequence before they are checkpointed
MIN_NEW_TOKENS = 256
# lower bound; with a perfect prefix cache, the tokens to pull would be unbounded
_MIN_UNCACHED_FRACTION = 1 / 16
# enough short rows for a round trip to the coordinator
_MIN_LEAD_ROWS = 64
# an engine that pulls sooner, and is fast, pulls more rows up to a limit: if it crashes, all rows
# that it holds are suspects
_PULL_EVERY_S = 0.25
MAX_LEADS = 8
# share of its lead that an engine finishes between two pulls if it is fast
_FAST_SHARE = 1 / 4
# a group is cut only for rows that cost this many times the prefix, which is then computed twice
CUT_WORTH = 8


class Lead(NamedTuple):
    """How many unstarted rows and prompt tokens an engine should have queued."""

    rows: int
    tokens: int

    @classmethod
    def of(cls, capacity: Capacity, *, min_tokens: int, num_leads: int = 1) -> Self:
        """Return the target for an engine of this capacity, with at least `min_tokens` tokens.

        `num_leads` is that of `PullPace`.
        """
        tokens = max(min_tokens, 2 * (capacity.max_batched_tokens or 0))
        rows = max(_MIN_LEAD_ROWS, capacity.max_num_seqs // 4)
        return cls(num_leads * rows, num_leads * tokens)


class Done(NamedTuple):
    """Rows that have left an engine, nearly all of them finished, and their own tokens."""

    rows: int
    tokens: int


class PullPace:
    """How much a fast engine queues, so that pulls cost little beside its work.

    Each pull is a message to the coordinator, whose cost does not depend on the number of rows.

    Example:
        >>> pace = PullPace()
        >>> for pull in range(4):
        ...     pace.note_pull(Lead(rows=64, tokens=8192), Done(30 * pull, 0), now_s=0.1 * pull)
        >>> pace.num_leads
        8
    """

    def __init__(self) -> None:
        self.num_leads = 1
        self._pulled_s, self._done = -math.inf, Done(0, 0)

    def note_pull(self, lead: Lead, done: Done, *, now_s: float) -> None:
        """Note a pull, the current target, and what is done by then.

        The interval alone says little: a larger lead makes even a slow engine pull soon again.
        """
        since_s, self._pulled_s = now_s - self._pulled_s, now_s
        rows, tokens = done.rows - self._done.rows, done.tokens - self._done.tokens
        self._done = done
        is_fast = rows >= _FAST_SHARE * lead.rows or tokens >= _FAST_SHARE * lead.tokens
        if since_s < _PULL_EVERY_S and is_fast:
            self.num_leads = min(MAX_LEADS, 2 * self.num_leads)
        elif since_s > 4 * _PULL_EVERY_S:
            self.num_leads = max(1, self.num_leads // 2)


def report_every_s(num_replicas: int, stuck_after_s: float | None = None) -> float:
    """Return the shortest interval between reports of a replica, for a pool of this size.

    It is so short that a replica is not taken for stuck after `stuck_after_s` without a report.
    """
    most = _MAX_REPORT_EVERY_S
    if stuck_after_s is not None:
        most = min(most, stuck_after_s / 4)
    return min(most, max(REPORT_EVERY_S, num_replicas / _REPORTS_PER_S))


class _OpenRow(NamedTuple):
    num_samples: int
    group: int | None
    prompt_tokens: int
    own_tokens: int


class OpenRows:
    """The unfinished rows of an engine by request id, and sums over all rows that it received.

    The own tokens of a row are the prompt tokens that it does not share: without the prefix of its
    group, if the engine had other rows of the group when it arrived.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _OpenRow] = {}
        # unfinished rows of each group
        self.groups: Counter[int] = Counter()
        self._num_rows = self._prompt_tokens = self._own_tokens = 0
        self.done = Done(0, 0)

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
        row = self._take(request_id)
        self.done = Done(self.done.rows + 1, self.done.tokens + row.own_tokens)

    def give_back(self, request_id: int) -> None:
        """Forget a row as if it had never been added."""
        self._sum(self._take(request_id), -1)

    def num_samples(self, request_id: int) -> int:
        """Return the number of samples of an unfinished row, 0 for any other row."""
        return self._rows[request_id].num_samples if request_id in self._rows else 0

    def between(self, first_id: int, last_id: int) -> list[int]:
        """Return the request ids of unfinished rows from `first_id` to `last_id`, inclusive."""
        return [request_id for request_id in self._rows if first_id <= request_id <= last_id]

    def mean_own_tokens(self) -> float:
        return self._own_tokens / max(1, self._num_rows)

    def own_fraction(self) -> float:
        """Return the own tokens as a share of the prompt tokens of all rows received."""
        return self._own_tokens / max(1, self._prompt_tokens) if self._own_tokens else 1.0

    def _take(self, request_id: int) -> _OpenRow:
        row = self._rows.pop(request_id)
        if row.group is not None:
            self.groups[row.group] -= 1
            if not self.groups[row.group]:
                del self.groups[row.group]
        return row

    def _sum(self, row: _OpenRow, sign: int) -> None:
        self._num_rows += sign
        self._prompt_tokens += sign * row.prompt_tokens
        self._own_tokens += sign * row.own_tokens


def credit_for(
    lead: Lead, rows: OpenRows, *, num_waiting: int, cached_fraction: float
) -> Credit | None:
    """Return the credit with which an engine should pull rows, or None while it has enough.

    Args:
        lead: how much it should have queued.
        rows: its unfinished rows.
        num_waiting: number of its unstarted rows.
        cached_fraction: share of its prompt tokens so far whose KV was cached.
    """
    # cached tokens beyond the prefixes of groups, which count once anyway
    uncached = (1 - cached_fraction) / rows.own_fraction()
    uncached = min(1.0, max(_MIN_UNCACHED_FRACTION, uncached))
    tokens = int(lead.tokens / uncached - num_waiting * rows.mean_own_tokens())
    num_rows = lead.rows - num_waiting
    wants_rows = 2 * tokens >= lead.tokens and 2 * num_rows >= lead.rows
    return Credit(tokens=tokens, rows=num_rows) if wants_rows else None


@dataclass(slots=True)
class _GroupBatch:
    """Unstarted rows of one group; `is_whole` if the engine has no other rows of it."""

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
    """Choose unstarted rows that an engine gives back, the last ones and whole groups first.

    If no group fits into `max_rows`, one whole group may exceed it. If none fits into `max_cost`
    either, a group is cut, provided that its rows are worth computing the prefix twice.

    Args:
        unstarted: unstarted rows of the engine, in order.
        num_open: number of unfinished rows of each group in the engine, by group.
        max_rows: number of rows to give, except for a larger whole group.
        max_cost: limit of prompt tokens plus expected output tokens; None for no limit.
    """
    limit = max_cost if max_cost is not None else sum(_full_cost(r) for r in unstarted)
    group_batches = _group_batches(unstarted, num_open)[::-1]
    whole = [group_batch for group_batch in group_batches if group_batch.is_whole]
    chosen: list[Request] = []
    for group_batch in whole:
        cost = group_batch.cost()
        if len(chosen) + len(group_batch.requests) <= max_rows and cost <= limit:
            chosen += group_batch.requests
            limit -= cost
    if not chosen:
        chosen = next((each.requests for each in whole if each.cost() <= limit), [])
    if not chosen:
        pieces = (_piece(each, max_rows, limit - each.prefix_len) for each in group_batches)
        chosen = next((piece for piece in pieces if piece), [])
    ids = {request.request_id for request in chosen}
    return [request for request in unstarted if request.request_id in ids]


def _group_batches(unstarted: Sequence[Request], num_open: Mapping[int, int]) -> list[_GroupBatch]:
    """Return the group batches, ordered by their last row."""
    group_batches: dict[tuple[int | None, int | None], _GroupBatch] = {}
    for request in unstarted:
        group = request.group_id
        is_alone = group is None
        key = (group, request.request_id if is_alone else None)
        group_batch = group_batches.pop(key, None) or _GroupBatch(
            is_alone, 0 if is_alone else request.prefix_len
        )
        group_batch.requests.append(request)
        if group is not None:
            group_batch.is_whole = len(group_batch.requests) == num_open.get(group, 0)
        # moves a known group to the end
        group_batches[key] = group_batch
    return list(group_batches.values())


def _piece(group_batch: _GroupBatch, max_rows: int, max_cost: int) -> list[Request]:
    """Return the last rows of a group within the limits; none if they are not worth a cut."""
    piece: list[Request] = []
    cost = 0
    for request in reversed(group_batch.requests):
        if len(piece) == max_rows or cost + _own_cost(request) > max_cost:
            break
        piece.append(request)
        cost += _own_cost(request)
    return piece if cost >= max(1, CUT_WORTH * group_batch.prefix_len) else []


def _own_cost(request: Request) -> int:
    return _full_cost(request) - request.prefix_len


def _full_cost(request: Request) -> int:
    sampling, expected = request.sampling, request.expected_output_len
    if expected is None and (likely := request.likely_output_lens):
        expected = -(-sum(likely) // len(likely))
    output = sampling.max_tokens if expected is None else min(expected, sampling.max_tokens)
    return len(request.prompt_token_ids) + output * sampling.n
