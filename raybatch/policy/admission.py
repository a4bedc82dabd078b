"""When rows wait although memory has room: where being computed again would cost more."""

# tokens that a device computes in the time in which it reads the weights once; 140 to 300 on GPUs,
# and where it is less, rows only wait more seldom than would pay
WEIGHT_READ_TOKENS = 180


def full_step_tokens(*, weight_bytes: int, kv_bytes: int, used_fraction: float = 1.0) -> float:
    """Return from how many tokens on each one more makes a step longer.

    Below, a step takes as long as reading the weights and a full cache: tokens that are computed
    again cost nothing there, and a row that waits is a step more.

    Args:
        weight_bytes: that a step reads.
        kv_bytes: of a full cache.
        used_fraction: of the weights that one token is multiplied with; of experts a few.

    Example:
        >>> full_step_tokens(weight_bytes=16, kv_bytes=4)
        225.0
    """
    return WEIGHT_READ_TOKENS * (1 + kv_bytes / weight_bytes) / used_fraction
