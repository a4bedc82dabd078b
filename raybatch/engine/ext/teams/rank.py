"""One rank of a team: its slice of the model with a pool of its heads, and its vote before that."""

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
from raybatch.engine.ext.teams.group import TeamGroup
from raybatch.engine.ext.teams.slices import (
    SliceCost,
    heads_of,
    spec_of,
    vocabulary_of,
    weights_of,
    why_not_cut,
)
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import KVCache, copy_blocks, read_blocks, write_blocks
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import ModelSpec
from raybatch.records.arrays import Ints
from raybatch.records.team import TeamCall

# blocks of a payload of all heads, which bounds what is there beside the pools
PIECE_BLOCKS = 64
# as which KV of so many bytes a number is read and written
_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What a rank says of a team before anything is copied.

    Args:
        refusal: why it cannot be in it, "" where it can.
        likeness: what all ranks have in common: weights, dtypes, block size, and the host's
            instructions, because all of them route tokens to experts by their own rounding.
        num_blocks: that its pool holds, with the heads of its rank.
        slice_bytes: of the weights that it copied, in `slice_s` seconds.
    """

    refusal: str = ""
    likeness: str = ""
    num_blocks: int = 0
    slice_bytes: int = 0
    slice_s: float = 0.0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))


def why_not_partitioned(runner: ModelRunner, size: int) -> str | None:
    """Return why a team of so many ranks cannot run what this runner runs; None where it can."""
    refusal = why_not_cut(runner.spec, size)
    if refusal is not None:
        return refusal
    if runner.window is not None or runner.tiers.num_host_blocks:
        return "its KV is in host memory as well"
    if runner.decoder.layers.is_streamed:
        return "not all of its layers stay on the device"
    return None


def likeness_of(prepared: PreparedModel, runner: ModelRunner) -> str:
    device = prepared.model.device
    host = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        host = torch.cuda.get_device_name(device)
    may_compile = prepared.config.compiles_kernels
    return f"{runner.kv_key}, torch {torch.__version__}, {host}, compiled: {may_compile}"


def view_of_heads(pool: KVCache, num_heads: int) -> KVCache:
    """Return a pool [L, N, G, B, R] as one of more blocks, of `num_heads` each; G is a multiple."""
    num_layers, _, _, *row = pool.k.shape
    shape = (num_layers, -1, num_heads, *row)
    return KVCache(k=pool.k.view(shape), v=pool.v.view(shape))


class TeamRank:
    """Runs what the messages of a team say, with the heads of its rank; owned by one thread.

    Args:
        spec: of the whole model.
        cache: of this rank's heads, [L, N, G / tp, B, R].
    """

    def __init__(
        self,
        call: TeamCall,
        group: TeamGroup,
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
        """Run a batch of the host; return the logits [S, V] on rank 0."""
        placed = on_device(batch, self._uploads, self._device)
        logits = self._decoder.forward(placed, self._cache)
        # rank 0 has the most, and all hand over as much
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
        """Take this rank's heads out of what rank 0 has, [n, 2, L, G, B, R], None on the others."""
        shape = self._shape(len(block_ids), self._all_heads)
        if rows is None:
            rows = np.empty(shape, _BITS[self._cache.k.element_size()])
        payload = torch.from_numpy(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))
        self._group.broadcast_(payload)
        whole = payload.numpy().view(rows.dtype).reshape(shape)
        write_blocks(self._cache, self.heads_in(whole, self._rank), block_ids)

    def read(self, block_ids: Ints) -> npt.NDArray[Any] | None:
        """Return what blocks hold with all heads on rank 0, [n, 2, L, G, B, R]."""
        own = read_blocks(self._cache, block_ids)
        parts = self._group.gather(torch.from_numpy(own))
        if not parts:
            return None
        whole = np.empty(self._shape(len(block_ids), self._all_heads), own.dtype)
        for heads, part in zip(self._heads, parts, strict=True):
            whole[:, :, :, heads] = part.numpy()
        return whole

    def check(self, block_ids: Ints) -> list[int]:
        """Return the checksums of what all ranks have in these blocks, on rank 0."""
        own = checksum(read_blocks(self._cache, block_ids))
        return [int(part) for part in self._group.gather(torch.tensor([own]))]

    def heads_in(self, rows: npt.NDArray[Any], rank: int) -> npt.NDArray[Any]:
        """Return what one rank has of blocks with all heads."""
        return np.ascontiguousarray(rows[:, :, :, self._heads[rank]])

    def _shape(self, num_blocks: int, num_heads: int) -> tuple[int, ...]:
        num_layers, _, _, *row = self._cache.k.shape
        return (num_blocks, 2, num_layers, num_heads, *row)


def checksum(rows: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(rows).data.cast("B"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParts:
    """The decoder of a rank with what it took to make it."""

    spec: ModelSpec
    decoder: Decoder
    vocabularies: list[slice]
    cost: SliceCost


def cut_model(call: TeamCall, group: TeamGroup, prepared: PreparedModel) -> RankParts:
    """Copy the slices of a rank out of a loaded model, and pick the ops for their shapes."""
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


def _summed(ops: Ops, group: TeamGroup) -> Ops:
    """Return ops of which those that multiply a part of the inputs make the sum of all ranks."""

    def added(add_: Callable[..., None], x: torch.Tensor, args: tuple[Any, ...]) -> None:
        # hidden states are there on every rank, and are added once
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
