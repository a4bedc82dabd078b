"""Groups whose ranks are threads of this process, each with a segment and slots of its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.loading.shared_weights import ShareMember
from raybatch.engine.weights.tiles import tiles_of, with_tiles
from raybatch.policy.ownership import Ownership, Unit

TIMEOUT_S = 60


class Table:
    """Where ranks exchange texts."""

    def __init__(self, size):
        self._barrier = threading.Barrier(size)
        self._texts = [""] * size

    def exchange(self, rank, text):
        self._texts[rank] = text
        self._barrier.wait(TIMEOUT_S)
        texts = list(self._texts)
        self._barrier.wait(TIMEOUT_S)
        return texts

    def leave(self):
        self._barrier.abort()


def load_group(path, ownership: Ownership, *, num_slots=None, configs=None):
    """Return the model of each rank, in order."""
    table, size = Table(ownership.size), ownership.size
    configs = configs or [EngineConfig(device="cpu", dtype="float32")] * size

    def load(rank):
        member = ShareMember(
            ownership=ownership,
            rank=rank,
            exchange=lambda text: table.exchange(rank, text),
            num_slots=num_slots,
        )
        try:
            return load_model(str(path), configs[rank], share=member)
        except Exception as error:
            table.leave()
            return error

    with ThreadPoolExecutor(size) as threads:
        loaded = list(threads.map(load, range(size)))
    errors = [one for one in loaded if isinstance(one, Exception)]
    # of those who wait for one that has ended, nobody knows why
    known = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (known or errors)[0]
    return loaded


def tiled(weights, ownership):
    """Return a model whose blocks are cut as a group shares them, all of them there."""
    return with_tiles(
        weights,
        {
            Unit(number, i): tile
            for number, layer in enumerate(weights.layers)
            for i, tile in enumerate(tiles_of(layer.ffn.tile, ownership.num_tiles))
        },
    )


def in_threads(runs):
    """Return what functions return that wait for each other."""
    with ThreadPoolExecutor(len(runs)) as threads:
        return [future.result(TIMEOUT_S) for future in [threads.submit(run) for run in runs]]
