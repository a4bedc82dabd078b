"""Whether chunks of prompts attend to themselves by torch's `varlen_attn`: timed at the start.

What it wins there must outweigh that runs which chunks alone read are merged afterwards. So prompts
that begin and prompts that go on are both computed, in the model's own shape.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from raybatch.engine.forward.grouped_experts import LEAST_GAIN, replayed_s
from raybatch.errors import error_text
from raybatch.kernels.attention_plan import AttentionPlan, ContextPart, DecodePart, PrefillPart
from raybatch.kernels.byte_numbers import is_quantised, quantise
from raybatch.kernels.dispatch import Ops, with_varlen
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# chunks of a timed step, what each has cached where it goes on, and rows that decode beside them
_NUM_CHUNKS, _CHUNK_TOKENS = 4, 512
_CACHED_TOKENS = 1024
_NUM_DECODES = 8
# relative error of a row: one wrong key is far beyond, another order of sums far below
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def can_vary(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch has FlashAttention for heads of this model on the device."""
    if dtype not in _TOLERANCE or spec.head_dim % 8 or spec.head_dim > 256:
        return False
    is_built = torch.backends.cuda.is_flash_attention_available()
    return is_built and torch.cuda.get_device_capability(device) >= (8, 0)


@torch.inference_mode()
def with_varlen_attention(
    ops: Ops,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    device: torch.device,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> Ops:
    """Return the ops with `varlen_attn` for chunks where it is right and faster, else as they are.

    Attention of `ops` is by kernels; `seconds_of` times a function, by default on the device.
    """
    form = with_varlen(ops) if can_vary(spec, dtype, device) else None
    if form is None:
        return ops
    seconds_of = seconds_of or partial(replayed_s, device)
    times: list[tuple[float, float]] = []
    try:
        for cached in (0, _CACHED_TOKENS):
            step = _Step(spec, cached, block_size, dtype, kv_dtype, device)
            ours_s = theirs_s = 0.0
            for window in dict.fromkeys(spec.windows):
                ours, theirs = step.ready(ops, window), step.ready(form, window)
                error = _largest_error(ours(), theirs())
                # also NaN, of which nothing is true
                if not error <= _TOLERANCE[dtype]:
                    _tell_kernels(f"; varlen_attn of torch differs from them by {error:.2g}")
                    return ops
                ours_s, theirs_s = ours_s + seconds_of(ours), theirs_s + seconds_of(theirs)
            times.append((ours_s, theirs_s))
    # a library has exceptions of its own
    except Exception as failure:
        _tell_kernels(f"; torch has no varlen_attn here: {error_text(failure)}")
        return ops
    ours_s, theirs_s = (sum(column) for column in zip(*times, strict=True))
    of_steps = ", ".join(
        f"{ours * 1e3:.2f} ms where prompts {name}, varlen_attn {theirs * 1e3:.2f} ms"
        for name, (ours, theirs) in zip(("begin", "go on"), times, strict=True)
    )
    if theirs_s > (1 - LEAST_GAIN) * ours_s:
        _tell_kernels(f" ({of_steps})")
        return ops
    _logger.info(
        "chunks of prompts attend to themselves by torch's varlen_attn (kernels %s)", of_steps
    )
    return form


def _tell_kernels(told: str) -> None:
    _logger.info("chunks of prompts attend by kernels%s", told)


def _largest_error(wanted: torch.Tensor, made: torch.Tensor) -> float:
    """Return the largest error of a row, relative to its norm."""
    wanted, made = wanted.float(), made.float()
    return float(((made - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)).max())


@dataclass(frozen=True, slots=True)
class _Step:
    """Random chunks with so many cached tokens each; with any, rows that decode stand before them.

    These and the chunks then read one shared block as well.
    """

    spec: ModelSpec
    cached_tokens: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    def ready(self, ops: Ops, window: int | None) -> Callable[[], torch.Tensor]:
        """Return what computes the step in a layer of that window."""
        spec, plan, device = self.spec, self._plan(), self.device
        num_blocks = 1 + self._num_decode + _NUM_CHUNKS * self._blocks_per_chunk
        positions = self._positions().to(device)
        generator = torch.Generator().manual_seed(0)
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        heads = torch.randn(len(positions), num_heads, spec.head_dim, generator=generator)
        of_kinds = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = torch.split(heads.to(device, self.dtype), of_kinds, dim=1)
        shape = num_blocks, spec.num_kv_heads, self.block_size, spec.head_dim
        numbers = (torch.randn(shape, generator=generator) for _ in range(2))
        is_bytes = is_quantised(self.kv_dtype)
        k_pool, v_pool = (
            (quantise(x, self.kv_dtype) if is_bytes else x.to(self.kv_dtype)).to(device)
            for x in numbers
        )
        prepared = ops.prepare_attention(
            plan, positions=positions, slot_mapping=positions, pool=k_pool, windows=(window,)
        )
        return partial(ops.attend, q, k, v, k_pool, v_pool, prepared, window)

    @property
    def _num_decode(self) -> int:
        return _NUM_DECODES if self.cached_tokens else 0

    @property
    def _blocks_per_chunk(self) -> int:
        return -(-self.cached_tokens // self.block_size)

    def _positions(self) -> torch.Tensor:
        """Return those of all rows: behind the shared block, and what a chunk has cached."""
        first = self.block_size + self.cached_tokens if self.cached_tokens else 0
        decodes = self.block_size + torch.arange(self._num_decode) % self.block_size
        return torch.cat((decodes, (first + torch.arange(_CHUNK_TOKENS)).repeat(_NUM_CHUNKS)))

    def _plan(self) -> AttentionPlan:
        num_decode = self._num_decode
        starts = [num_decode + i * _CHUNK_TOKENS for i in range(_NUM_CHUNKS)]
        prefill = PrefillPart(starts=tuple(starts), lens=(_CHUNK_TOKENS,) * _NUM_CHUNKS)
        if not self.cached_tokens:
            return AttentionPlan(num_decode=0, decode=None, prefill=prefill, contexts=())
        rows = torch.arange(num_decode)
        decode = DecodePart(
            block_ids=1 + rows,
            owners=rows,
            num_valid=1 + rows % self.block_size,
            is_contiguous=True,
            first_positions=torch.full_like(rows, self.block_size),
        )
        own = torch.arange(_NUM_CHUNKS * self._blocks_per_chunk).view(_NUM_CHUNKS, -1)
        shared = ContextPart(
            query_idx=torch.arange(num_decode + _NUM_CHUNKS * _CHUNK_TOKENS),
            block_ids=torch.zeros(1, dtype=torch.int64),
            num_tokens=self.block_size,
        )
        of_chunks = (
            ContextPart(
                query_idx=start + torch.arange(_CHUNK_TOKENS),
                block_ids=1 + num_decode + block_ids,
                num_tokens=self.cached_tokens,
                first_position=self.block_size,
                chunk=i,
            )
            for i, (start, block_ids) in enumerate(zip(starts, own, strict=True))
        )
        return AttentionPlan(
            num_decode=num_decode, decode=decode, prefill=prefill, contexts=(shared, *of_chunks)
        )
