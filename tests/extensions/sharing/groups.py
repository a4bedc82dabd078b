"""Groups whose ranks are threads of this process, each with its own segment and slots."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.weights.layer_store import OnDevice
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch_extensions.sharing.layers import add_shards_, shard_of
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_extensions.sharing.weights import ShareMember

TIMEOUT_S = 60


class Table:
    """Exchanges texts between ranks."""

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
            return load_model(str(path), configs[rank], place=member.place)
        except Exception as error:
            table.leave()
            return error

    with ThreadPoolExecutor(size) as threads:
        loaded = list(threads.map(load, range(size)))
    errors = [one for one in loaded if isinstance(one, Exception)]
    # ranks that wait for one that has failed do not know the reason
    known = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (known or errors)[0]
    return loaded


class ShardedLayers(OnDevice):
    """A model with its blocks cut into the shards of a group, all of them present."""

    is_streamed = False
    counters = WeightCounters()

    def __init__(self, weights, ownership):
        super().__init__(weights.layers)
        self._count = ownership.num_shards

    def shard(self, layer):
        return nullcontext(self.ffn(layer).shard)

    def shards(self, layer):
        block, count = self.ffn(layer).shard, self._count
        return [(i, nullcontext(shard_of(block, i, count))) for i in range(count)]

    def service(self, decoder):
        return partial(add_shards_, decoder, self.shards) if self._count > 1 else None


def decoder_of(model, layers=None):
    """Return a decoder, which uses the shards of layers if they have any."""
    ops = pick_ops(model.spec, model.weights, block_size=4, may_compile=False)
    decoder = Decoder(model.spec, model.weights, layers=layers, ops=ops)
    if layers is not None:
        decoder.ffn_service = layers.service(decoder)
    return decoder


def in_threads(runs):
    """Return the results of functions that wait for each other."""
    with ThreadPoolExecutor(len(runs)) as threads:
        return [future.result(TIMEOUT_S) for future in [threads.submit(run) for run in runs]]
