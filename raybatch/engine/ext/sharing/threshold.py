"""From how many rows on passes with copies of weights are as short as rounds: measured once.

Copies hide behind a pass that takes as long (SiDP's threshold B_th, section 4.3). A round is such a
pass whose rows travel besides.
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
from raybatch.engine.ext.sharing.layers import SharedLayers
from raybatch.engine.loading.peak_memory import largest_decodes
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.weights.tile_ring import TileSlots
from raybatch.engine.weights.weight_copies import HostCopies
from raybatch.policy.decode_times import DecodeCurve
from raybatch.policy.sharing import round_limit

# rows of the passes that are timed, each so often behind a first one
_ROWS, _NUM_PASSES = (1, 4, 16, 64, 256), 3

_logger = logging.getLogger(__name__)


def measure_threshold(
    runner: ModelRunner,
    layers: SharedLayers,
    *,
    copies_s: float,
    rows_s: Callable[[int], float],
    most_rows: int,
) -> float:
    """Return the rows from which on passes with copies do more in a second than rounds.

    Beyond the numbers of rows that are tried, times are on a line. Runs passes in the pool, which
    holds nothing yet nor afterwards; they copy nothing.

    Args:
        copies_s: of one pass, see `seconds_of_copies`.
        rows_s: that so many rows of a pass travel.
        most_rows: of a rank in a round.
    """
    most = runner.num_blocks * runner.config.block_size_tokens // 2
    rows = [n for n in _ROWS if n <= min(most, runner.config.max_num_seqs)]
    if len(rows) < 2:
        return 0.0
    # slots hold weights from then on
    _run(runner, rows[0])
    try:
        with layers.still():
            points = [(float(n), _pass_s(runner, n) + rows_s(n)) for n in rows]
    finally:
        # others would read what is no number
        runner.clear_blocks(np.arange(1, 2 + rows[-1] // runner.config.block_size_tokens))
    curve = DecodeCurve.fit([(n, max(seconds, 1e-9)) for n, seconds in points])
    hiding = _hiding_rows(curve, copies_s, most=runner.config.max_num_seqs)
    threshold = round_limit(
        hiding, most_rows=most_rows, rounds_s=curve.at(most_rows), copies_s=copies_s
    )
    _logger.info(
        "copies of shared weights take %.2f ms a pass, rounds of 1 row %.2f and of %d rows %.2f: "
        "rows travel %s",
        1e3 * copies_s,
        1e3 * points[0][1],
        rows[-1],
        1e3 * points[-1][1],
        "never" if threshold <= 1 else f"where there are fewer than {threshold:.0f}",
    )
    return threshold


def _hiding_rows(curve: DecodeCurve, copies_s: float, *, most: int) -> float:
    """Return from how many rows on a curve is at the seconds of copies, `most` at the most."""
    found = curve.hiding_rows(copies_s)
    if found is None:
        # a curve is a line beyond its last size
        growth = curve.at(most) - curve.seconds[-1]
        share = 1.0 if growth <= 0 else (copies_s - curve.seconds[-1]) / growth
        found = math.ceil(curve.rows[-1] + share * (most - curve.rows[-1]))
    return float(min(found, most))


def seconds_of_copies(layers: SharedLayers, device: torch.device) -> float:
    """Return the seconds of the copies of one pass, in its order, into a slot of its own.

    Others may copy at the same time, as they do in passes. To be called before a device's memory is
    given to KV.
    """
    spare = TileSlots(layers.sources, 1, device)
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
    """Return the seconds of a decode pass of so many rows."""
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
