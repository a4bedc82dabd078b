"""How many prompt tokens each order of the rows would compute, for a KV cache of a given size.

input    in the order of the input, with a prefix cache alone
sorted   by prompt, with a prefix cache alone
planned  as the plan has it: prefixes pinned while their groups live, identical rows once
bound    every shared prefix at every depth computed once: a cache that holds everything
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.hits import (
    CacheLoad,
    CacheSize,
    estimate_hit_rate,
    half_width,
    simulate_hits,
    windows_of,
)
from raybatch.prefix.plan import Arrangement, RowPlan
from raybatch.records.arrays import Floats, Ints

ForecastName = Literal["input", "sorted", "planned", "bound"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderForecast:
    """What one order would compute."""

    name: ForecastName
    prompt_tokens: int
    computed_tokens: int  # those whose KV an engine computes
    # half width of the 95 % interval of the hit rate; 0 where all rows were simulated
    error: float = 0.0
    # the sample was too short to fill the cache, so there may be more hits
    is_lower_bound: bool = False
    num_rows_too_large: int = 0  # rows that do not fit the cache even alone, and are left out

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that need no computing; 0 where there are none."""
        return self.saved_tokens / max(1, self.prompt_tokens)

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens


def forecast_orders(
    keys: BlockKeys,
    plan: RowPlan,
    arrangement: Arrangement,
    *,
    output_tokens: Floats,
    size: CacheSize,
    max_rows: int = 100_000,
) -> tuple[OrderForecast, ...]:
    """Forecast all four orders; rows that do not fit the cache are left out of all of them.

    The cost is that of simulating `max_rows` rows three times; of more rows, evenly spaced windows
    are taken.
    """
    load, tree = CacheLoad(keys=keys, output_tokens=output_tokens), arrangement.tree
    in_input = load.rows_that_fit(size)
    fits = np.zeros(keys.num_rows, np.bool_)
    fits[in_input] = True
    is_generated = fits & (arrangement.groups.representative == np.arange(keys.num_rows))
    in_plan = plan.order[is_generated[plan.order]]
    # each node above a generated row is computed once
    num_before = np.concatenate([[0], np.cumsum(is_generated[tree.row_order])])
    is_used = num_before[tree.row_stop] > num_before[tree.row_start]
    own = np.maximum(keys.num_tokens - tree.depth_tokens[tree.deepest_nodes()], 1)
    bound = int(tree.edge_tokens()[is_used].sum() + own[is_generated].sum())
    orders = (
        _cached("input", load, in_input, size, max_rows),
        _cached("sorted", load, tree.row_order[fits[tree.row_order]], size, max_rows),
        _planned(load, plan, in_plan, size, max_rows),
        OrderForecast(name="bound", prompt_tokens=0, computed_tokens=bound),
    )
    return tuple(
        replace(
            order,
            # copies are prompt tokens that need no computing
            prompt_tokens=int(keys.num_tokens[in_input].sum()),
            # an order from a sample may seem to compute less than the bound
            computed_tokens=max(bound, order.computed_tokens),
            num_rows_too_large=keys.num_rows - len(in_input),
        )
        for order in orders
    )


def _cached(
    name: ForecastName, load: CacheLoad, order: Ints, size: CacheSize, max_rows: int
) -> OrderForecast:
    """Forecast an order that has a prefix cache alone."""
    estimate = estimate_hit_rate(load, order, size, max_rows=max_rows)
    prompt_tokens = int(load.keys.num_tokens[order].sum())
    return OrderForecast(
        name=name,
        prompt_tokens=prompt_tokens,
        computed_tokens=round(prompt_tokens * (1 - estimate.rate)),
        error=estimate.error,
        is_lower_bound=estimate.is_lower_bound,
    )


def _planned(
    load: CacheLoad, plan: RowPlan, order: Ints, size: CacheSize, max_rows: int
) -> OrderForecast:
    """Forecast the rows that are generated.

    A group runs in one go, so the simulated cache finds at least what the group pins. That part is
    known for all rows; of many rows only the rest is simulated, in windows that begin with an
    empty cache and count their second half.
    """
    num_tokens, group_id = load.keys.num_tokens[order], plan.group_id[order]
    prompt_tokens, error, block_size = int(num_tokens.sum()), 0.0, load.keys.block_size
    # the last token of a prompt is always computed, and with it its block
    last = (num_tokens - 1) // block_size * block_size
    pinned = np.where(group_id >= 0, np.minimum(plan.prefix_len[order], last), 0)
    # where a group begins, its prefix is computed; also when others ran in between, as a probe's do
    pinned[np.diff(group_id, prepend=-1) != 0] = 0
    if not size.finds_blocks:
        computed = prompt_tokens - int(pinned.sum())
    elif len(order) <= max_rows:
        computed = prompt_tokens - int(simulate_hits(load, order, size).sum())
    else:
        windows = windows_of(len(order), max_rows)
        extra = np.zeros(len(windows))
        for i, (window, counted) in enumerate(windows):
            hits = simulate_hits(load, order[window], size)[counted.start - window.start :]
            more = np.maximum(hits - pinned[counted], 0)
            extra[i] = more.sum() / max(1, num_tokens[counted].sum())
        computed = round(prompt_tokens * (1 - extra.mean())) - int(pinned.sum())
        error = half_width(extra)
    return OrderForecast(
        name="planned", prompt_tokens=prompt_tokens, computed_tokens=computed, error=error
    )


def merge_forecasts(
    parts: Sequence[tuple[OrderForecast, ...]],
    windows: Sequence[tuple[int, int]],
    *,
    is_whole: bool = False,
) -> tuple[OrderForecast, ...]:
    """Return the forecasts of all parts of an input together.

    The parts' forecast of the order of the input is not used, because a part is no stretch of it;
    in its place are cached and all prompt tokens of stretches, which may be all of the input.
    """
    merged = []
    for orders in zip(*parts, strict=True):
        weights = np.array([order.prompt_tokens for order in orders], float)
        errors = np.array([order.error for order in orders]) * weights
        merged.append(
            OrderForecast(
                name=orders[0].name,
                prompt_tokens=int(weights.sum()),
                computed_tokens=sum(order.computed_tokens for order in orders),
                error=float(np.sqrt((errors**2).sum()) / max(1.0, weights.sum())),
                is_lower_bound=any(order.is_lower_bound for order in orders),
                num_rows_too_large=sum(order.num_rows_too_large for order in orders),
            )
        )
    cached, tokens = np.array(windows, float).T
    rate = cached.sum() / max(1.0, tokens.sum())
    computed = round(merged[0].prompt_tokens * (1 - rate))
    from_input = replace(
        merged[0],
        computed_tokens=max(merged[-1].computed_tokens, computed),
        error=half_width(cached / np.maximum(tokens, 1)),
        is_lower_bound=not is_whole,
    )
    return (from_input, *merged[1:])
