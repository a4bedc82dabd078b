"""Simulates exchange passes of a group: rows go to the owners of feed-forward weights.

In an exchange pass every rank with rows runs one pass. At each layer its rows go to the owner,
which waits for all ranks, computes and sends slices back. By shard, rows go to all ranks, and
partial sums come back.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from raybatch.errors import ConfigError
from raybatch.records.share import Unit
from raybatch_extensions.sharing.modes import exchange_limit
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.pass_costs import PassCosts
from raybatch_lab.sharing.shared_weights import GroupLinks, ModuleSeconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeRules:
    """Optimisations of a pass with activation exchange; disable one to measure its gain.

    Args:
        is_fused: an owner computes the rows of all ranks in one batch, not rank by rank.
        skips_dummies: ranks without rows send nothing; otherwise they send one padding row.
    """

    is_fused: bool = True
    skips_dummies: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Result of a simulated forward pass with activation exchange.

    Args:
        seconds: seconds until the last rank with rows ends its pass.
        num_chains: batches of rows that owners computed, summed over layers and owners.
        sent_rows: rows sent to owners, summed over layers.
        sent_bytes: bytes on all links: rows to owners, and their results back.
        padding_rows: padding among the sent rows.
    """

    seconds: float
    num_chains: int
    sent_rows: int
    sent_bytes: float
    padding_rows: int


def simulate_exchange(
    costs: ModuleSeconds,
    ownership: Ownership,
    rows: Sequence[int],
    *,
    row_bytes: float,
    links: GroupLinks,
    rules: ExchangeRules | None = None,
    attention_s: Sequence[float] | None = None,
) -> Exchange:
    """Simulate a forward pass with activation exchange.

    Ranks send the rows of each layer to the owners of its weights, and get the results back.

    Args:
        rows: number of rows of each rank, in order of ranks; 0 for a rank that only computes for
            others.
        row_bytes: bytes of one row's activations, in one direction.
        links: a transfer takes their latency plus the time of its bytes.
        rules: optimisations; None uses all.
        attention_s: seconds of one layer's attention of each rank; None computes them by `costs`.

    Raises:
        ConfigError: `rows` lacks ranks or has too many, or no rank has rows.
    """
    if len(rows) != ownership.size or min(rows) < 0 or not any(rows):
        raise ConfigError(
            f"rows must have {ownership.size} numbers, one for each rank and not all 0, got "
            f"{list(rows)}"
        )
    rules = rules or ExchangeRules()
    passing = {r: num or 1 for r, num in enumerate(rows) if num or not rules.skips_dummies}
    module_s = {
        rank: costs.attention_s(num) if attention_s is None or not rows[rank] else attention_s[rank]
        for rank, num in passing.items()
    }
    products_s = _products_s(costs, list(passing.values()), ownership, rules)
    # layers repeat after one per owner
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
    return Exchange(
        seconds=max(times[rank] + costs.rest_s(rows[rank]) for rank in passing if rows[rank]),
        num_chains=num_chains,
        sent_rows=sent_rows,
        sent_bytes=2 * sent_rows * row_bytes,
        padding_rows=padding_rows,
    )


def exchange_threshold(
    costs: PassCosts,
    ownership: Ownership,
    fetch_s: float,
    *,
    row_bytes: float,
    links: GroupLinks,
    most: int,
    max_exchange_rows: int,
) -> float:
    """Return the rows per rank from which weight fetch is faster than activation exchange.

    Rows have one cached token, as when engines measure it.

    Args:
        fetch_s: seconds to fetch the weights of a pass.
        most: upper bound of the result.
        max_exchange_rows: largest number of rows of a rank in a pass with activation exchange.
    """
    measured = replace(costs, cached_tokens=1)

    def seconds(num_rows: int) -> float:
        rows = (num_rows,) * ownership.size
        return simulate_exchange(
            measured, ownership, rows, row_bytes=row_bytes, links=links
        ).seconds

    hiding = min(most, 1 + bisect_left(range(1, most + 1), fetch_s, key=seconds))
    return exchange_limit(
        hiding, most_rows=max_exchange_rows, exchange_s=seconds(max_exchange_rows), fetch_s=fetch_s
    )


class _Hops(NamedTuple):
    """Transfers of rows at one layer: seconds in one direction and sent rows, by rank."""

    num_owners: int
    seconds: dict[int, float]
    sent_rows: dict[int, int]


def _hops_of(
    ownership: Ownership, layer: int, passing: dict[int, int], row_bytes: float, links: GroupLinks
) -> _Hops:
    owners = sorted({ownership.owner(Unit(layer, t)) for t in range(ownership.num_shards)})
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
    """Return the seconds to send the rows of a rank to the owners of a layer, or back.

    Limited by the rank's link to all owners, and by an owner's link from all ranks.
    """
    others = [owner for owner in owners if owner != rank]
    if not others:
        return 0.0
    leaving = len(others) * passing[rank]
    entering = max(sum(num for r, num in passing.items() if r != owner) for owner in others)
    seconds = max(leaving / links.bytes_per_s, entering / links.owner_bytes_per_s)
    return links.latency_s + row_bytes * seconds


def _products_s(
    costs: ModuleSeconds, rows: Sequence[int], ownership: Ownership, rules: ExchangeRules
) -> float:
    if rules.is_fused:
        return costs.ffn_s(sum(rows), ownership.num_shards)
    return sum(costs.ffn_s(num, ownership.num_shards) for num in rows)
