"""Who starts next where rows wait for an engine: the shortest, or a batch of rows of like length.

Pure arithmetic over the entries of a queue: rows that are alone, and prefix groups, which no order
takes apart. Lengths are predictions; a wrong one costs time and changes no token.
"""

import math

import numpy as np

from raybatch.config import AdmissionPolicy
from raybatch.errors import ConfigError, range_text
from raybatch.records.arrays import Floats, Ints

# an entry is passed only by those that arrive within so many times its own steps after it
PATIENCE = 8.0
# more gain little: a bin of 1/16 of the rows is narrow wherever lengths are not in the tail
MAX_BINS = 16


def batches_ahead(policy: AdmissionPolicy) -> int:
    """Return how many times the rows that run at once should wait in an engine of a pool.

    A policy can choose among the rows alone that wait where it is applied; the order of arrival
    needs no choice, and 0 leaves the number to the pool.
    """
    return {"fcfs": 0, "static": 1, "shortest": 2, "multi_bin": 8}[policy]


def predicted_steps(num_output: int, num_prompt: int, step_tokens: int) -> float:
    """Return how many steps a row likely takes: one a token, and its prompt's share of steps."""
    if step_tokens < 1:
        raise ConfigError(f"a step of {step_tokens} tokens; it takes at least one")
    return num_output + num_prompt / step_tokens


def shortest_first(service: Floats, arrival_step: Ints, *, patience: float = PATIENCE) -> Ints:
    """Return the entries in the order in which they start: the shortest first, with ageing.

    An entry counts as if it had arrived `patience` times its own steps later. So entries
    that arrive together start by length, and none is passed by entries that arrive later than that:
    nobody waits for ever, and a long row waits no longer in proportion than a short one. Equal ones
    keep the order of their arrays. E log E.

    Args:
        service: float64 [E], predicted steps of each entry; the mean of a group's members.
        arrival_step: int64 [E], steps of the engine before the entry came.
    """
    if not 0 <= patience < math.inf:
        allowed = range_text("at least 0", patience)
        raise ConfigError(f"a patience of {patience}; it must be {allowed}")
    return np.argsort(arrival_step + patience * service, kind="stable")


def next_batch(
    service: Floats, num_rows: Ints, *, batch_rows: int, max_bins: int = MAX_BINS
) -> Ints:
    """Return the entries that run as the next batch: rows of like length, the oldest among them.

    The rows are cut into bins of like length with as many rows each (quantiles, so that a long tail
    does not leave most rows in one bin); there are `max_bins`, or as many as hold a whole batch.
    The bin of the oldest entry gives the batch, in the order of arrival. So every batch has the
    oldest entry, and nobody waits for more batches than there are entries before it. E log E.

    Args:
        service: float64 [E], predicted steps of each entry, the oldest first; the largest of a
            group's members.
        batch_rows: that run at once. The last entry may hold more than are left.

    Source: arXiv:2412.04504, which has bins with borders that are known beforehand and waits until
    one of them holds a batch.

    Example:
        >>> next_batch(np.array([9.0, 1, 8, 2]), np.ones(4, np.int64), batch_rows=2).tolist()
        [0, 2]
    """
    if batch_rows < 1 or max_bins < 1:
        raise ConfigError(f"a batch of {batch_rows} rows from {max_bins} bins; both are at least 1")
    if not len(service):
        return np.empty(0, np.int64)
    by_service = np.argsort(service, kind="stable")
    ends = np.cumsum(num_rows[by_service])
    total = int(ends[-1])
    num_bins = min(max_bins, max(1, total // batch_rows))
    bins = np.empty(len(service), np.int64)
    # by its first row, as an entry is in one bin
    bins[by_service] = (ends - num_rows[by_service]) * num_bins // total
    like_oldest = np.flatnonzero(bins == bins[0])
    num_before = np.cumsum(num_rows[like_oldest]) - num_rows[like_oldest]
    return like_oldest[num_before < batch_rows]
