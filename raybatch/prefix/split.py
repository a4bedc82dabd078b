"""Cutting the order of groups: into balanced parts, one per replica, and into units of commit.

Both cut the rows in their planned order, so that what shares a prefix stays together.
"""

from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.prefix.load import Floats, GroupLoad, Ints, TokenCost

# each further prefix raises the ideal load of a part, which moves the cuts; this settles at once
# unless cuts flip between two groups, and then any round is as good as the next
MAX_ROUNDS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Pieces of groups, in the planned order. A group in several pieces was cut.

    Args:
        group: int64 [K], group id of each piece.
        first_member: int64 [K], position in its group of the first row.
        end_member: int64 [K], position after the last row.
        part: int64 [K], falling never.
        part_cost: float64 [num_parts], with the prefix of every piece.
        extra_prefill_tokens: prefix tokens computed again because of cuts.
    """

    group: Ints
    first_member: Ints
    end_member: Ints
    part: Ints
    part_cost: Floats
    extra_prefill_tokens: int

    @property
    def spread(self) -> float:
        """Difference of the heaviest and the lightest part, as a share of the mean."""
        return float(np.ptp(self.part_cost) / max(self.part_cost.mean(), np.finfo(float).tiny))


def split_groups(
    load: GroupLoad,
    num_parts: int,
    *,
    order: Ints | None = None,
    cost: TokenCost | None = None,
    max_spread: float = 0.05,
) -> Split:
    """Cut the order of groups into `num_parts` consecutive parts of nearly equal cost.

    A cut takes a border between groups if one keeps the spread; else it goes through a group,
    whose prefix the next part then computes once more. Members of a group count as equal. The
    spread holds as long as no row costs more than half of it. O(G + num_parts log G).

    Args:
        load: token counts of the groups.
        num_parts: replicas, at least 1.
        order: permutation of the groups, as from `order_groups`; None keeps the order of ids.
        cost: price of prefill and decode tokens; None counts all tokens alike.
        max_spread: allowed difference between parts, as a share of the mean, in (0, 1).

    Raises:
        ConfigError: `num_parts` or `max_spread` is out of range.

    Source: BlendServe, arXiv:2411.16102 (data parallel split); borders first are our own.
    """
    if num_parts < 1 or not 0 < max_spread < 1:
        raise ConfigError(
            f"num_parts={num_parts}, max_spread={max_spread}: at least 1 part and a spread between "
            "0 and 1 are needed"
        )
    order = np.arange(len(load), dtype=np.int64) if order is None else order
    line = _Line.of(load, order, cost or TokenCost())
    cuts = line.cut(num_parts, max_spread)
    return _pieces(load, order, line, cuts, num_parts)


@dataclass(frozen=True, slots=True)
class _Line:
    """The groups in order along an axis of cost.

    Args:
        prefix: float64 [G], cost of each prefix.
        member: float64 [G], cost of one member.
        rows: int64 [G], rows before each group, and all of them at the end: [G + 1].
        border: float64 [G + 1], cost before each group, and of everything.
    """

    prefix: Floats
    member: Floats
    rows: Ints
    border: Floats

    @classmethod
    def of(cls, load: GroupLoad, order: Ints, cost: TokenCost) -> "_Line":
        prefix, members = cost.of_prefixes(load)[order], cost.of_members(load)[order]
        return cls(
            prefix=prefix,
            member=members / load.num_rows[order],
            rows=np.concatenate([[0], np.cumsum(load.num_rows[order])]),
            border=np.concatenate([[0.0], np.cumsum(prefix + members)]),
        )

    def cut(self, num_parts: int, max_spread: float) -> Ints:
        """Return the row positions at which the parts after the first begin."""
        cuts = np.zeros(num_parts - 1, np.int64)
        paid_again = 0.0
        for _ in range(MAX_ROUNDS):
            part_cost = (self.border[-1] + paid_again) / num_parts
            before, paid_again = paid_again, 0.0
            for i in range(num_parts - 1):
                goal = (i + 1) * part_cost - paid_again
                cuts[i], again = self._cut_near(goal, part_cost * max_spread / 4)
                paid_again += again
            if paid_again == before:
                break
        # a prefix that costs more than a part moves the next goal back before this cut
        return np.maximum.accumulate(cuts)

    def _cut_near(self, goal: float, reach: float) -> tuple[int, float]:
        """Return the row at which to cut, and the cost of the prefix that is computed again."""
        nearest = _nearest(self.border, goal)
        group = min(int(np.searchsorted(self.border, goal, side="right")) - 1, len(self.prefix) - 1)
        if group < 0 or abs(self.border[nearest] - goal) <= reach:
            return int(self.rows[nearest]), 0.0
        num_rows = int(self.rows[group + 1] - self.rows[group])
        into = goal - self.border[group] - self.prefix[group]
        member = round(into / self.member[group]) if self.member[group] > 0 else 0
        if not 0 < member < num_rows:
            return int(self.rows[nearest]), 0.0
        return int(self.rows[group]) + member, float(self.prefix[group])


def _nearest(borders: Floats, goal: float) -> int:
    after = min(int(np.searchsorted(borders, goal)), len(borders) - 1)
    before = max(after - 1, 0)
    return before if goal - borders[before] <= borders[after] - goal else after


def _pieces(load: GroupLoad, order: Ints, line: _Line, cuts: Ints, num_parts: int) -> Split:
    starts = np.unique(np.concatenate([line.rows[:-1], cuts[cuts < line.rows[-1]]]))
    ends = np.append(starts[1:], line.rows[-1])
    place = np.searchsorted(line.rows, starts, side="right") - 1
    part = np.searchsorted(cuts, starts, side="right")
    piece_cost = line.prefix[place] + line.member[place] * (ends - starts)
    first_member = starts - line.rows[place]
    group = order[place]
    return Split(
        group=group,
        first_member=first_member,
        end_member=ends - line.rows[place],
        part=part,
        part_cost=np.bincount(part, weights=piece_cost, minlength=num_parts).astype(float),
        extra_prefill_tokens=int(load.prefix_tokens[group[first_member > 0]].sum()),
    )


def cut_units(group_rows: Ints, *, target_rows: int, max_rows: int) -> Ints:
    """Return the ranks at which units begin, and the number of rows as the last entry.

    A unit closes at the first border between groups at or after `target_rows`, and before a group
    that would take it above `max_rows`. A group above the maximum is cut into neighbouring units
    of nearly equal size. O(units log G).

    Args:
        group_rows: int64 [G], rows of each group in the order of ranks.
        target_rows: wanted size of a unit, at least 1.
        max_rows: largest size, at least `target_rows`.

    Returns:
        int64 [units + 1]; [0] when there are no rows.

    Raises:
        ConfigError: the sizes are out of range.
    """
    if not 1 <= target_rows <= max_rows:
        raise ConfigError(
            f"units of {target_rows} rows, at most {max_rows}: the target is at least 1 and at "
            "most the maximum"
        )
    borders = np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)
    num_rows, starts = int(borders[-1]), [0]
    while starts[-1] < num_rows:
        starts.append(_unit_end(borders, starts[-1], target_rows, max_rows))
    return np.array(starts, np.int64)


def _unit_end(borders: Ints, start: int, target_rows: int, max_rows: int) -> int:
    closing = int(np.searchsorted(borders, min(start + target_rows, int(borders[-1]))))
    end, begin = int(borders[closing]), max(int(borders[closing - 1]), start)
    if end - start <= max_rows:
        return end
    num_units = -(-(end - start) // max_rows)
    is_cut_anyway = num_units == -(-(end - begin) // max_rows)
    if begin > start and not (is_cut_anyway and num_units > 1):
        return begin
    return start + -(-(end - start) // num_units)
