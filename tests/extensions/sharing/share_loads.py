"""Loads of the ranks of a group."""

from collections.abc import Iterable, Sequence

from raybatch_extensions.sharing.modes import RankLoad


def loads_of(active: Sequence[int], batches: Iterable[float]) -> tuple[RankLoad, ...]:
    """Return the loads of ranks 0, 1, ... by what they decode and the rows of their passes."""
    pairs = zip(active, batches, strict=True)
    return tuple(
        RankLoad(rank=rank, num_active=num_active, mean_batch=batch)
        for rank, (num_active, batch) in enumerate(pairs)
    )
