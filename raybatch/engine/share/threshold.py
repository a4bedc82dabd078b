"""From how many rows of a pass on copies of others' weights hide behind it: measured at the start.

Source: SiDP's threshold B_th (section 4.3): the least batch whose pass takes as long as its copies.
"""

import logging
import math
import statistics
import time
from dataclasses import replace

import torch

from raybatch.engine.batch.forward_batch import on_device
from raybatch.engine.loading.peak_memory import largest_decodes
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.weights.shared_layers import SharedLayers
from raybatch.engine.weights.tile_ring import TileSlots
from raybatch.engine.weights.weight_copies import HostCopies
from raybatch.policy.decode_times import DecodeCurve

# rows of the passes that are timed, each so often behind a first one
_ROWS, _NUM_PASSES = (1, 4, 16, 64, 256), 3

_logger = logging.getLogger(__name__)


def measure_threshold(runner: ModelRunner, layers: SharedLayers) -> float:
    """Return the rows from which on copies hide, as a line beyond those that were tried.

    Runs passes in the pool, which holds nothing yet. What a pass waited for its copies does not
    count; on a GPU that cannot be told, so the threshold is a lower one there.
    """
    all_copies_s = copies_s(layers, runner.device)
    most = runner.num_blocks * runner.config.block_size_tokens // 2
    rows = [n for n in _ROWS if n <= min(most, runner.config.max_num_seqs)]
    if len(rows) < 2:
        return 0.0
    points = [(float(n), _pass_s(runner, layers, n)) for n in rows]
    curve = DecodeCurve.fit([(n, max(seconds, 1e-9)) for n, seconds in points])
    threshold = _hiding_rows(curve, all_copies_s, most=runner.config.max_num_seqs)
    _logger.info(
        "copies of shared weights take %.2f ms a pass, and hide behind passes of %.0f rows or more "
        "(a pass of 1 row takes %.2f ms, of %d rows %.2f)",
        1e3 * all_copies_s,
        threshold,
        1e3 * points[0][1],
        rows[-1],
        1e3 * points[-1][1],
    )
    return threshold


def _hiding_rows(curve: DecodeCurve, copies_s: float, *, most: int) -> float:
    """Return from how many rows on a pass takes as long as its copies, `most` at the most."""
    found = curve.hiding_rows(copies_s)
    if found is None:
        # a curve is a line beyond its last size
        growth = curve.at(most) - curve.seconds[-1]
        share = 1.0 if growth <= 0 else (copies_s - curve.seconds[-1]) / growth
        found = math.ceil(curve.rows[-1] + share * (most - curve.rows[-1]))
    return float(min(found, most))


def copies_s(layers: SharedLayers, device: torch.device) -> float:
    """Return the seconds of the copies of one pass, alone, into a slot beside those of the ring."""
    spare = TileSlots(layers.sources, 1, device)
    copies, seconds = HostCopies(spare.pairs), list[float]()
    for _ in range(1 + _NUM_PASSES):
        _finish(device)
        began = time.perf_counter()
        for unit in layers.sources:
            copies.copy(unit, 0)
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _pass_s(runner: ModelRunner, layers: SharedLayers, num_rows: int) -> float:
    config = replace(runner.config, max_num_seqs=num_rows)
    batch = on_device(largest_decodes(config), IndexUploads(runner.device), runner.device)
    seconds = []
    for _ in range(1 + _NUM_PASSES):
        _finish(runner.device)
        began, waited_s = time.perf_counter(), layers.counters.wait_s
        runner.decoder.forward(batch, runner.cache)
        _finish(runner.device)
        waited_s = layers.counters.wait_s - waited_s
        seconds.append(time.perf_counter() - began - waited_s)
    return statistics.median(seconds[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
