"""One rank of a TP group: its check, its slice of the model, and the KV pool of its heads."""

import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import KVCache, copy_blocks, read_blocks, write_blocks
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import ModelSpec
from raybatch.records.arrays import Ints
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.tp_groups.group import RankGroup
from raybatch_extensions.tp_groups.slices import (
    SliceCost,
    heads_of,
    spec_of,
    vocabulary_of,
    weights_of,
    why_not_cut,
)

# blocks with all heads per message; bounds the temporary memory
PIECE_BLOCKS = 64
# dtype to read and write KV, by bytes per element
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCheck:
    """What a rank reports before any KV is copied: whether it can join the TP group.

    Args:
        refusal: why it cannot join; "" if it can.
        compatibility: must be equal on all ranks: weights, dtypes, block size, CPU instruction set,
            because each rank routes tokens to experts with its own rounding.
        num_blocks: capacity of its pool in blocks with the KV heads of its rank.
        slice_bytes: bytes of weights that it copied, in `slice_s` seconds.
    """

    refusal: str = ""
    compatibility: str = ""
    num_blocks: int = 0
    slice_bytes: int = 0
    slice_s: float = 0.0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))


def why_not_partitioned(runner: ModelRunner, size: int) -> str | None:
    """Return why a TP group of `size` ranks cannot run this runner's model; None if it can."""
    refusal = why_not_cut(runner.spec, size)
    if refusal is not None:
        return refusal
    if runner.window is not None or runner.tiers.num_host_blocks:
        return "part of its KV is in host memory"
    if runner.decoder.layers.is_streamed:
        return "not all of its layers are resident on the device"
    return None


def compatibility_of(prepared: PreparedModel, runner: ModelRunner) -> str:
    device = prepared.model.device
    host = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        host = torch.cuda.get_device_name(device)
    may_compile = prepared.config.compiles_kernels
    return f"{runner.kv_key}, torch {torch.__version__}, {host}, compiled: {may_compile}"


def view_of_heads(pool: KVCache, num_heads: int) -> KVCache:
    """Return a pool [L, N, G, B, R] viewed as more blocks of `num_heads` KV heads; it divides G."""
    num_layers, _, _, *row = pool.k.shape
    shape = (num_layers, -1, num_heads, *row)
    return KVCache(k=pool.k.view(shape), v=pool.v.view(shape))


class TPRank:
    """Executes the messages of a TP group on the heads of one rank; used by one thread.

    Args:
        spec: of the whole model.
        cache: KV of this rank's heads, [L, N, G / tp, B, R].
        vocabularies: vocabulary range of each rank.
    """

    def __init__(
        self,
        call: RankInit,
        group: RankGroup,
        spec: ModelSpec,
        decoder: Decoder,
        cache: KVCache,
        vocabularies: list[slice],
    ) -> None:
        self._rank, self._group = call.rank, group
        self._decoder, self._cache = decoder, cache
        self._device = cache.k.device
        self._uploads = IndexUploads(self._device)
        self._heads = [heads_of(spec, rank, call.size)[1] for rank in range(call.size)]
        self._widths = [x.stop - x.start for x in vocabularies]
        self._all_heads = spec.num_kv_heads

    def step(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Run a host batch; return the logits [S, V] on rank 0."""
        placed = on_device(batch, self._uploads, self._device)
        logits = self._decoder.forward(placed, self._cache)
        # gather needs equal shapes, and rank 0 has the largest slice
        padded = functional.pad(logits, (0, self._widths[0] - logits.shape[1]))
        parts = self._group.gather(padded)
        if not parts:
            return None
        kept = [part[:, :width] for part, width in zip(parts, self._widths, strict=True)]
        return torch.cat(kept, dim=1).to(self._device)

    def copy(self, source_ids: Ints, target_ids: Ints) -> None:
        copy_blocks(self._cache, source_ids, target_ids)

    def clear(self, block_ids: Ints) -> None:
        for pool in (self._cache.k, self._cache.v):
            pool[:, block_ids] = 0

    def write(self, block_ids: Ints, rows: npt.NDArray[Any] | None) -> None:
        """Write blocks with all KV heads, given on rank 0; each rank keeps its heads.

        `rows` are as `kv_cache.read_blocks` returns them; None on other ranks.
        """
        shape = self._shape(len(block_ids), self._all_heads)
        if rows is None:
            rows = np.empty(shape, _BITS[self._cache.k.element_size()])
        payload = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
        self._group.broadcast_(payload)
        whole = payload.numpy().view(rows.dtype).reshape(shape)
        write_blocks(self._cache, self.heads_in(whole, self._rank), block_ids)

    def read(self, block_ids: Ints) -> npt.NDArray[Any] | None:
        """Gather blocks with all KV heads on rank 0, as `kv_cache.read_blocks`; None elsewhere."""
        own = read_blocks(self._cache, block_ids)
        parts = self._group.gather(torch.from_numpy(own))
        if not parts:
            return None
        whole = np.empty(self._shape(len(block_ids), self._all_heads), own.dtype)
        for heads, part in zip(self._heads, parts, strict=True):
            whole[:, :, :, heads] = part.numpy()
        return whole

    def check(self, block_ids: Ints) -> list[int]:
        """Return the checksum of these blocks on each rank, by rank; [] on ranks other than 0."""
        own = checksum(read_blocks(self._cache, block_ids))
        return [int(part) for part in self._group.gather(torch.tensor([own]))]

    def heads_in(self, rows: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """Return the KV heads of one rank from blocks with all KV heads."""
        return np.ascontiguousarray(rows[:, :, :, self._heads[rank]])

    def _shape(self, num_blocks: int, num_heads: int) -> tuple[int, ...]:
        num_layers, _, _, *row = self._cache.k.shape
        return (num_blocks, 2, num_layers, num_heads, *row)


def checksum(rows: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(rows).data.cast("B"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """The decoder of a rank, and the cost of making it."""

    spec: ModelSpec
    decoder: Decoder
    vocabularies: list[slice]
    cost: SliceCost


def cut_model(call: RankInit, group: RankGroup, prepared: PreparedModel) -> RankParts:
    """Copy the weight slices of a rank from a loaded model, and pick ops for their shapes."""
    whole, weights, size = prepared.model.spec, prepared.model.weights, call.size
    vocabularies = [vocabulary_of(weights, rank, size) for rank in range(size)]
    spec = spec_of(whole, call.rank, size, vocabularies[call.rank])
    own, cost = weights_of(weights, whole, call.rank, size)
    ops = pick_ops(
        spec,
        own,
        block_size=prepared.config.block_size_tokens,
        may_compile=prepared.config.compiles_kernels,
        kv_dtype=prepared.model.resolved.kv_dtype,
    )
    upload = IndexUploads(prepared.model.device).upload
    decoder = Decoder(spec, own, ops=_summed(ops, group), upload=upload)
    return RankParts(spec=spec, decoder=decoder, vocabularies=vocabularies, cost=cost)


def _summed(ops: Ops, group: RankGroup) -> Ops:
    """Return ops whose input-parallel linears all-reduce their result."""

    def added(add_: Callable[..., None], x: torch.Tensor, args: tuple[Any, ...]) -> None:
        # the residual is on every rank and must be added once
        made = torch.zeros_like(x)
        add_(made, *args)
        group.sum_(made)
        x += made

    def moe_ffn(*args: Any, **options: Any) -> torch.Tensor:  # noqa: ANN401 - of the op
        made = ops.moe_ffn(*args, **options)
        group.sum_(made)
        return made

    return replace(
        ops,
        add_linear_=lambda x, *args: added(ops.add_linear_, x, args),
        add_mlp_=lambda x, *args: added(ops.add_mlp_, x, args),
        moe_ffn=moe_ffn,
    )
