"""Limits that stop a run early: budgets, wall time, error rate."""

from dataclasses import dataclass

from raybatch.config import LimitConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    wall_s: float = 0.0
    engine_s: float = 0.0
    num_replicas: int = 0
    cost: float = 0.0
    tokens: int = 0
    rows_done: int = 0
    rows_failed: int = 0


def amount_of_money(cost: float) -> str:
    """Format a cost for humans; small ones keep three digits.

    Example:
        >>> amount_of_money(12.345), amount_of_money(0.00012345)
        ('12.35', '0.000123')
    """
    return f"{cost:.2f}" if cost >= 0.1 or not cost else f"{cost:.3g}"


def reason_to_stop(limits: LimitConfig, spent: Spent) -> str | None:
    """Return why no further unit may start; None within all limits."""
    if limits.max_wall_s is not None and spent.wall_s >= limits.max_wall_s:
        return f"limits.max_wall_s reached: {spent.wall_s:.0f} s have passed"
    if limits.max_tokens is not None and spent.tokens >= limits.max_tokens:
        return f"limits.max_tokens reached: {spent.tokens} tokens generated"
    if limits.max_engine_hours is not None and spent.engine_s >= 3600 * limits.max_engine_hours:
        return f"limits.max_engine_hours reached: {spent.engine_s / 3600:.2f} engine hours"
    if limits.max_cost is not None:
        price = limits.price_per_engine_hour or 0.0
        cost = spent.cost + spent.wall_s / 3600 * spent.num_replicas * price
        if cost >= limits.max_cost:
            return f"limits.max_cost reached: {amount_of_money(cost)} for engines and answers"
    if limits.max_error_rate is not None and spent.rows_done >= limits.min_rows_for_error_rate:
        rate = spent.rows_failed / spent.rows_done
        if rate > limits.max_error_rate:
            return (
                f"limits.max_error_rate exceeded: {spent.rows_failed} of {spent.rows_done} rows "
                f"failed ({100 * rate:.1f} %)"
            )
    return None
