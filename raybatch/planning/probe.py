"""A probe: some rows are generated before the plan is made, to learn how long outputs are.

Their results stay in the output like all others.
"""

import logging

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.config import PlanConfig
from raybatch.durable.journal import ROW
from raybatch.planning.tally import counted_columns
from raybatch.prefix.lengths import choose_probe, estimate_from_probe
from raybatch.rows.schema import ERROR_COLUMN, OutputSchema

logger = logging.getLogger(__name__)

# more rows change no mean
_MAX_ROWS = 20_000

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def probe_rows(
    group_id: Int64s, max_tokens: Int64s, plan: PlanConfig, *, num_rows: int | None = None
) -> Int64s:
    """Choose the rows of a probe: int64 [n], positions in rising order.

    Args:
        group_id: int64 [R], -1 for a row that is alone.
        max_tokens: int64 [R], longest outputs; rows with different ones may differ in length.
        num_rows: of the whole input, where these are a part of it.
    """
    most = _MAX_ROWS / max(1, num_rows or len(group_id))
    fraction = min(plan.probe_fraction, most)
    return choose_probe(group_id, strata_of(max_tokens), fraction=fraction, seed=plan.seed)


def strata_of(max_tokens: Int64s) -> Int64s:
    """Return bands of longest outputs, each twice as wide as the one below: int64 [R]."""
    return np.log2(np.maximum(max_tokens, 1)).astype(np.int64)


def generated_lengths(rows: Int64s, finished: pa.Table, output: OutputSchema) -> Floats:
    """Return the tokens that rows have generated over all samples, float64 [n]; NaN after an error.

    Args:
        rows: int64 [n], their numbers in the source.
        finished: their results in any order, with these numbers in a column.
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
    return np.where(is_failed, np.nan, totals)[place]


def log_probe(lengths: Floats) -> None:
    """Log the lengths that a probe measured; NaN after an error."""
    known = lengths[~np.isnan(lengths)]
    logger.info(
        "probed %d rows: %.1f tokens on average, at most %d; their results are kept",
        len(lengths),
        float(known.mean()) if len(known) else 0.0,
        int(known.max(initial=0)),
    )


def estimate(probe: Int64s, lengths: Floats, group_id: Int64s, max_tokens: Int64s) -> Floats:
    """Return the output to expect of each row, float64 [R], at most what it may generate.

    Args:
        probe: int64 [n], the rows that were generated.
        lengths: float64 [n], what they generated; NaN after an error.
        group_id: int64 [R], -1 for a row that is alone.
        max_tokens: int64 [R], longest outputs.
    """
    is_known = ~np.isnan(lengths)
    if not is_known.any():
        return max_tokens.astype(float)
    estimated = estimate_from_probe(
        probe[is_known], lengths[is_known], group_id, strata_of(max_tokens)
    )
    return np.clip(estimated, 1, max_tokens)
