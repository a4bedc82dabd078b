"""Which of its unstarted rows a replica gives back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raybatch.records.types import Request

# a group is cut only for rows that cost so many times the prefix, which is then computed twice
CUT_WORTH = 8


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
