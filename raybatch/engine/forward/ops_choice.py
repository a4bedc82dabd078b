"""Chooses the ops of a model: compiled C on a CPU, Triton kernels on a GPU, else torch references.

GPU kernels are compared with the references at startup, on layers of the model. Each op alone
replaces its reference, and the outputs of modules for random hidden states and KV are compared.
If they differ, or the kernel fails, the reference is used.

Compiling a kernel specialisation takes seconds, for which no step of a job should wait. So steps of
every size and kind for which kernels are specialised run before.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.decoder import Decoder, byte_dtype_of
from raybatch.engine.forward.library_ops import with_grouped_experts, with_varlen_attention
from raybatch.engine.memory.kv_cache import KVCache, allocate_kv_cache
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sampling.draw import DrawOptions, draw_ranked
from raybatch.engine.weights.layout import ModelWeights, has_data, map_tensors
from raybatch.errors import error_text
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import is_quantised, pool_rows, read_rows, row_width
from raybatch.kernels.dispatch import REFERENCE, Ops, compiled_ops, ops_for
from raybatch.kernels.moe import MAX_ROW_TILE
from raybatch.models.config import ModelSpec

_logger = logging.getLogger(__name__)

# ops that are replaced together, by their name in the log
_PARTS = {
    "rms_norm": ("rms_norm",),
    "linear": ("linear",),
    "add_linear_": ("add_linear_",),
    "add_mlp_": ("add_mlp_",),
    # moe_ffn routes by itself if it has all experts
    "moe_ffn": ("moe_ffn", "route"),
    # these share one prepared record
    "attention": ("finish_heads", "prepare_attention", "attend", "prepare_fixed", "joins_segments"),
}
# allowed relative error of a row: a wrong key exceeds it by far, another order of sums does not
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CHUNKS = 140, 5
NUM_DECODES = 3
# small relative to the module outputs, which are compared
_HIDDEN_SIZE = 1e-2


def pick_ops(
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    block_size: int,
    may_compile: bool,
    kv_dtype: torch.dtype | None = None,
) -> Ops:
    """Return the ops for these weights: compiled for float32 on a CPU, kernels on a GPU.

    With `may_compile` false, a CPU uses torch's ops, the only multi-threaded ones. A `kv_dtype` of
    None is that of the weights.
    """
    embed = weights.embed
    form = ops_for(embed.device)
    if form is not REFERENCE:
        # kernels run on the current device
        with torch.cuda.device(embed.device) if embed.is_cuda else nullcontext():
            kv_dtype = kv_dtype or embed.dtype
            ops = agreed_ops(form, spec, weights, block_size=block_size, kv_dtype=kv_dtype)
            # library ops replace kernels, not references
            if ops.attend is not REFERENCE.attend:
                ops = with_varlen_attention(
                    ops,
                    spec,
                    dtype=embed.dtype,
                    kv_dtype=kv_dtype,
                    block_size=block_size,
                    device=embed.device,
                )
            if ops.moe_ffn is not REFERENCE.moe_ffn:
                ops = with_grouped_experts(ops, spec, weights)
            return ops
    if not (may_compile and embed.dtype == torch.float32 and embed.device.type == "cpu"):
        return REFERENCE
    # panel widths of experts; None if the model has none
    panel_widths = None
    for layer in weights.layers:
        shard = layer.ffn.shard
        gate_up, down = shard.experts_gate_up, shard.experts_down
        if gate_up is not None and down is not None and gate_up.dim() == down.dim() == 4:
            panel_widths = gate_up.shape[3], down.shape[3]
            break
    return compiled_ops(
        head_dim=spec.head_dim,
        num_grouped=spec.num_heads // spec.num_kv_heads,
        block_size=block_size,
        panel_widths=panel_widths,
        byte_dtype=byte_dtype_of(weights),
        kv_dtype=kv_dtype or embed.dtype,
    )


def agreed_ops(
    form: Ops, spec: ModelSpec, weights: ModelWeights, *, block_size: int, kv_dtype: torch.dtype
) -> Ops:
    """Return the ops of `form`, but torch's reference for each that disagrees on these weights."""
    ops = REFERENCE
    checks = check_ops(form, spec, weights, block_size=block_size, kv_dtype=kv_dtype)
    for check in checks:
        if check.agrees:
            chosen = {field: getattr(form, field) for field in _PARTS[check.name]}
            ops = replace(ops, **chosen)
        elif check.failure:
            _logger.warning(
                "using the torch reference for %s: its kernel failed: %s", check.name, check.failure
            )
        else:
            _logger.warning(
                "using the torch reference for %s: its kernel differs by a relative error of %.2g",
                check.name,
                check.error,
            )
    return ops


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCheck:
    """Result of comparing an op with its reference; `error` is the largest relative one of a row.

    `failure` is the text of an exception; "" for none.
    """

    name: str
    error: float
    agrees: bool
    failure: str = ""


def check_ops(
    form: Ops, spec: ModelSpec, weights: ModelWeights, *, block_size: int, kv_dtype: torch.dtype
) -> list[OpCheck]:
    """Compare each op of `form` with its reference on these weights, one op at a time."""
    probe = _Probe(spec, weights, block_size, kv_dtype)
    wanted = probe.run(REFERENCE)
    checks = []
    for name, fields in _PARTS.items():
        chosen = {field: getattr(form, field) for field in fields}
        # kernels and their compiler may raise anything, and the reference works
        try:
            error = _largest_error(wanted, probe.run(replace(REFERENCE, **chosen)))
        except Exception as failure:
            check = OpCheck(name=name, error=math.inf, agrees=False, failure=error_text(failure))
        else:
            # written so that NaN disagrees
            agrees = error <= _TOLERANCE[weights.embed.dtype]
            check = OpCheck(name=name, error=error, agrees=agrees)
        checks.append(check)
    return checks


def layers_of_kinds(spec: ModelSpec, weights: ModelWeights) -> tuple[ModelSpec, ModelWeights]:
    """Return (spec, weights) of a model with one layer of each kind in this one.

    A kind is dense or sparse, with or without a sliding window of some size.
    """
    here = [i for i, layer in enumerate(weights.layers) if has_data(layer.ffn.shard)]
    kinds = {(spec.windows[i], spec.is_sparse(i)): i for i in reversed(here)}
    chosen = sorted(kinds.values())
    # streamed layers may be in host memory
    device = weights.embed.device
    layers = map_tensors([weights.layers[i] for i in chosen], lambda x: x.to(device))
    windows = tuple(spec.windows[i] for i in chosen)
    few = replace(spec, num_layers=len(chosen), windows=windows)
    return few, replace(weights, layers=tuple(layers))


class _Result(NamedTuple):
    """Rows [n, D]; a few may differ if routing nearly ties."""

    rows: torch.Tensor
    may_stray: bool = False


class _Probe:
    """Runs one layer of each kind on a step with decodes, chunks and shared prefixes."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, block_size: int, kv_dtype: torch.dtype
    ) -> None:
        device, self._dtype = weights.embed.device, weights.embed.dtype
        self._spec, self._weights = layers_of_kinds(spec, weights)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self._batch, num_blocks = probe_step(block_size, device)
        num_layers = self._spec.num_layers
        shape = num_layers, num_blocks, spec.num_kv_heads, block_size, spec.head_dim
        self._pools = tuple(pool_rows(random(*shape), kv_dtype).to(device) for _ in range(2))
        assert self._pools[0].shape[-1] == row_width(spec.head_dim, kv_dtype), (
            "unexpected row width of the pool"
        )
        hidden = random(len(self._batch.token_ids), spec.model_dim) * _HIDDEN_SIZE
        self._hidden = hidden.to(device, self._dtype)

    @torch.inference_mode()
    def run(self, ops: Ops) -> list[_Result]:
        """Return the output of each module for the probe's hidden states, then the KV."""
        decoder = Decoder(self._spec, self._weights, ops=ops)
        k_pool, v_pool = self._pools
        cache = KVCache(k=k_pool.clone(), v=v_pool.clone())
        prepared = decoder.prepare(self._batch, cache)
        made = []
        # rounding may go either way between two 8-bit values
        is_rounded = is_quantised(cache.k.dtype)
        for layer_idx, layer in enumerate(self._weights.layers):
            x = decoder.attention(layer_idx, self._hidden.clone(), prepared, cache)
            # compare decodes and chunks separately, so that neither hides the other
            of_kinds = x[:NUM_DECODES], x[NUM_DECODES:]
            made += [_Result(rows, is_rounded) for rows in of_kinds]
            for rows in (self._hidden, self._hidden[:NUM_DECODES]):
                added = rows.clone()
                decoder.ffn_(layer_idx, added)
                # a near tie of the router may choose another expert
                made.append(_Result(added, layer.ffn.router is not None and rows is self._hidden))
        made.append(_Result(decoder.logits(self._hidden[:NUM_DECODES])))
        for pool in (cache.k, cache.v):
            numbers = read_rows(pool, self._spec.head_dim, self._dtype).flatten(0, 3)
            made.append(_Result(numbers, is_rounded))
        return made


def _largest_error(wanted: list[_Result], made: list[_Result]) -> float:
    """Return the largest error of a row, relative to its norm."""
    errors = []
    for expected, found in zip(wanted, made, strict=True):
        right = expected.rows.float()
        of_rows = (found.rows.float() - right).norm(dim=1) / right.norm(dim=1).clamp(min=1e-6)
        errors.append(of_rows.median() if expected.may_stray else of_rows.max())
    return float(torch.stack(errors).max())


def probe_step(block_size: int, device: torch.device) -> tuple[ForwardBatch, int]:
    """Return (a step for comparing ops, the number of blocks that it uses).

    Decodes share a prefix of two blocks with the first of two chunks, which also reads a third.
    """
    first, second = _CHUNKS
    decodes = torch.arange(NUM_DECODES)
    inside = decodes * 5 % block_size
    run = torch.arange(2)
    own = NUM_DECODES + 2
    slots_of_chunks = (own + 1) * block_size + torch.arange(first + second)
    positions = torch.cat(
        (2 * block_size + inside, 3 * block_size + torch.arange(first), torch.arange(second))
    )
    own_blocks = (decodes + 2).unsqueeze(1)
    decode = DecodePart.of_rows(
        own_blocks, inside + 1, block_size=block_size, first_position=2 * block_size
    )
    rows = torch.arange(NUM_DECODES + first)
    segments = (
        PrefixSegment(query_idx=rows, block_ids=run, num_tokens=2 * block_size),
        PrefixSegment(
            query_idx=rows[NUM_DECODES:],
            block_ids=torch.tensor([own]),
            num_tokens=block_size,
            first_position=2 * block_size,
            chunk=0,
        ),
    )
    slots = torch.cat(((decodes + 2) * block_size + inside, slots_of_chunks))
    batch = ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        logits_idx=torch.arange(len(positions), device=device),
        attention=AttentionPlan(
            num_decode=NUM_DECODES,
            decode=decode,
            prefill=PrefillPart(starts=(NUM_DECODES, NUM_DECODES + first), lens=_CHUNKS),
            segments=segments,
        ),
    )
    return batch, int(slots.max()) // block_size + 1


# sampled rows; their number does not matter
_DRAWN_ROWS = 3
# positions read by each decode row: enough to split one row over several programs
_ROW_TOKENS = 2048


def run_forms(
    ops: Ops,
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    max_tokens: int,
    max_rows: int,
) -> None:
    """Compile the kernels: run steps of 1, 2, 4, .. up to `max_tokens` tokens, and sample once.

    Each runs two layers of each kind. Up to `max_rows` of the tokens decode. Steps that do not fit
    into memory are skipped.
    """
    few, some = _twice(*layers_of_kinds(spec, weights))
    device = weights.embed.device
    decoder, uploads = Decoder(few, some, ops=ops), IndexUploads(device)
    cache = allocate_kv_cache(
        few, num_blocks=1, block_size=block_size, dtype=kv_dtype, device=device
    )
    rows, ones = np.arange(_DRAWN_ROWS), np.ones(_DRAWN_ROWS)
    logits = torch.zeros(_DRAWN_ROWS, spec.vocab_size, device=device)
    draw_ranked(logits, rows, DrawOptions(ones, rows + 1, 0.9 * ones, 0 * ones, 0.5 * ones))
    for batch in steps_of_forms(
        spec, block_size=block_size, max_tokens=max_tokens, max_rows=max_rows
    ):
        try:
            decoder.forward(on_device(batch, uploads, device), cache)
        except torch.OutOfMemoryError:
            _logger.warning(
                "a warm-up step of %d tokens does not fit into memory next to the weights: the "
                "first such step will compile its kernels; lower engine.max_batched_tokens",
                len(batch.token_ids),
            )
            return


def steps_of_forms(
    spec: ModelSpec, *, block_size: int, max_tokens: int, max_rows: int
) -> Iterator[ForwardBatch]:
    """Yield host batches of one decode token, then of 1, 2, 4, .. up to `max_tokens` tokens.

    Half of the tokens decode, at most `max_rows`.
    """
    if spec.moe is not None:
        # from this size on experts use the largest row tile
        max_tokens = max(max_tokens, MAX_ROW_TILE * spec.moe.num_experts // spec.moe.top_k)
    yield step_of(1, 0, block_size)
    for i in range(max_tokens.bit_length()):
        num_decode = min((1 << i) // 2, max_rows)
        yield step_of(num_decode, (1 << i) - num_decode, block_size)


def _twice(spec: ModelSpec, weights: ModelWeights) -> tuple[ModelSpec, ModelWeights]:
    """Return a model with its layers doubled: only the last layer uses its special launches."""
    twice = replace(spec, num_layers=2 * spec.num_layers, windows=2 * spec.windows)
    return twice, replace(weights, layers=2 * weights.layers)


def step_of(num_decode: int, num_chunk: int, block_size: int) -> ForwardBatch:
    """Return a host batch of decode rows with a shared prefix, and one prompt chunk.

    All rows read and write the only block of their pool.
    """
    num_rows, rows = num_decode + num_chunk, torch.arange(num_decode)
    logits_idx = torch.arange(num_decode + (num_chunk > 0))
    if num_chunk:
        logits_idx[-1] = num_rows - 1
    return ForwardBatch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.arange(num_rows),
        slot_mapping=torch.arange(num_rows) % block_size,
        logits_idx=logits_idx,
        attention=AttentionPlan(
            num_decode=num_decode,
            decode=_decodes(num_decode, block_size) if num_decode else None,
            prefill=PrefillPart(starts=(num_decode,), lens=(num_chunk,)) if num_chunk else None,
            segments=_runs(rows, block_size),
        ),
        logits_attention=None
        if len(logits_idx) == num_rows
        else AttentionPlan(
            num_decode=len(logits_idx),
            decode=_decodes(len(logits_idx), block_size),
            prefill=None,
            segments=_runs(rows, block_size),
        ),
    )


def _decodes(num_rows: int, block_size: int) -> DecodePart:
    block_ids = torch.zeros(num_rows, max(2, _ROW_TOKENS // block_size), dtype=torch.int64)
    num_valid = torch.full((num_rows,), block_size)
    return DecodePart.of_rows(block_ids, num_valid, block_size=block_size)


def _runs(rows: torch.Tensor, block_size: int) -> tuple[PrefixSegment, ...]:
    if not len(rows):
        return ()
    block = torch.zeros(1, dtype=torch.int64)
    return (PrefixSegment(query_idx=rows, block_ids=block, num_tokens=block_size),)
