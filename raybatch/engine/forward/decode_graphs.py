"""Decode steps as graphs: captured once for each of a few sizes, then repeated.

A step of decodes is hundreds of short launches, which a host makes more slowly than a GPU runs them
where few rows decode. A graph is one launch. Steps with prompts, or with runs that sequences share,
have other shapes every time and run as they are.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart
from raybatch.kernels.step_index import MAX_SPLITS, StepIndex, StepSize
from raybatch.models.config import ModelSpec

# kernels are compiled and libraries take their memory before a capture, which allows neither
_NUM_WARM_UPS = 2

_logger = logging.getLogger(__name__)
# rows of the check of a captured step, and blocks that each of them reads
_CHECKED_ROWS, _CHECKED_BLOCKS = 8, 3
# relative error of a row's logits: one wrong block is far beyond, another order of sums far below
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """How large captured steps may be."""

    # rows of a captured step, ascending; a step is padded to the next one
    sizes: tuple[int, ...]
    # blocks that one row may read
    max_row_blocks: int
    # pairs of a row and a block of a step
    max_entries: int

    @property
    def max_rows(self) -> int:
        return self.sizes[-1]

    def entries_of(self, size: int) -> int:
        return min(size * self.max_row_blocks, self.max_entries)

    def size_of(self, size: int) -> StepSize:
        return StepSize(
            rows=size,
            decode_rows=size,
            entries=self.entries_of(size),
            row_blocks=self.max_row_blocks,
        )

    def buffer_bytes(self, vocab_size: int) -> int:
        index = self.size_of(self.max_rows).num_index * 4
        return index + self.max_rows * (3 * _ITEM_BYTES + vocab_size * 4)


class DecodeBuffers:
    """Inputs and logits of decode steps; steps of every size use the first rows of the same.

    `scrap_block`: block of the pool that is no sequence's; padded rows write it.
    """

    def __init__(
        self,
        shape: DecodeShape,
        *,
        scrap_block: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._block_size = block_size
        self._scrap_slot = scrap_block * block_size
        num_rows = shape.max_rows
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)
        self.positions = torch.zeros_like(self.token_ids)
        self.slots = torch.full_like(self.token_ids, self._scrap_slot)
        num_index = shape.size_of(num_rows).num_index
        self._index = torch.zeros(num_index, dtype=torch.int32, device=device)
        self._host = np.zeros(num_index, np.int32)

    def index(self, size: int) -> torch.Tensor:
        return self._index[: self.shape.size_of(size).num_index]

    @torch.inference_mode()
    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Put a step of decodes into the first rows, and padding into the rest of `size` rows."""
        num_rows = len(batch.token_ids)
        for target, source, padding in (
            (self.token_ids, batch.token_ids, 0),
            (self.positions, batch.positions, 0),
            (self.slots, batch.slot_mapping, self._scrap_slot),
        ):
            target[:num_rows].copy_(source)
            target[num_rows:size].fill_(padding)
        # of decodes alone, nothing depends on the heads
        index = StepIndex(
            batch.attention, num_rows=num_rows, num_kv_heads=1, block_size=self._block_size
        )
        num_written = index.write(self.shape.size_of(size), self._host)
        self._index[:num_written].copy_(torch.from_numpy(self._host[:num_written]))


class CudaGraphs:
    """Graphs of CUDA, which share one pool of memory and never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run a function several times and return it as a graph.

        It reads and writes tensors that live as long as the graph; whatever else it makes is its
        own. The largest one comes first, so that others fit its memory. Raises RuntimeError: it
        cannot be recorded.
        """
        current = torch.cuda.current_stream(self._device)
        # libraries keep their working memory by stream, so that warm-up and capture share one
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()
        return graph


class GraphMismatchError(RuntimeError): ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCounts:
    """What graphs did."""

    num_captured: int = 0
    num_steps: int = 0
    # steps without a graph by why: "prompts", "shared prefix", "rows" (more than the largest graph
    # has) or "blocks" (more than its buffers hold)
    eager_steps: Mapping[str, int] = field(default_factory=dict)


def step_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the rows of captured steps up to `max_rows`: 1 2 4 8 16 24 32 and on.

    From 64 rows on, the padding of a step is an eighth of its rows at most.
    """
    sizes = {max_rows}
    size = 1
    while size < max_rows:
        sizes.add(size)
        size += max(1, min(size, 8 * max(1, size // 64)))
    return tuple(sorted(sizes))


class DecodeGraphs:
    """Captured decode steps of one decoder over one pool; owned by one thread.

    The decoder has ops of fixed shapes, and the last block of the cache is no sequence's. Raises
    RuntimeError: a step cannot be captured.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, shape: DecodeShape, graphs: CudaGraphs
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._shape = shape
        self._buffers = DecodeBuffers(
            shape,
            scrap_block=cache.k.shape[1] - 1,
            block_size=cache.k.shape[3],
            vocab_size=decoder.vocab_size,
            device=cache.k.device,
        )
        self._num_steps = 0
        self._eager: Counter[str] = Counter()
        # the largest one first: the others fit into the memory that it has taken
        self._graphs = {size: self._capture(graphs, size) for size in reversed(shape.sizes)}

    @property
    def counts(self) -> GraphCounts:
        return GraphCounts(
            num_captured=len(self._graphs), num_steps=self._num_steps, eager_steps=dict(self._eager)
        )

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Return the logits of a step [S, V], valid until the next one; None if it has no graph."""
        plan, num_rows = batch.attention, len(batch.token_ids)
        size = next((size for size in self._shape.sizes if size >= num_rows), None)
        if plan.prefill is not None or plan.decode is None:
            reason = "prompts"
        elif plan.contexts:
            reason = "shared prefix"
        elif size is None:
            reason = "rows"
        elif len(plan.decode.block_ids) > self._shape.entries_of(size):
            reason = "blocks"
        else:
            self._num_steps += 1
            return self._replay(batch, size)
        self._eager[reason] += 1
        return None

    @torch.inference_mode()
    def check(self, plain: Decoder) -> None:
        """Compare every graph with a plain forward pass; the pool must be unused, and is after it.

        `plain` is the same model with ops that are known to be right. Raises GraphMismatchError:
        they differ by more than rounding does.
        """
        pool, shape = self._cache.k, self._shape
        num_blocks = pool.shape[1] - 1
        num_rows = min(_CHECKED_ROWS, shape.max_rows, num_blocks)
        per_row = min(_CHECKED_BLOCKS, shape.max_row_blocks, num_blocks // num_rows)
        used = num_rows * per_row
        generator = torch.Generator(pool.device).manual_seed(0)
        for tensor in (self._cache.k, self._cache.v):
            tensor[:, :used].normal_(generator=generator)
        try:
            for size in shape.sizes:
                batch = _random_decodes(
                    min(size, num_rows), per_row, pool, plain.vocab_size, generator
                )
                wanted = plain.forward(batch, self._cache)
                made = self._replay(batch, size)
                errors = (made - wanted).norm(dim=1) / wanted.norm(dim=1)
                # one row may be apart: a router that nearly ties takes another expert
                error = float(errors.median())
                # also NaN, of which nothing is true
                if not error <= _TOLERANCE[pool.dtype]:
                    raise GraphMismatchError(
                        f"the captured step of {size} rows differs from the plain forward pass by "
                        f"{error:.2g} of its logits"
                    )
        finally:
            for tensor in (self._cache.k, self._cache.v):
                tensor[:, :used] = 0

    def _capture(self, graphs: CudaGraphs, size: int) -> torch.cuda.CUDAGraph:
        buffers = self._buffers
        step = partial(
            self._decoder.forward_fixed,
            buffers.token_ids[:size],
            buffers.positions[:size],
            buffers.slots[:size],
            None,
            self._shape.size_of(size),
            buffers.index(size),
            self._cache,
            buffers.logits[:size],
        )
        return graphs.capture(step)

    def _replay(self, batch: ForwardBatch, size: int) -> torch.Tensor:
        self._buffers.fill(batch, size)
        self._graphs[size].replay()
        return self._buffers.logits[: len(batch.token_ids)]


def _random_decodes(
    num_rows: int,
    per_row: int,
    pool: torch.Tensor,  # [L, N, G, B, D]
    vocab_size: int,
    generator: torch.Generator,
) -> ForwardBatch:
    """Return a step whose row r reads the blocks r * per_row.., the last one in part."""
    block_size, device = pool.shape[3], pool.device
    rows = torch.arange(num_rows)
    inside = rows * 7 % block_size
    blocks = torch.arange(num_rows * per_row)
    places = blocks % per_row
    last = rows * per_row + per_row - 1
    num_valid = torch.full_like(blocks, block_size)
    num_valid[last] = inside + 1
    decode = DecodePart(
        block_ids=blocks,
        owners=blocks // per_row,
        num_valid=num_valid,
        is_contiguous=True,
        first_positions=places * block_size,
    )
    return ForwardBatch(
        token_ids=torch.randint(vocab_size, (num_rows,), device=device, generator=generator),
        positions=((per_row - 1) * block_size + inside).to(device),
        slot_mapping=(last * block_size + inside).to(device),
        logits_idx=rows.to(device),
        attention=AttentionPlan(num_decode=num_rows, decode=decode, prefill=None, contexts=()),
    )


# of the index tensors
_ITEM_BYTES = 8


def working_bytes(spec: ModelSpec, num_rows: int, dtype: torch.dtype) -> int:
    """Return the most that a captured step needs besides its buffers: tensors of one layer or head.

    Reasoned from shapes and not measured on a GPU; twice the sum, as freed pieces do not all fit
    what comes after them.
    """
    item, dim, head_dim = dtype.itemsize, spec.model_dim, spec.head_dim
    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = (2 * dim + (heads + spec.num_heads) * head_dim) * item + 4 * head_dim
    # float32 partial results of splits
    attention += MAX_SPLITS * spec.num_heads * (head_dim + 1) * 4
    dense = (2 * dim + 3 * spec.ffn_dim) * item
    sparse = 0
    if spec.moe is not None:
        sparse = (2 * dim + spec.moe.top_k * (spec.moe.ffn_dim + dim)) * item
        sparse += spec.moe.num_experts * 8
    head = (2 * dim + spec.vocab_size) * item
    return 2 * num_rows * max(attention, dense, sparse, head)
