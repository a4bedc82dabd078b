"""The probe: some rows are generated before planning, to estimate output lengths.

Their results are written like all others. An estimate orders work and predicts its end; it never
limits the tokens of a row.
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

# more rows hardly change the mean
_MAX_ROWS = 20_000


def probe_rows(
    group_id: Ints, max_tokens: Ints, plan: PlanConfig, *, num_rows: int | None = None
) -> Ints:
    """Choose the rows whose output lengths are probed: int64 [n], ascending positions.

    Rows are stratified by `max_tokens`, see `choose_probe`. `num_rows` are the rows of the whole
    input, if these are only a part of it.
    """
    fraction = min(plan.probe_fraction, _MAX_ROWS / max(1, num_rows or len(group_id)))
    return choose_probe(group_id, _strata(max_tokens), fraction=fraction, seed=plan.seed)


def _strata(max_tokens: Ints) -> Ints:
    """Return the band of each row's `max_tokens`; bands double in width: int64 [R]."""
    return np.log2(np.maximum(max_tokens, 1)).astype(np.int64)


def generated_lengths(rows: Ints, finished: pa.Table, output: OutputSchema) -> Floats:
    """Return the tokens that each row has generated, over all its samples: float64 [n].

    A row with an error has NaN. `rows` are row numbers of the source, and `finished` has these rows
    in any order. The mean is logged.
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
        "probed %d rows: %.1f output tokens on average, at most %d; their results are kept",
        len(lengths),
        float(known.mean()) if len(known) else 0.0,
        int(known.max(initial=0)),
    )
    return lengths


def estimate(probe: Ints, lengths: Floats, group_id: Ints, max_tokens: Ints) -> Floats:
    """Return output tokens of each row as a probe predicts, float64 [R], at most `max_tokens`.

    Args:
        probe: int64 [n], positions of the probed rows.
        lengths: float64 [n], output tokens of these; NaN after an error.
        group_id: int64 [R], -1 for a row in no group.
    """
    is_known = ~np.isnan(lengths)
    if not is_known.any():
        return max_tokens.astype(float)
    known, strata = probe[is_known], _strata(max_tokens)
    estimated = estimate_from_probe(known, lengths[is_known], group_id, strata)
    return np.clip(estimated, 1, max_tokens)


def choose_probe(group_id: Ints, strata: Ints, *, fraction: float, seed: int = 0) -> Ints:
    """Choose the rows to generate first: int64 [n], ascending positions.

    `strata`, int64 [R], separates rows that may differ in length, by template, model, adapter or a
    band of `max_tokens`. Every stratum contributes its share, rounded up. Inside a stratum rows are
    spread evenly over groups sorted by id, at random inside a group. O(R log R).
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
    """Return the expected length of each row, float64 [R], from the lengths of probed rows.

    It is the mean of the probed rows of its group, else of its stratum, else of the whole probe; a
    probed row has its own length.

    Source: BlendServe, arXiv:2411.16102, section 5; strata in place of neighbouring subtrees.
    """
    assert len(probe_rows), "a probe without rows gives no estimate"
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
