"""Measures the batch size from which weight fetch is as fast as activation exchange.

Weight fetch is hidden by a pass that takes as long (threshold B_th of SiDP, section 4.3). An
exchange pass takes the same time plus that of sending rows.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import on_device
from raybatch.engine.loading.peak_memory import largest_decodes
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.weights.layer_store import ShardSlots
from raybatch.engine.weights.weight_copies import HostCopies
from raybatch_extensions.sharing.decode_times import DecodeCurve
from raybatch_extensions.sharing.layers import SharedLayers
from raybatch_extensions.sharing.modes import exchange_limit

# batch sizes that are timed, and passes for each after one warm-up
_ROWS, _NUM_PASSES = (1, 4, 16, 64, 256), 3

_logger = logging.getLogger("raybatch.extensions.sharing.threshold")


def measure_threshold(
    runner: ModelRunner,
    layers: SharedLayers,
    *,
    fetch_s: float,
    rows_s: Callable[[int], float],
    most_rows: int,
) -> float:
    """Return the number of rows per step from which weight fetch has the higher throughput.

    Times are extrapolated linearly beyond the measured batch sizes. Runs passes in the empty KV
    pool, without fetching weights, and clears the pool afterwards.

    Args:
        fetch_s: seconds of weight fetch per pass, see `fetch_seconds`.
        rows_s: returns the seconds to send this many rows in a pass.
        most_rows: largest number of rows of a rank in an exchange pass.
    """
    most = runner.num_blocks * runner.config.block_size_tokens // 2
    rows = [n for n in _ROWS if n <= min(most, runner.config.max_num_seqs)]
    if len(rows) < 2:
        return 0.0
    # fills the slots with weights
    _run(runner, rows[0])
    try:
        with layers.still():
            points = [(float(n), _pass_s(runner, n) + rows_s(n)) for n in rows]
    finally:
        # the KV may be NaN
        runner.clear_blocks(np.arange(1, 2 + rows[-1] // runner.config.block_size_tokens))
    curve = DecodeCurve.fit([(n, max(seconds, 1e-9)) for n, seconds in points])
    hiding = _hiding_rows(curve, fetch_s, most=runner.config.max_num_seqs)
    threshold = exchange_limit(
        hiding, most_rows=most_rows, exchange_s=curve.at(most_rows), fetch_s=fetch_s
    )
    _logger.info(
        "a step takes %.2f ms of weight fetch, or with activation exchange %.2f ms for 1 row and "
        "%.2f ms for %d rows: exchange %s",
        1e3 * fetch_s,
        1e3 * points[0][1],
        1e3 * points[-1][1],
        rows[-1],
        "never pays" if threshold <= 1 else f"pays below {threshold:.0f} rows per rank",
    )
    return threshold


def _hiding_rows(curve: DecodeCurve, fetch_s: float, *, most: int) -> float:
    """Return the batch size at which a pass takes `fetch_s`, capped at `most`."""
    found = curve.hiding_rows(fetch_s)
    if found is None:
        # the curve is linear beyond its last point
        growth = curve.at(most) - curve.seconds[-1]
        share = 1.0 if growth <= 0 else (fetch_s - curve.seconds[-1]) / growth
        found = math.ceil(curve.rows[-1] + share * (most - curve.rows[-1]))
    return float(min(found, most))


def fetch_seconds(layers: SharedLayers, device: torch.device) -> float:
    """Measure the seconds to fetch all weights of one pass, in its order, into a spare slot.

    Peers may fetch at the same time, as in real passes. Call it before the KV pool takes the device
    memory.
    """
    spare = ShardSlots(layers.sources, 1, device)
    copies, seconds = HostCopies(spare.pairs), list[float]()
    for _ in range(1 + _NUM_PASSES):
        _finish(device)
        began = time.perf_counter()
        for unit in layers.ownership.fetches(layers.rank):
            copies.copy(unit, 0)
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _pass_s(runner: ModelRunner, num_rows: int) -> float:
    seconds = [_run(runner, num_rows) for _ in range(1 + _NUM_PASSES)]
    return statistics.median(seconds[1:])


def _run(runner: ModelRunner, num_rows: int) -> float:
    """Return the seconds of a decode pass of `num_rows`."""
    config = replace(runner.config, max_num_seqs=num_rows, speculative_tokens=None)
    batch = on_device(largest_decodes(config), IndexUploads(runner.device), runner.device)
    _finish(runner.device)
    began = time.perf_counter()
    runner.decoder.forward(batch, runner.cache)
    _finish(runner.device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
