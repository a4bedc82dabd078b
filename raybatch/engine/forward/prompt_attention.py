"""Chooses between kernels and torch's `varlen_attn` for attention within prompt chunks, by timing.

With `varlen_attn`, the cached prefix of a chunk is merged afterwards, which must not cost more than
is gained. So first chunks and later chunks are both timed, in the model's shape.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from raybatch.engine.forward.grouped_experts import LEAST_GAIN, replayed_s
from raybatch.errors import error_text
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import is_quantised, quantise
from raybatch.kernels.dispatch import Ops, with_varlen
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# of a timed step: chunks and tokens of each, cached tokens of later chunks, and decode rows
_NUM_CHUNKS, _CHUNK_TOKENS = 4, 512
_CACHED_TOKENS = 1024
_NUM_DECODES = 8
# allowed relative error of a row: a wrong key exceeds it by far, another order of sums does not
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def can_vary(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether torch has FlashAttention for the model's heads on this device."""
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
    """Return the ops with torch's `varlen_attn` for prompt chunks if it is correct and faster.

    Otherwise return `ops`, whose attention uses kernels. `seconds_of` times a function, by default
    as a CUDA graph.
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
                # written so that NaN disagrees
                if not error <= _TOLERANCE[dtype]:
                    _log_kernels(
                        f"; torch's varlen_attn differs by a relative error of {error:.2g}"
                    )
                    return ops
                ours_s, theirs_s = ours_s + seconds_of(ours), theirs_s + seconds_of(theirs)
            times.append((ours_s, theirs_s))
    # a library may raise anything
    except Exception as failure:
        _log_kernels(f"; torch's varlen_attn failed: {error_text(failure)}")
        return ops
    ours_s, theirs_s = (sum(column) for column in zip(*times, strict=True))
    of_steps = ", ".join(
        f"{ours * 1e3:.2f} ms if prompts {name}, varlen_attn {theirs * 1e3:.2f} ms"
        for name, (ours, theirs) in zip(("begin", "continue"), times, strict=True)
    )
    if theirs_s > (1 - LEAST_GAIN) * ours_s:
        _log_kernels(f" ({of_steps})")
        return ops
    _logger.info("attention within prompt chunks uses torch's varlen_attn (kernels %s)", of_steps)
    return form


def _log_kernels(reason: str) -> None:
    _logger.info("attention within prompt chunks uses kernels%s", reason)


def _largest_error(wanted: torch.Tensor, made: torch.Tensor) -> float:
    """Return the largest error of a row, relative to its norm."""
    wanted, made = wanted.float(), made.float()
    return float(((made - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-6)).max())


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of random chunks; with cached tokens, decode rows precede the chunks.

    Decode rows and chunks then also read one shared block.
    """

    spec: ModelSpec
    cached_tokens: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    def ready(self, ops: Ops, window: int | None) -> Callable[[], torch.Tensor]:
        """Return a function that computes attention of this step in a layer with this window."""
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
        """Return the token positions of all rows: decodes first, then the prefill chunks."""
        first = self.block_size + self.cached_tokens if self.cached_tokens else 0
        decodes = self.block_size + torch.arange(self._num_decode) % self.block_size
        return torch.cat((decodes, (first + torch.arange(_CHUNK_TOKENS)).repeat(_NUM_CHUNKS)))

    def _plan(self) -> AttentionPlan:
        num_decode = self._num_decode
        starts = [num_decode + i * _CHUNK_TOKENS for i in range(_NUM_CHUNKS)]
        prefill = PrefillPart(starts=tuple(starts), lens=(_CHUNK_TOKENS,) * _NUM_CHUNKS)
        if not self.cached_tokens:
            return AttentionPlan(num_decode=0, decode=None, prefill=prefill, segments=())
        rows = torch.arange(num_decode)
        decode = DecodePart(
            block_ids=1 + rows,
            owners=rows,
            num_valid=1 + rows % self.block_size,
            is_contiguous=True,
            first_positions=torch.full_like(rows, self.block_size),
        )
        own = torch.arange(_NUM_CHUNKS * self._blocks_per_chunk).view(_NUM_CHUNKS, -1)
        shared = PrefixSegment(
            query_idx=torch.arange(num_decode + _NUM_CHUNKS * _CHUNK_TOKENS),
            block_ids=torch.zeros(1, dtype=torch.int64),
            num_tokens=self.block_size,
        )
        of_chunks = (
            PrefixSegment(
                query_idx=start + torch.arange(_CHUNK_TOKENS),
                block_ids=1 + num_decode + block_ids,
                num_tokens=self.cached_tokens,
                first_position=self.block_size,
                chunk=i,
            )
            for i, (start, block_ids) in enumerate(zip(starts, own, strict=True))
        )
        return AttentionPlan(
            num_decode=num_decode, decode=decode, prefill=prefill, segments=(shared, *of_chunks)
        )
