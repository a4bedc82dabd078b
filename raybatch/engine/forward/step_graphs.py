"""CUDA graphs of steps: captured once for a few sizes, then replayed.

A step has hundreds of launches, and in short steps the host launches more slowly than the GPU runs.
A graph is one launch; everything that varies between steps is read from device memory.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.decoder import Decoder, LastRows
from raybatch.engine.forward.graph_sizes import GraphShape, has_logits
from raybatch.engine.memory.kv_cache import KVCache, max_sequence_len
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.weights.layout import ModelWeights
from raybatch.errors import ConfigError, error_text
from raybatch.installation import install_command
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.dispatch import Ops
from raybatch.kernels.step_index import StepIndex, StepSize
from raybatch.models.config import ModelSpec

# warm-up runs: a capture allows neither compilation nor library allocations
_NUM_WARM_UPS = 2

_logger = logging.getLogger(__name__)
# rows of the verification step, and blocks that each of them reads
_CHECKED_ROWS, _CHECKED_BLOCKS = 8, 3
# allowed relative error of logits: a wrong block exceeds it by far, another order of sums does not
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}


class StepBuffers:
    """Inputs and outputs of captured steps; all sizes share the memory.

    The input of a step is one array of integers, uploaded by one copy: token ids, positions, slots,
    and the attention index. Padded rows write to `scrap_block`, which belongs to no sequence.
    """

    def __init__(
        self,
        sizes: Sequence[StepSize],
        *,
        scrap_block: int,
        block_size: int,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        uploads: IndexUploads | None = None,
    ) -> None:
        self._scrap_slot = scrap_block * block_size
        with_logits, others = _most_rows(sizes)
        self.logits = torch.zeros(with_logits, spec.vocab_size, dtype=torch.float32, device=device)
        widths = spec.model_dim, spec.num_heads * spec.head_dim
        self.last = LastRows(
            *(torch.zeros(others, width, dtype=dtype, device=device) for width in widths)
        )
        num_numbers = max(_num_inputs(size) for size in sizes)
        self.numbers = torch.zeros(num_numbers, dtype=torch.int32, device=device)
        self._host = np.zeros(num_numbers, np.int32)
        self._uploads = uploads or IndexUploads(device)

    @staticmethod
    def bytes_of(sizes: Sequence[StepSize], spec: ModelSpec, dtype: torch.dtype) -> int:
        numbers = max(_num_inputs(size) for size in sizes)
        with_logits, others = _most_rows(sizes)
        of_row = (spec.model_dim + spec.num_heads * spec.head_dim) * dtype.itemsize
        return 4 * (numbers + with_logits * spec.vocab_size) + others * of_row

    def inputs(self, size: StepSize) -> tuple[torch.Tensor, ...]:
        """Return (token ids, positions, slots, index) of a size, as views."""
        return torch.split(self.numbers[: _num_inputs(size)], _lengths(size))

    def outputs(self, size: StepSize) -> torch.Tensor | LastRows:
        """Return the output buffers of the CUDA graph for `size`, as views."""
        rows = size.rows
        if has_logits(size):
            return self.logits[:rows]
        return LastRows(*(x[:rows] for x in self.last))

    @torch.inference_mode()
    def fill(self, batch: ForwardBatch, index: StepIndex, size: StepSize) -> None:
        """Write the input of a host batch into the buffers, padded to the size.

        `index` is the attention index of the batch.
        """
        numbers = self._host[: _num_inputs(size)]
        *parts, out = np.split(numbers, np.cumsum(_lengths(size))[:-1])
        tensors = (batch.token_ids, batch.positions, batch.slot_mapping)
        for part, source, padding in zip(parts, tensors, (0, 0, self._scrap_slot), strict=True):
            part[: len(source)] = source.numpy()
            part[len(source) :] = padding
        num_written = index.write(size, out)
        stop = _num_inputs(size) - len(out) + num_written
        self._uploads.write(self.numbers[:stop], numbers[:stop])
        if batch.late is not None:
            batch.late.put(self.inputs(size)[0], self._uploads)


def _lengths(size: StepSize) -> list[int]:
    """Return the lengths of the parts of a step's input: token ids, positions, slots, index."""
    return [size.rows, size.rows, size.rows, size.num_index]


def _num_inputs(size: StepSize) -> int:
    return sum(_lengths(size))


def _most_rows(sizes: Sequence[StepSize]) -> tuple[int, int]:
    """Return the most rows of the sizes with logits, and of those without."""
    kinds = ([size.rows for size in sizes if has_logits(size) is of] for of in (True, False))
    with_logits, others = (max(kind, default=0) for kind in kinds)
    return with_logits, others


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool and never run concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Warm up a function and capture it as a graph.

        Its inputs and outputs must live as long as the graph; it may allocate temporaries. Capture
        the largest graph first, so that others fit into its memory. Raises RuntimeError: the
        capture failed.
        """
        current = torch.cuda.current_stream(self._device)
        # libraries allocate workspaces per stream, so warm-up and capture share one
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate during capture
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()
        return graph


class GraphMismatchError(RuntimeError): ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCounts:
    """Counters of CUDA graphs and of the steps that they ran."""

    num_captured: int = 0
    num_steps: int = 0
    # steps without a graph, by the limit that they exceed: "rows", "blocks" of decode rows, chunks
    # of "prompts" or segments of a "shared prefix"
    eager_steps: Mapping[str, int] = field(default_factory=dict)


class StepGraphs:
    """Captures and replays the steps of one decoder on one pool; used by one thread.

    The decoder needs ops of fixed shapes, and the last block of the cache must belong to no
    sequence. Raises RuntimeError: a step cannot be captured.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, shape: GraphShape, graphs: CudaGraphs
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        _, num_blocks, self._num_kv_heads, self._block_size, _ = cache.k.shape
        self._sizes = shape.sizes()
        self._buffers = StepBuffers(
            self._sizes.all(),
            scrap_block=num_blocks - 1,
            block_size=self._block_size,
            spec=decoder.spec,
            dtype=decoder.dtype,
            device=cache.k.device,
        )
        self._uploads = IndexUploads(cache.k.device)
        self._num_steps = 0
        self._eager: Counter[str] = Counter()
        # largest first: the others fit into its memory
        in_order = sorted(self._sizes.all(), key=lambda size: size.rows, reverse=True)
        self._graphs = {size: self._capture(graphs, size) for size in in_order}

    @property
    def counts(self) -> GraphCounts:
        return GraphCounts(
            num_captured=len(self._graphs), num_steps=self._num_steps, eager_steps=dict(self._eager)
        )

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Return logits [S, V] of a host batch, valid until the next step; None without graph."""
        index = self._index(batch)
        size = self._sizes.pick(index.size)
        if isinstance(size, str):
            self._eager[size] += 1
            return None
        self._num_steps += 1
        return self._replay(batch, index, size)

    @torch.inference_mode()
    def check(self, plain: Decoder) -> None:
        """Compare every graph with an eager pass of `plain`; the pool must be unused.

        `plain` is the same model with verified ops. Raises GraphMismatchError: they differ by more
        than rounding.
        """
        pool = self._cache.k
        generator = torch.Generator(pool.device).manual_seed(0)
        used = min(_CHECKED_ROWS * _CHECKED_BLOCKS + 4, pool.shape[1] - 1)
        for tensor in (self._cache.k, self._cache.v):
            tensor[:, :used].normal_(generator=generator)
        try:
            for size in self._graphs:
                batch = checked_step(
                    size, pool, plain.vocab_size, joins_segments=self._decoder.ops.joins_segments
                )
                if batch is None:
                    continue
                index = self._index(batch)
                wanted = plain.forward(on_device(batch, self._uploads, pool.device), self._cache)
                made = self._replay(batch, index, size)
                errors = (made - wanted).norm(dim=1) / wanted.norm(dim=1)
                # median: a near tie of the router may change one row
                error = float(errors.median())
                # written so that NaN is a mismatch
                if not error <= _TOLERANCE[pool.dtype]:
                    raise GraphMismatchError(
                        f"the CUDA graph of {size.rows} rows differs from the eager pass by a "
                        f"relative error of {error:.2g} in its logits"
                    )
        finally:
            for tensor in (self._cache.k, self._cache.v):
                tensor[:, :used] = 0

    def _index(self, batch: ForwardBatch) -> StepIndex:
        return StepIndex(
            batch.attention,
            num_rows=len(batch.token_ids),
            num_kv_heads=self._num_kv_heads,
            block_size=self._block_size,
            joins_segments=self._decoder.ops.joins_segments,
        )

    def _capture(self, graphs: CudaGraphs, size: StepSize) -> torch.cuda.CUDAGraph:
        token_ids, positions, slots, index = self._buffers.inputs(size)
        step = partial(
            self._decoder.forward_fixed,
            token_ids,
            positions,
            slots,
            size,
            index,
            self._cache,
            self._buffers.outputs(size),
        )
        return graphs.capture(step)

    def _replay(self, batch: ForwardBatch, index: StepIndex, size: StepSize) -> torch.Tensor:
        self._buffers.fill(batch, index, size)
        self._graphs[size].replay()
        made = self._buffers.outputs(size)
        if not isinstance(made, LastRows):
            return made[: len(batch.logits_idx)]
        device = self._buffers.numbers.device
        logits_idx = self._uploads.upload(batch.logits_idx.numpy(), device)
        return self._decoder.finish(made, logits_idx)


def checked_step(
    size: StepSize,
    pool: torch.Tensor,  # [L, N, G, B, D]
    vocab_size: int,
    *,
    joins_segments: bool = True,
) -> ForwardBatch | None:
    """Return a small host batch of the kind of `size`; None if pool or size are too small.

    Decode rows read separate blocks, the last one partly. If the size has segments, all of them
    also read a shared block; if it has chunks, two prompts follow. One prompt has a cached block,
    unless that is a segment (without `joins_segments`, see `StepIndex`) that does not fit.
    """
    block_size, num_blocks = pool.shape[3], pool.shape[1] - 1
    has_run, has_chunks = size.segment_items > 0, size.chunk_items > 0
    goes_on = has_chunks and (joins_segments or has_run)
    lens = [min(block_size, max(1, size.rows // 4)), 1] if has_chunks else []
    free = num_blocks - has_run - 3 * has_chunks
    num_rows = min(_CHECKED_ROWS, size.decode_rows, size.rows - sum(lens), free)
    if num_rows < 1:
        return None
    per_row = min(_CHECKED_BLOCKS, size.row_blocks, free // num_rows)
    rows = torch.arange(num_rows)
    inside = rows * 7 % block_size
    own_start = block_size * has_run
    last = rows * per_row + per_row - 1
    decode = DecodePart.of_rows(
        torch.arange(num_rows * per_row).view(num_rows, per_row),
        inside + 1,
        block_size=block_size,
        first_position=own_start,
    )
    positions = [own_start + (per_row - 1) * block_size + inside]
    slots = [last * block_size + inside]
    logits_idx, segments, prefill = [rows], [], None
    next_block = num_rows * per_row
    if has_run:
        segments.append(
            PrefixSegment(
                query_idx=rows, block_ids=torch.tensor([next_block]), num_tokens=block_size
            )
        )
        next_block += 1
    if has_chunks:
        starts = (num_rows, num_rows + lens[0])
        prefill = PrefillPart(starts=starts, lens=tuple(lens))
        if goes_on:
            segments.append(
                PrefixSegment(
                    query_idx=num_rows + torch.arange(lens[0]),
                    block_ids=torch.tensor([next_block]),
                    num_tokens=block_size,
                    chunk=0,
                )
            )
        begin = block_size * goes_on
        positions += [begin + torch.arange(lens[0]), torch.zeros(1, dtype=torch.int64)]
        slots += [(next_block + 1) * block_size + torch.arange(lens[0])]
        slots += [torch.tensor([(next_block + 2) * block_size])]
        logits_idx.append(num_rows + torch.tensor([sum(lens) - 1]))
    token_ids = (torch.arange(num_rows + sum(lens)) * 31 + 1) % vocab_size
    return ForwardBatch(
        token_ids=token_ids,
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        logits_idx=torch.cat(logits_idx),
        attention=AttentionPlan(
            num_decode=num_rows, decode=decode, prefill=prefill, segments=tuple(segments)
        ),
    )


def working_bytes(spec: ModelSpec, size: StepSize, dtype: torch.dtype) -> int:
    """Estimate the memory of a captured step besides its buffers: tensors of one layer or head.

    Computed from shapes, not measured on a GPU; doubled because of fragmentation.
    """
    item, dim, head_dim = dtype.itemsize, spec.model_dim, spec.head_dim
    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = (2 * dim + (heads + spec.num_heads) * head_dim) * item + 4 * head_dim
    dense = (2 * dim + 3 * spec.ffn_dim) * item
    sparse = 0
    if spec.moe is not None:
        sparse = (2 * dim + spec.moe.top_k * (spec.moe.ffn_dim + dim)) * item
        sparse += spec.moe.num_experts * 8
    # float32 partial results of spans and segments
    partial_rows = size.span_places + size.places
    partials = partial_rows * spec.num_heads * (head_dim + 1) * 4
    head = size.rows * has_logits(size) * (2 * dim + spec.vocab_size) * item
    return 2 * max(size.rows * max(attention, dense, sparse) + partials, head)


# 12 MiB of indices; steps that need more run eagerly
_MAX_ENTRIES = 1 << 20
# memory of one graph's launches; a guess, not measured
_GRAPH_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSetup:
    """The graphs that an engine captures once its KV pool exists."""

    shape: GraphShape
    ops: Ops
    # the options require graphs, so a failed capture is an error
    is_required: bool = False

    def needed_bytes(self, spec: ModelSpec, dtype: torch.dtype) -> int:
        """Return the device bytes that buffers and graphs need, without the scrap block."""
        sizes = self.shape.sizes().all()
        return (
            StepBuffers.bytes_of(sizes, spec, dtype)
            + max(working_bytes(spec, size, dtype) for size in sizes)
            + len(sizes) * _GRAPH_BYTES
        )

    def capture(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        cache: KVCache,
        plain: Decoder,
        *,
        graphs: CudaGraphs | None = None,
    ) -> StepGraphs | None:
        """Capture a graph of every size and compare it with an eager pass; None if that fails.

        The last block of `cache` must belong to no sequence. `plain` is the decoder of eager
        passes. Raises ConfigError: it fails, and the options require graphs.
        """
        try:
            made = StepGraphs(
                Decoder(spec, weights, ops=self.ops),
                cache,
                shape=self.shape,
                graphs=graphs or CudaGraphs(cache.k.device),
            )
            made.check(plain)
        # compilers and drivers raise any exception, and the engine works without graphs
        except Exception as error:
            if self.is_required:
                raise ConfigError(
                    f"engine.cuda_graphs=true, but capturing failed: {error_text(error)}; set it "
                    'to "auto" to run without graphs'
                ) from error
            _logger.warning("running without CUDA graphs: %s", error_text(error))
            return None
        _logger.info(
            "captured %d CUDA graphs: up to %d rows for decodes, up to %d with prompts",
            made.counts.num_captured,
            self.shape.decode[-1],
            self.shape.mixed[-1] if self.shape.mixed else 0,
        )
        return made


def plan_graphs(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    *,
    ops: Ops,
    is_streamed: bool = False,
) -> GraphSetup | None:
    """Return the graphs that an engine captures; None if it captures none.

    `kv_offload` must be resolved. Raises ConfigError: the options require graphs, and they are not
    possible.
    """
    if config.cuda_graphs is False:
        return None
    obstacles = (
        (device.type != "cuda", f"the engine runs on {device}, and they need CUDA"),
        (is_streamed, "weights are streamed (device_weight_bytes, or weights='shared')"),
        (config.kv_offload is True, "KV is in host memory (kv_offload)"),
    )
    reason = next((text for holds, text in obstacles if holds), "")
    if not reason and not ops.is_fixed:
        reason = f"they need Triton's kernels: {install_command('gpu')}"
    if reason:
        if config.cuda_graphs is True:
            raise ConfigError(
                f'engine.cuda_graphs is true, but {reason}; set it to "auto" to run without graphs'
            )
        if device.type == "cuda":
            _logger.info("running without CUDA graphs: %s", reason)
        return None
    return GraphSetup(
        shape=graph_shape(config, spec), ops=ops, is_required=config.cuda_graphs is True
    )


def max_decode_rows(config: EngineConfig) -> int:
    """Return the most decode rows of a step, including drafts."""
    return min(config.max_num_seqs * (1 + config.num_drafts), config.token_budget)


def graph_shape(config: EngineConfig, spec: ModelSpec) -> GraphShape:
    max_len = max_sequence_len(config, spec.max_model_len)
    return GraphShape.within(
        max_rows=max_decode_rows(config),
        max_tokens=config.token_budget,
        max_row_blocks=-(-max_len // config.block_size_tokens),
        max_entries=_MAX_ENTRIES,
        block_size=config.block_size_tokens,
        num_kv_heads=spec.num_kv_heads,
    )
