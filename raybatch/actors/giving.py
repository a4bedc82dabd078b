"""Which unstarted rows an engine gives to another one; pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raybatch.types import Request

# a group is cut only for rows that cost so many times the prefix, which is then computed twice
CUT_WORTH = 8


@dataclass(slots=True)
class _Unit:
    """Unstarted rows of one group; `is_whole` where the engine has no others of it."""

    is_whole: bool
    prefix_len: int
    requests: list[Request] = field(default_factory=list)

    def cost(self) -> int:
        return sum(_own_cost(request) for request in self.requests)


def choose_given(
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
        unstarted: rows that have not started, in the order of their arrival.
        num_open: unfinished rows of each group in this engine.
        max_rows: rows to give, if they do not come in whole groups.
        max_cost: prompt tokens and expected outputs to give at most; None knows no limit.

    Returns:
        The chosen rows, in the order of their arrival.
    """
    limit = max_cost if max_cost is not None else sum(_full_cost(r) for r in unstarted)
    units = _units(unstarted, num_open)[::-1]
    whole = [unit for unit in units if unit.is_whole]
    given: list[Request] = []
    for unit in whole:
        num_rows, cost = len(unit.requests), unit.cost() + unit.prefix_len
        if len(given) + num_rows <= max_rows and cost <= limit:
            given += unit.requests
            limit -= cost
    if not given:
        fitting = (unit for unit in whole if unit.cost() + unit.prefix_len <= limit)
        given = next((unit.requests for unit in fitting), [])
    if not given:
        pieces = (_piece(unit, max_rows, limit - unit.prefix_len) for unit in units)
        given = next((piece for piece in pieces if piece), [])
    chosen = {request.request_id for request in given}
    return [request for request in unstarted if request.request_id in chosen]


def _units(unstarted: Sequence[Request], num_open: Mapping[int, int]) -> list[_Unit]:
    """Return the units by their last row."""
    of_group: dict[int, _Unit] = {}
    units: dict[int, _Unit] = {}
    for request in unstarted:
        group = request.group_id
        if group is None:
            units[request.request_id] = _Unit(True, 0, [request])
            continue
        unit = of_group.setdefault(group, _Unit(False, request.prefix_len))
        unit.requests.append(request)
        unit.is_whole = len(unit.requests) == num_open.get(group, 0)
    last = {unit.requests[-1].request_id: unit for unit in of_group.values()} | units
    return [last[r.request_id] for r in unstarted if r.request_id in last]


def _piece(unit: _Unit, max_rows: int, max_cost: int) -> list[Request]:
    """Return the last rows of a group within the limits; none where they are not worth a cut."""
    piece: list[Request] = []
    cost = 0
    for request in reversed(unit.requests):
        if len(piece) == max_rows or cost + _own_cost(request) > max_cost:
            break
        piece.append(request)
        cost += _own_cost(request)
    return piece if cost >= max(1, CUT_WORTH * unit.prefix_len) else []


def _own_cost(request: Request) -> int:
    return _full_cost(request) - request.prefix_len


def _full_cost(request: Request) -> int:
    sampling, expected = request.sampling, request.expected_output_len
    output = sampling.max_tokens if expected is None else min(expected, sampling.max_tokens)
    return len(request.prompt_token_ids) + output * sampling.n
