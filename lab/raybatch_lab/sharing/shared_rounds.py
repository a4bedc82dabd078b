"""Rounds of a group whose rows travel to the owners of feed-forward weights (CaS), in seconds.

In a round every rank with rows makes one pass. At each layer its rows go to the owner, which waits
for those of all ranks, multiplies and sends slices back; by tile they go to all ranks, each
multiplies with its tile, and partial sums come back.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raybatch.errors import ConfigError
from raybatch.policy.decode_times import PassCosts
from raybatch.policy.ownership import Ownership, Unit
from raybatch.policy.sharing import round_limit
from raybatch_lab.sharing.shared_weights import GroupLinks, ModuleSeconds


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRules:
    """What a round does to be quick; each can be left out, to see what it is worth.

    Args:
        is_fused: an owner multiplies the rows of all ranks at once, and not of one after the other.
        skips_dummies: ranks without rows send none; else they pass with one row of padding.
    """

    is_fused: bool = True
    skips_dummies: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one round takes.

    Args:
        seconds: until the last rank with rows has ended its pass.
        num_chains: chains of products over the layers, of all owners.
        sent_rows: rows that went to an owner, of each layer.
        sent_bytes: rows, and slices or partial sums, on all links.
        padding_rows: of them, rows that no sequence has.
    """

    seconds: float
    num_chains: int
    sent_rows: int
    sent_bytes: float
    padding_rows: int


def simulate_round(
    costs: ModuleSeconds,
    ownership: Ownership,
    rows: Sequence[int],
    *,
    row_bytes: float,
    links: GroupLinks,
    rules: RoundRules | None = None,
    attention_s: Sequence[float] | None = None,
) -> Round:
    """Return what a round takes in which rank r has `rows[r]` rows, 0 for a dummy.

    Args:
        row_bytes: of a row as it travels, one way.
        links: each hop takes their latency, then its bytes.
        attention_s: of one layer by rank, where its rows are not alike; None asks `costs`.

    Raises:
        ConfigError: not one number of rows for each rank, or no rows at all.
    """
    if len(rows) != ownership.size or min(rows) < 0 or not any(rows):
        raise ConfigError(f"a round of {ownership.size} ranks got rows {list(rows)}")
    rules = rules or RoundRules()
    passing = {r: num or 1 for r, num in enumerate(rows) if num or not rules.skips_dummies}
    module_s = {
        rank: costs.attention_s(num) if attention_s is None or not rows[rank] else attention_s[rank]
        for rank, num in passing.items()
    }
    products_s = _products_s(costs, list(passing.values()), ownership, rules)
    # layers repeat after one of each owner
    plans = [
        _hops_of(ownership, layer, passing, row_bytes, links) for layer in range(ownership.size)
    ]
    times = dict.fromkeys(passing, 0.0)
    num_chains = sent_rows = padding_rows = 0
    for layer in range(ownership.num_layers):
        hops = plans[layer % ownership.size]
        begun_s = max(times[rank] + module_s[rank] + hops.seconds[rank] for rank in passing)
        times = {rank: begun_s + products_s + hops.seconds[rank] for rank in passing}
        num_chains += hops.num_owners * (1 if rules.is_fused else len(passing))
        sent_rows += sum(hops.sent_rows.values())
        padding_rows += sum(num for rank, num in hops.sent_rows.items() if not rows[rank])
    return Round(
        seconds=max(times[rank] + costs.rest_s(rows[rank]) for rank in passing if rows[rank]),
        num_chains=num_chains,
        sent_rows=sent_rows,
        sent_bytes=2 * sent_rows * row_bytes,
        padding_rows=padding_rows,
    )


def round_threshold(
    costs: PassCosts,
    ownership: Ownership,
    copies_s: float,
    *,
    row_bytes: float,
    links: GroupLinks,
    most: int,
    most_round_rows: int,
) -> float:
    """Return from how many rows of each rank on copies are better than rounds, at most `most`.

    As engines measure it, rows have one token cached.

    Args:
        copies_s: of a pass.
        most_round_rows: of each rank in a round.
    """
    measured = replace(costs, cached_tokens=1)

    def seconds(num_rows: int) -> float:
        rows = (num_rows,) * ownership.size
        return simulate_round(measured, ownership, rows, row_bytes=row_bytes, links=links).seconds

    hiding = min(most, 1 + bisect_left(range(1, most + 1), copies_s, key=seconds))
    return round_limit(
        hiding, most_rows=most_round_rows, rounds_s=seconds(most_round_rows), copies_s=copies_s
    )


class _Hops(NamedTuple):
    """How rows travel at one layer: seconds one way and rows that leave, by rank."""

    num_owners: int
    seconds: dict[int, float]
    sent_rows: dict[int, int]


def _hops_of(
    ownership: Ownership, layer: int, passing: dict[int, int], row_bytes: float, links: GroupLinks
) -> _Hops:
    owners = sorted({ownership.owner(Unit(layer, t)) for t in range(ownership.num_tiles)})
    return _Hops(
        num_owners=len(owners),
        seconds={rank: _hop_s(rank, owners, passing, row_bytes, links) for rank in passing},
        sent_rows={
            rank: num * sum(owner != rank for owner in owners) for rank, num in passing.items()
        },
    )


def _hop_s(
    rank: int, owners: Sequence[int], passing: dict[int, int], row_bytes: float, links: GroupLinks
) -> float:
    """Return the seconds in which the rows of a rank reach the owners of a layer, or come back.

    Its own link takes them to all owners, and that of an owner the rows of all ranks.
    """
    others = [owner for owner in owners if owner != rank]
    if not others:
        return 0.0
    leaving = len(others) * passing[rank]
    entering = max(sum(num for r, num in passing.items() if r != owner) for owner in others)
    seconds = max(leaving / links.bytes_per_s, entering / links.owner_bytes_per_s)
    return links.latency_s + row_bytes * seconds


def _products_s(
    costs: ModuleSeconds, rows: Sequence[int], ownership: Ownership, rules: RoundRules
) -> float:
    if rules.is_fused:
        return costs.ffn_s(sum(rows), ownership.num_tiles)
    return sum(costs.ffn_s(num, ownership.num_tiles) for num in rows)
