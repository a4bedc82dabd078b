"""The tensors that a captured decode step reads and writes, and how a step is put into them."""

from dataclasses import dataclass

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.kernels.attention_plan import FixedDecode
from raybatch.models.config import ModelSpec

# of the index tensors
_ITEM_BYTES = 8
# float32 partial results of splits, at most so many of a row and head
_MAX_SPLITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeShape:
    """How large captured steps may be.

    Args:
        sizes: rows of a captured step, ascending; a step is padded to the next one.
        max_row_blocks: blocks that one row may read.
        max_entries: pairs of a row and a block of a step, padding included.
    """

    sizes: tuple[int, ...]
    max_row_blocks: int
    max_entries: int

    @property
    def max_rows(self) -> int:
        return self.sizes[-1]

    def entries_of(self, size: int) -> int:
        """Return how many entries a step of `size` rows has room for."""
        return min(size * self.max_row_blocks, self.max_entries)

    def buffer_bytes(self, vocab_size: int) -> int:
        entries = 3 * self.entries_of(self.max_rows)
        rows = 5 * self.max_rows + 2
        return (entries + rows) * _ITEM_BYTES + self.max_rows * vocab_size * 4


class DecodeBuffers:
    """Inputs and logits of decode steps; steps of every size use the first rows of the same.

    Args:
        scrap_block: block of the pool that is no sequence's; padded rows read and write it.
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
        self._scrap_block = scrap_block
        self._scrap_slot = scrap_block * block_size
        num_rows, num_entries = shape.max_rows, shape.entries_of(shape.max_rows)
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device)
        self._positions = torch.zeros_like(self.token_ids)
        self._slots = torch.full_like(self.token_ids, self._scrap_slot)
        self._row_numbers = torch.arange(num_rows + 1, device=device)
        self._starts = self._row_numbers.clone()
        self._block_ids = torch.full((num_entries,), scrap_block, device=device)
        self._num_valid = torch.zeros_like(self._block_ids)
        self._num_valid[:num_rows] = 1
        self._first_positions = torch.zeros_like(self._block_ids)

    def part(self, size: int) -> FixedDecode:
        """Return the views of a step of `size` rows."""
        num_entries = self.shape.entries_of(size)
        return FixedDecode(
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            starts=self._starts[: size + 1],
            block_ids=self._block_ids[:num_entries],
            num_valid=self._num_valid[:num_entries],
            first_positions=self._first_positions[:num_entries],
            max_row_blocks=self.shape.max_row_blocks,
        )

    def fits(self, batch: ForwardBatch, size: int) -> bool:
        """Return whether the blocks that the rows of a batch read have room in a step of `size`."""
        part = batch.attention.decode
        assert part is not None, "a step of decodes"
        num_padded = size - len(batch.token_ids)
        return len(part.block_ids) + num_padded <= self.shape.entries_of(size)

    @torch.inference_mode()
    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Put a step of decodes into the first rows, and padding into the rest of `size` rows.

        What is copied is on the device already, and nothing of it is waited for.
        """
        part, num_rows = batch.attention.decode, len(batch.token_ids)
        assert part is not None, "a step of decodes"
        for target, source, padding in (
            (self.token_ids, batch.token_ids, 0),
            (self._positions, batch.positions, 0),
            (self._slots, batch.slot_mapping, self._scrap_slot),
        ):
            target[:num_rows].copy_(source)
            target[num_rows:size].fill_(padding)
        owners, order = part.owners.sort(stable=True)
        stop = len(order)
        end = stop + size - num_rows
        # every padded row reads one position of the scrap block, so that it has a result at all
        numbers = self._row_numbers
        self._starts[:num_rows].copy_(torch.searchsorted(owners, numbers[:num_rows]))
        self._starts[num_rows : size + 1].copy_(numbers[: size - num_rows + 1] + stop)
        self._block_ids[:stop].copy_(part.block_ids.index_select(0, order))
        self._block_ids[stop:].fill_(self._scrap_block)
        self._num_valid[:stop].copy_(part.num_valid.index_select(0, order))
        self._num_valid[stop:end].fill_(1)
        self._num_valid[end:].fill_(0)
        if part.first_positions is not None:
            self._first_positions[:stop].copy_(part.first_positions.index_select(0, order))
        self._first_positions[stop:end].fill_(0)


def working_bytes(spec: ModelSpec, num_rows: int, dtype: torch.dtype) -> int:
    """Return the most that a captured step needs besides its buffers: tensors of one layer or head.

    Reasoned from shapes and not measured on a GPU; twice the sum, as freed pieces do not all fit
    what comes after them.
    """
    item, dim, head_dim = dtype.itemsize, spec.model_dim, spec.head_dim
    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = (2 * dim + (heads + spec.num_heads) * head_dim) * item + 4 * head_dim
    attention += _MAX_SPLITS * spec.num_heads * (head_dim + 1) * 4
    dense = (2 * dim + 3 * spec.ffn_dim) * item
    sparse = 0
    if spec.moe is not None:
        sparse = (2 * dim + spec.moe.top_k * (spec.moe.ffn_dim + dim)) * item
        sparse += spec.moe.num_experts * 8
    head = (2 * dim + spec.vocab_size) * item
    return 2 * num_rows * max(attention, dense, sparse, head)
