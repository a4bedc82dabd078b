"""The device's pool as KV of two layers at a time, for prompts whose KV goes to host memory."""

import torch

from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.sequences.schedule import LayerMoves


class LayerWindow:
    """Lends the memory of a pool to two layers, as a pool of more blocks for fewer layers.

    ```
    pool, while sequences decode      | layer 0 | layer 1 | layer 2 | layer 3 |   N blocks each
    window, while prompts are computed|  layers 0, 2, ... |  layers 1, 3, ... |   2 N blocks each
    ```

    Nothing decodes while prompts are computed, so the pool holds nothing. A layer writes the KV of
    a step into one half, from where it goes to host memory, and the next layer has the other half
    meanwhile. What a step reads of earlier chunks comes back from the host, layer by layer.

    Args:
        pool: of the device, [L, N, G, B, R], contiguous.
        tiers: copies between it and host memory.

    Source:
        BatchGen (arXiv:2606.21712), section 5.2; that the window lies in the pool of decoding
        sequences is this library's.
    """

    def __init__(self, pool: KVCache, tiers: KVTiers) -> None:
        num_layers, num_blocks = pool.k.shape[:2]
        self._tiers = tiers
        num_halves = min(2, num_layers)
        self.num_blocks = num_layers * num_blocks // num_halves
        halves = [
            (_half(pool.k, i, self.num_blocks), _half(pool.v, i, self.num_blocks))
            for i in range(num_halves)
        ]
        self._halves = [KVCache(k=k, v=v) for k, v in halves]
        # every layer of such a cache is the same memory
        self._caches = [
            KVCache(k=k.expand(num_layers, *k.shape), v=v.expand(num_layers, *v.shape))
            for k, v in halves
        ]

    def cache(self, layer_idx: int) -> KVCache:
        """Return where a layer writes and reads, in the form that the decoder takes."""
        return self._caches[layer_idx % len(self._caches)]

    def load(self, layer_idx: int, moves: LayerMoves) -> None:
        """Bring what the step reads of a layer back from host memory."""
        if len(moves.load_blocks):
            half = self._halves[layer_idx % len(self._halves)]
            self._tiers.load_layer(layer_idx, moves.load_host, half, moves.load_blocks)

    def save(self, layer_idx: int, moves: LayerMoves) -> None:
        """Copy what the step wrote of a layer to host memory."""
        half = self._halves[layer_idx % len(self._halves)]
        self._tiers.save_layer(layer_idx, half, moves.save_blocks, moves.save_host)

    def finish(self) -> None:
        """Wait until host memory has all that was saved."""
        self._tiers.finish_layers()


def _half(pool: torch.Tensor, place: int, num_blocks: int) -> torch.Tensor:
    """Return one half of a pool's memory as blocks, [W, G, B, R]."""
    return pool.view(-1, *pool.shape[2:])[place * num_blocks : (place + 1) * num_blocks]
