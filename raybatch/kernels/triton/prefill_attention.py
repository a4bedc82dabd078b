"""Attention of the chunks of prompts: causal over the chunk, in full over the prompt before it.

What a chunk alone reads of its prompt's earlier blocks is computed in the same program as the chunk
itself, so there is nothing to merge. A long run is left to `context_attention`, which cuts it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raybatch.kernels.attention_plan import ContextPart, PrefillPart
from raybatch.kernels.triton.launch import to_table
from raybatch.kernels.triton.ragged import ITEM_QUERIES, Item, attend_items

# from here on, merging costs less than a single program that walks the whole run
_MAX_JOINED_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedChunks:
    """The chunks of a plan in the form that every layer of a step uses.

    Args:
        items: int64 [I, fields of Item].
        block_ids: int64, the blocks of the runs that chunks read alone.
        positions: int64 [T].
        max_queries: of an item.
    """

    items: torch.Tensor
    block_ids: torch.Tensor
    positions: torch.Tensor
    max_queries: int


def prepare_chunks(
    part: PrefillPart,
    contexts: Sequence[ContextPart],
    *,
    positions: torch.Tensor,  # int64 [T]
) -> tuple[PreparedChunks, tuple[ContextPart, ...]]:
    """Join chunks with the runs that they read alone; return them, and the contexts left over.

    Reads two row numbers of each such run from the device.
    """
    joined = _runs_of_chunks(part, contexts)
    items: list[Item] = []
    blocks: list[torch.Tensor] = []
    num_blocks = 0
    for start, length in zip(part.starts, part.lens, strict=True):
        run = joined.get(start)
        for query in range(0, length, ITEM_QUERIES):
            items.append(
                Item(
                    first_query=start + query,
                    num_queries=min(ITEM_QUERIES, length - query),
                    first_place=start + query,
                    first_block=num_blocks,
                    num_tokens=run.num_tokens if run is not None else 0,
                    first_position=run.first_position if run is not None else 0,
                    chunk_start=start,
                )
            )
        if run is not None:
            blocks.append(run.block_ids)
            num_blocks += len(run.block_ids)
    left = {id(run) for run in joined.values()}
    prepared = PreparedChunks(
        items=to_table(items, len(Item._fields), positions.device),
        block_ids=torch.cat(blocks) if blocks else positions,
        positions=positions,
        max_queries=max(item.num_queries for item in items),
    )
    return prepared, tuple(context for context in contexts if id(context) not in left)


def _runs_of_chunks(part: PrefillPart, contexts: Sequence[ContextPart]) -> dict[int, ContextPart]:
    """Return, by first row of a chunk, a run that all of the chunk reads and nobody else."""
    lens = dict(zip(part.starts, part.lens, strict=True))
    lengths = set(part.lens)
    candidates = [
        context
        for context in contexts
        if len(context.query_idx) in lengths and context.num_tokens <= _MAX_JOINED_TOKENS
    ]
    if not candidates:
        return {}
    bounds = torch.stack([context.query_idx[[0, -1]] for context in candidates]).tolist()
    runs: dict[int, ContextPart] = {}
    for context, (first, last) in zip(candidates, bounds, strict=True):
        count = len(context.query_idx)
        # rows of a context differ, so these are all rows of the chunk; the order is of no matter
        if lens.get(first) == count == last - first + 1:
            runs.setdefault(first, context)
    return runs


def attend_chunks_into(
    output: torch.Tensor,  # [T, H, D], contiguous; rows of chunks are overwritten
    lse: torch.Tensor,  # float32 [T, H], contiguous; rows of chunks are overwritten
    q: torch.Tensor,  # [T, H, D], last dimension contiguous
    k: torch.Tensor,  # [T, G, D], last dimension contiguous
    v: torch.Tensor,  # [T, G, D], last dimension contiguous
    k_pool: torch.Tensor,  # [N, G, B, D]
    v_pool: torch.Tensor,  # [N, G, B, D]
    prepared: PreparedChunks,
    window: int | None,
) -> None:
    """Attend with every row of every chunk."""
    attend_items(
        output,
        lse,
        q,
        (k, v),
        k_pool,
        v_pool,
        items=prepared.items,
        rows=prepared.positions,
        positions=prepared.positions,
        block_ids=prepared.block_ids,
        max_queries=prepared.max_queries,
        window=window,
    )
