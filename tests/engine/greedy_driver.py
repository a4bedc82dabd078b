"""Drives a decoder step by step with plans built by hand, without the engine's scheduler."""

from dataclasses import dataclass, field

import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment


@dataclass
class Sequence:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_shared_blocks: int = 0


@dataclass
class GreedyDriver:
    """Greedy decoding of several sequences at once.

    `shared_tokens` leading tokens (a multiple of the block size) are computed by the first
    sequence alone and read by all others through one shared-prefix segment.
    """

    decoder: Decoder
    cache: KVCache
    block_size: int
    free_blocks: list[int]
    chunk: int | None = None
    shared_tokens: int = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        sequences = [Sequence(list(prompt)) for prompt in prompts]
        if self.shared_tokens:
            self._share(sequences)
        while any(
            len(s.tokens) < len(p) + num_tokens for s, p in zip(sequences, prompts, strict=True)
        ):
            self._step(sequences, [len(p) + num_tokens for p in prompts])
        return [s.tokens[len(p) :] for s, p in zip(sequences, prompts, strict=True)]

    def _share(self, sequences: list[Sequence]) -> None:
        first = Sequence(sequences[0].tokens[: self.shared_tokens])
        self._run([], [(first, self.shared_tokens)])
        for sequence in sequences:
            sequence.blocks = list(first.blocks)
            sequence.num_shared_blocks = len(first.blocks)
            sequence.num_computed = self.shared_tokens

    def _step(self, sequences: list[Sequence], limits: list[int]) -> None:
        unfinished = [s for s, n in zip(sequences, limits, strict=True) if len(s.tokens) < n]
        decoding = [s for s in unfinished if len(s.tokens) - s.num_computed == 1]
        chunks = []
        for sequence in unfinished:
            missing = len(sequence.tokens) - sequence.num_computed
            if missing > 1:
                chunks.append((sequence, min(missing, self.chunk or missing)))
        logits = self._run(decoding, chunks)
        scheduled = decoding + [s for s, _ in chunks]
        for sequence, token in zip(scheduled, logits.argmax(dim=-1).tolist(), strict=True):
            if sequence.num_computed == len(sequence.tokens):
                sequence.tokens.append(token)

    def _run(self, decoding: list[Sequence], chunks: list[tuple[Sequence, int]]) -> torch.Tensor:
        tokens, positions, slots, last_rows, starts = [], [], [], [], []
        segments = []
        for sequence, count in [(s, 1) for s in decoding] + chunks:
            start = sequence.num_computed
            while len(sequence.blocks) * self.block_size < start + count:
                sequence.blocks.append(self.free_blocks.pop(0))
            starts.append(len(tokens))
            if count > 1 and start > 0 and start > sequence.num_shared_blocks * self.block_size:
                chunk = len(starts) - 1 - len(decoding)
                segments.append(self._context(sequence, starts[-1], count, start, chunk))
            for position in range(start, start + count):
                tokens.append(sequence.tokens[position])
                positions.append(position)
                block, offset = divmod(position, self.block_size)
                slots.append(sequence.blocks[block] * self.block_size + offset)
            last_rows.append(len(tokens) - 1)
            sequence.num_computed += count
        segments += self._shared_segments(decoding, chunks, starts)
        device = self.cache.k.device
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            logits_idx=torch.tensor(last_rows, device=device),
            attention=AttentionPlan(
                num_decode=len(decoding),
                decode=self._decode_part(decoding) if decoding else None,
                prefill=PrefillPart(
                    starts=tuple(starts[len(decoding) :]), lens=tuple(n for _, n in chunks)
                )
                if chunks
                else None,
                segments=tuple(segments),
            ),
        )
        return self.decoder.forward(batch, self.cache)

    def _context(
        self, sequence: Sequence, row: int, count: int, start: int, chunk: int
    ) -> PrefixSegment:
        own = sequence.blocks[sequence.num_shared_blocks :]
        first = sequence.num_shared_blocks * self.block_size
        used = -(-(start - first) // self.block_size)
        return PrefixSegment(
            query_idx=torch.arange(row, row + count),
            block_ids=torch.tensor(own[:used]),
            num_tokens=start - first,
            first_position=first,
            chunk=chunk,
        )

    def _shared_segments(self, decoding, chunks, starts) -> list[PrefixSegment]:
        rows, blocks = [], []
        for (sequence, count), start in zip(
            [(s, 1) for s in decoding] + chunks, starts, strict=True
        ):
            if sequence.num_shared_blocks:
                rows += range(start, start + count)
                blocks = sequence.blocks[: sequence.num_shared_blocks]
        if not rows:
            return []
        return [
            PrefixSegment(
                query_idx=torch.tensor(rows),
                block_ids=torch.tensor(blocks),
                num_tokens=len(blocks) * self.block_size,
            )
        ]

    def _decode_part(self, decoding: list[Sequence]) -> DecodePart:
        entries = []
        for owner, sequence in enumerate(decoding):
            for i, block in enumerate(sequence.blocks):
                if i >= sequence.num_shared_blocks:
                    first = i * self.block_size
                    valid = min(self.block_size, sequence.num_computed - first)
                    entries.append((block, owner, valid, first))
        entries.sort()
        blocks, owners, valid, first = (
            torch.tensor(column) for column in zip(*entries, strict=True)
        )
        return DecodePart(
            block_ids=blocks,
            owners=owners,
            num_valid=valid,
            is_contiguous=bool((blocks.diff() == 1).all()),
            first_positions=first,
        )


def prompt_logits(driver: GreedyDriver, prompt: list[int]) -> torch.Tensor:
    """Return the logits of every position of one prompt, computed in one step."""
    block_size = driver.block_size
    blocks = torch.tensor([driver.free_blocks.pop(0) for _ in range(-(-len(prompt) // block_size))])
    positions = torch.arange(len(prompt))
    slots = blocks[positions // block_size] * block_size + positions % block_size
    device = driver.cache.k.device
    batch = ForwardBatch(
        token_ids=torch.tensor(prompt, device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        logits_idx=positions.to(device),
        attention=AttentionPlan(
            num_decode=0,
            decode=None,
            prefill=PrefillPart(starts=(0,), lens=(len(prompt),)),
            segments=(),
        ),
    )
    return driver.decoder.forward(batch, driver.cache)
