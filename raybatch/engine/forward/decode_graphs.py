"""Decode steps as graphs: captured once for each of a few sizes, then repeated.

A step of decodes is hundreds of short launches, which a host makes more slowly than a GPU runs them
where few rows decode. A graph is one launch. Steps with prompts, or with runs that sequences share,
have other shapes every time and run as they are.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decode_buffers import DecodeBuffers, DecodeShape
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart

# kernels are compiled and libraries take their memory before a capture, which allows neither
_NUM_WARM_UPS = 2

_logger = logging.getLogger(__name__)
# rows of the check of a captured step, and blocks that each of them reads
_CHECKED_ROWS, _CHECKED_BLOCKS = 8, 3
# relative error of a row's logits: one wrong block is far beyond, another order of sums far below
_TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}


class Graph(Protocol):
    """A recorded function."""

    def replay(self) -> None:
        """Run what was recorded again, on the same memory."""


class Graphs(Protocol):
    """Records functions; those of one instance never run at the same time and share memory."""

    def capture(self, function: Callable[[], None]) -> Graph:
        """Run a function several times and return it as a graph.

        Args:
            function: reads and writes tensors that live as long as the graph; whatever else it
                makes is its own. The largest one comes first, so that others fit its memory.

        Raises:
            RuntimeError: it cannot be recorded.
        """


class CudaGraphs:
    """Graphs of CUDA, which share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], None]) -> Graph:
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


class GraphMismatchError(RuntimeError):
    """A captured step gives other logits than the plain forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCounts:
    """What graphs did.

    Args:
        num_steps: steps that were repeated from a graph.
        eager_steps: other steps by why: "prompts", "shared prefix", "rows" (more than the largest
            graph has) or "blocks" (more than its buffers hold).
    """

    num_captured: int = 0
    num_steps: int = 0
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

    Args:
        decoder: with ops of fixed shapes.
        cache: its last block is no sequence's.

    Raises:
        RuntimeError: a step cannot be captured.
    """

    def __init__(
        self, decoder: Decoder, cache: KVCache, *, shape: DecodeShape, graphs: Graphs
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
        size = self._size_of(len(batch.token_ids))
        reason = self._why_not(batch, size)
        if reason or size is None:
            self._eager[reason] += 1
            return None
        self._num_steps += 1
        return self._replay(batch, size)

    @torch.inference_mode()
    def check(self, plain: Decoder) -> None:
        """Compare every graph with a plain forward pass; the pool must be unused, and is after it.

        `plain` is the same model with ops that are known to be right.

        Raises:
            GraphMismatchError: they differ by more than rounding does.
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

    def _capture(self, graphs: Graphs, size: int) -> Graph:
        buffers = self._buffers
        part, token_ids, logits = buffers.part(size), buffers.token_ids[:size], buffers.logits

        def step() -> None:
            self._decoder.forward_fixed(token_ids, part, self._cache, logits[:size])

        return graphs.capture(step)

    def _size_of(self, num_rows: int) -> int | None:
        return next((size for size in self._shape.sizes if size >= num_rows), None)

    def _why_not(self, batch: ForwardBatch, size: int | None) -> str:
        """Return why a step has no graph, "" if it has one."""
        plan = batch.attention
        if plan.prefill is not None or plan.decode is None:
            return "prompts"
        if plan.contexts:
            return "shared prefix"
        if size is None:
            return "rows"
        return "" if self._buffers.fits(batch, size) else "blocks"

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
    rows = torch.arange(num_rows, device=device)
    inside = rows * 7 % block_size
    blocks = torch.arange(num_rows * per_row, device=device)
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
        positions=(per_row - 1) * block_size + inside,
        slot_mapping=last * block_size + inside,
        logits_idx=rows,
        attention=AttentionPlan(num_decode=num_rows, decode=decode, prefill=None, contexts=()),
    )
