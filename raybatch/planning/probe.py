"""A probe: some rows are generated before the plan is made, to learn how long outputs are.

Their results stay in the output like all others. An estimate orders work and predicts its end; it
is never a limit of what a row may generate.
"""

import logging

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.config import PlanConfig
from raybatch.durable.journal import ROW
from raybatch.planning.tally import counted_columns
from raybatch.prefix.block_keys import ranges
from raybatch.records.arrays import Floats, Ints
from raybatch.rows.schema import ERROR_COLUMN, OutputSchema

logger = logging.getLogger(__name__)

# more rows change no mean
_MAX_ROWS = 20_000


def probe_rows(
    group_id: Ints, max_tokens: Ints, plan: PlanConfig, *, num_rows: int | None = None
) -> Ints:
    """Choose the rows of a probe: int64 [n], positions in rising order; see `choose_probe`.

    Rows with different longest outputs may differ in length. `num_rows` is that of the whole input.
    """
    fraction = min(plan.probe_fraction, _MAX_ROWS / max(1, num_rows or len(group_id)))
    return choose_probe(group_id, _strata(max_tokens), fraction=fraction, seed=plan.seed)


def _strata(max_tokens: Ints) -> Ints:
    """Return bands of longest outputs, each twice as wide as the one below: int64 [R]."""
    return np.log2(np.maximum(max_tokens, 1)).astype(np.int64)


def generated_lengths(rows: Ints, finished: pa.Table, output: OutputSchema) -> Floats:
    """Return the tokens that rows have generated over all samples, float64 [n]; NaN after an error.

    Results are in any order, with the numbers of their rows. What was measured is told in the log.
    """
    results = counted_columns(finished, output)
    generated = results.column("num_generated_tokens").combine_chunks()
    if output.num_samples > 1:
        flat = pc.list_flatten(generated).fill_null(0).to_numpy(zero_copy_only=False)
        totals = flat.reshape(-1, output.num_samples).sum(axis=1).astype(float)
    else:
        totals = generated.cast(pa.float64()).to_numpy(zero_copy_only=False)
    is_failed = pc.not_equal(results.column(ERROR_COLUMN), "").to_numpy()
    row_numbers = finished.column(ROW).to_numpy()
    order = np.argsort(row_numbers)
    place = order[np.searchsorted(row_numbers, rows, sorter=order)]
    lengths: Floats = np.where(is_failed, np.nan, totals)[place]
    known = lengths[~np.isnan(lengths)]
    logger.info(
        "probed %d rows: %.1f tokens on average, at most %d; their results are kept",
        len(lengths),
        float(known.mean()) if len(known) else 0.0,
        int(known.max(initial=0)),
    )
    return lengths


def estimate(probe: Ints, lengths: Floats, group_id: Ints, max_tokens: Ints) -> Floats:
    """Return the output to expect of each row, float64 [R], at most its longest, `max_tokens`.

    Args:
        probe: int64 [n], the rows that were generated.
        lengths: float64 [n], what they generated; NaN after an error.
        group_id: int64 [R], -1 for a row that is alone.
    """
    is_known = ~np.isnan(lengths)
    if not is_known.any():
        return max_tokens.astype(float)
    known, strata = probe[is_known], _strata(max_tokens)
    estimated = estimate_from_probe(known, lengths[is_known], group_id, strata)
    return np.clip(estimated, 1, max_tokens)


def choose_probe(group_id: Ints, strata: Ints, *, fraction: float, seed: int = 0) -> Ints:
    """Choose the rows whose outputs are generated first: int64 [n], positions in rising order.

    Every stratum gives its share, rounded up, and so at least one row: strata set rows apart that
    may differ in length, by template, model, adapter or a band of `max_tokens`. Inside a stratum
    the rows are spread evenly over groups sorted by id, at random inside a group. O(R log R).
    """
    assert 0 < fraction <= 1, f"a probe of {fraction} of the rows"
    random = np.random.default_rng(seed)
    by_stratum = np.lexsort((random.random(len(strata)), group_id, strata))
    _, first, count = np.unique(strata[by_stratum], return_index=True, return_counts=True)
    num_chosen = np.ceil(fraction * count).astype(np.int64)
    stride = count / np.maximum(num_chosen, 1)
    start = random.random(len(count))
    nth = ranges(np.zeros_like(num_chosen), num_chosen)
    within = np.floor((nth + np.repeat(start, num_chosen)) * np.repeat(stride, num_chosen))
    within = np.minimum(within.astype(np.int64), np.repeat(count, num_chosen) - 1)
    return np.sort(by_stratum[np.repeat(first, num_chosen) + within])


def estimate_from_probe(probe_rows: Ints, lengths: Floats, group_id: Ints, strata: Ints) -> Floats:
    """Return float64 [R]: the mean length of a row's group in the probe, else of its stratum.

    A row without either gets the mean of the whole probe, one of the distinct rows of the probe its
    own length.

    Source: BlendServe, arXiv:2411.16102, section 5; strata in place of neighbouring subtrees.
    """
    assert len(probe_rows), "no lengths can be estimated from a probe without rows"
    estimate = np.full(len(group_id), lengths.mean())
    for label in (strata, group_id):
        known, which = np.unique(label[probe_rows], return_inverse=True)
        mean = np.bincount(which, weights=lengths) / np.bincount(which)
        at = np.minimum(np.searchsorted(known, label), len(known) - 1)
        is_known = known[at] == label
        if label is group_id:
            is_known &= group_id >= 0
        estimate[is_known] = mean[at][is_known]
    estimate[probe_rows] = lengths
    return estimate
