"""Chooses between kernels and functions of torch, timed at startup in the model's shape.

torch's grouped product for experts is the fastest on some devices and missing on others; it is
timed by batch size. With torch's `varlen_attn` for attention within prompt chunks, the cached
prefix of a chunk is merged afterwards, which must not cost more than is gained. So first chunks and
later chunks are both timed.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from raybatch.engine.forward.step_graphs import CudaGraphs
from raybatch.engine.weights.layout import FfnShard, ModelWeights, has_data
from raybatch.errors import error_text
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import pool_rows
from raybatch.kernels.dispatch import Ops, with_varlen
from raybatch.models.config import ModelSpec

# tokens of the timed steps, largest first
_TOKENS = 2048, 256, 32
# allowed relative error of most rows, in bfloat16
_EXPERTS_TOLERANCE = 5e-2
_NUM_RUNS = 8
# minimum gain to prefer another implementation
LEAST_GAIN = 0.03


def seconds_on(
    device: torch.device,
    run: Callable[[], object],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of a few calls of `run` on a device, after one warm-up."""
    is_gpu = device.type == "cuda"
    run()
    if is_gpu:
        torch.cuda.synchronize(device)
    began = clock()
    for _ in range(_NUM_RUNS):
        run()
    if is_gpu:
        torch.cuda.synchronize(device)
    return (clock() - began) / _NUM_RUNS


def replayed_s(
    device: torch.device,
    run: Callable[[], object],
    *,
    graphs: CudaGraphs | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the mean seconds of `run`, replayed as a CUDA graph to exclude launch overhead."""
    graph = (graphs or CudaGraphs(device)).capture(run)
    return seconds_on(device, graph.replay, clock=clock)


def can_group(shard: FfnShard, device: torch.device) -> bool:
    """Return whether torch has a real grouped product (no loop) for these experts."""
    gate_up, down = shard.experts_gate_up, shard.experts_down
    if gate_up is None or down is None or shard.experts_gate_up_scales is not None:
        return False
    is_plain = gate_up.dim() == down.dim() == 3 and gate_up.dtype == torch.bfloat16
    # rows must be multiples of 16 bytes
    is_aligned = not (gate_up.shape[2] % 8 or down.shape[2] % 8)
    return is_plain and is_aligned and torch.cuda.get_device_capability(device) == (9, 0)


def with_grouped_experts(
    ops: Ops,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    seconds_of: Callable[[Callable[[], object]], float] | None = None,
) -> Ops:
    """Return the ops with torch's grouped product for experts if it is correct and faster.

    Otherwise return `ops`, whose experts are kernels. `seconds_of` times a function, by default as
    a CUDA graph.
    """
    device = weights.embed.device
    sparse = (layer.ffn for layer in weights.layers if layer.ffn.router is not None)
    here = (ffn for ffn in sparse if ffn.shard.experts is None and has_data(ffn.shard))
    ffn = next(here, None)
    if ffn is None or spec.moe is None or not can_group(ffn.shard, device):
        return ops
    seconds_of = seconds_of or partial(replayed_s, device)
    tensors = tuple(
        tensor.to(device)
        for tensor in (ffn.router, ffn.shard.experts_gate_up, ffn.shard.experts_down)
        if tensor is not None
    )
    options = {"top_k": spec.moe.top_k, "norm_topk_prob": spec.moe.norm_topk_prob}
    generator = torch.Generator().manual_seed(0)
    min_rows, reason = None, ""
    for num_tokens in _TOKENS:
        x = torch.randn(num_tokens, spec.model_dim, generator=generator)
        x = x.to(device, weights.embed.dtype)
        plain = partial(ops.moe_ffn, x, *tensors, **options)
        grouped = partial(plain, min_grouped_rows=0)
        try:
            wanted, made = plain().float(), grouped().float()
            error = ((made - wanted).norm(dim=1) / wanted.norm(dim=1)).median()
            if not error <= _EXPERTS_TOLERANCE:
                reason = (
                    f"; torch's grouped product differs by a relative error of {float(error):.2g}"
                )
                break
            ours_s, theirs_s = seconds_of(plain), seconds_of(grouped)
        # a library may raise anything
        except Exception as failure:
            reason = f"; torch's grouped product failed: {error_text(failure)}"
            break
        reason = (
            f" ({ours_s * 1e3:.2f} ms for {num_tokens} tokens, grouped {theirs_s * 1e3:.2f} ms)"
        )
        if theirs_s > (1 - LEAST_GAIN) * ours_s:
            break
        min_rows = num_tokens * spec.moe.top_k
    if min_rows is None:
        _logger.info("expert layers use kernels%s", reason)
        return ops
    _logger.info(
        "expert layers use torch's grouped product in steps of at least %d tokens%s",
        min_rows // spec.moe.top_k,
        reason,
    )
    return replace(ops, moe_ffn=partial(ops.moe_ffn, min_grouped_rows=min_rows))


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
        k_pool, v_pool = (
            pool_rows(torch.randn(shape, generator=generator), self.kv_dtype).to(device)
            for _ in range(2)
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
        decode = DecodePart.of_rows(
            (1 + rows).unsqueeze(1),
            1 + rows % self.block_size,
            block_size=self.block_size,
            first_position=self.block_size,
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
