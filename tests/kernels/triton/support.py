"""What the tests of the Triton kernels share: tolerances, and steps over a paged pool."""

import random

import torch

from raybatch.kernels import attention as reference
from raybatch.kernels import step_index
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import quantise
from raybatch.kernels.small_ops import rotation_table
from tests import tolerances
from tests.kernels.triton.interpreted import attention as kernels

# results differ by the order of float32 sums, and by one rounding to the dtype of the output
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {dtype: tolerances.of_output(dtype, 200) for dtype in DTYPES}
VARLEN_REASON = "torch 2.12 and newer have varlen_attn_out"


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def assert_close(actual, expected, factor=1):
    """Compare with a float32 result on the CPU, within the tolerance of the actual dtype."""
    tolerance = factor * TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.cpu().float(), expected, rtol=tolerance, atol=tolerance)


class Step:
    """Sequences with random KV in a pool, and the plan of one step that continues them.

    Args:
        sequences: (cached tokens, new tokens) or (cached, new, index of a shared prefix); the
            first `num_decode` have one new token each.
        prefixes: blocks of each shared prefix.
        heads: query and KV heads.
    """

    def __init__(
        self,
        sequences,
        *,
        num_decode=0,
        prefixes=(),
        window=None,
        heads=(4, 2),
        head_dim=16,
        block_size=4,
        dtype=torch.float32,
        kv_dtype=None,
        device="cpu",
    ):
        torch.manual_seed(0)
        self.head_dim, self.kv_dtype = head_dim, kv_dtype
        self.window, self.block_size, self.num_decode = window, block_size, num_decode
        self.sequences = [(*sequence, None)[:3] for sequence in sequences]
        blocks = sum(prefixes) + sum(-(-(c + n) // block_size) for c, n, _ in self.sequences)
        free = list(range(blocks + 1))
        random.Random(0).shuffle(free)
        self.shared = [[free.pop() for _ in range(count)] for count in prefixes]
        self.tables = []
        for cached, new, prefix in self.sequences:
            table = [] if prefix is None else list(self.shared[prefix])
            while len(table) * block_size < cached + new:
                table.append(free.pop())
            self.tables.append(table)
        total = sum(new for _, new, _ in self.sequences)
        shape = (blocks + 1, heads[1], block_size, head_dim)
        made = {
            "k_pool": torch.randn(shape),
            "v_pool": torch.randn(shape),
            # heads of a fused projection, as the decoder hands them over
            "qkv": torch.randn(total, heads[0] + 2 * heads[1], head_dim),
        }
        self.tensors = {name: tensor.to(dtype) for name, tensor in made.items()}
        self.heads, self.device = heads, torch.device(device)
        positions = [torch.arange(c, c + n) for c, n, _ in self.sequences]
        self.positions = torch.cat(positions)
        self.slots = torch.cat(
            [
                torch.tensor(table)[p // block_size] * block_size + p % block_size
                for table, p in zip(self.tables, positions, strict=True)
            ]
        )

    def plan(self):
        entries, own, starts, row = [], [], [], 0
        rows_of_prefix = [[] for _ in self.shared]
        for i, (table, (cached, new, prefix)) in enumerate(
            zip(self.tables, self.sequences, strict=True)
        ):
            skipped = 0 if prefix is None else len(self.shared[prefix])
            if prefix is not None:
                rows_of_prefix[prefix] += range(row, row + new)
            if i < self.num_decode:
                for j in range(skipped, len(table)):
                    first = j * self.block_size
                    valid = min(self.block_size, cached + 1 - first)
                    entries.append((table[j], i, valid, first))
            else:
                starts.append(row)
                first = skipped * self.block_size
                if cached > first:
                    blocks = table[skipped : -(-cached // self.block_size)]
                    rows = range(row, row + new)
                    own.append((rows, blocks, cached - first, first, len(starts) - 1))
            row += new
        shared = [
            (rows, blocks, len(blocks) * self.block_size, 0, None)
            for rows, blocks in zip(rows_of_prefix, self.shared, strict=True)
        ]
        segments = tuple(
            PrefixSegment(
                query_idx=torch.tensor(list(rows)),
                block_ids=torch.tensor(blocks),
                num_tokens=num_tokens,
                first_position=first,
                chunk=chunk,
            )
            for rows, blocks, num_tokens, first, chunk in own + shared
        )
        decode = None
        if entries:
            columns = zip(*sorted(entries), strict=True)
            blocks, owners, valid, first = (torch.tensor(c) for c in columns)
            decode = DecodePart(
                block_ids=blocks,
                owners=owners,
                num_valid=valid,
                is_contiguous=False,
                first_positions=first,
            )
        lens = tuple(new for _, new, _ in self.sequences[self.num_decode :])
        return AttentionPlan(
            num_decode=self.num_decode,
            decode=decode,
            prefill=PrefillPart(starts=tuple(starts), lens=lens) if lens else None,
            segments=segments,
        )

    def run(self, ops=kernels, windows=None):
        """Return the output of the step, in the dtype and on the device of the kernels."""
        is_reference = ops is reference
        device = torch.device("cpu") if is_reference else self.device
        tensors = {name: tensor.to(device, copy=True) for name, tensor in self.tensors.items()}
        if is_reference:
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
        k_pool, v_pool = tensors["k_pool"], tensors["v_pool"]
        num_heads, _ = self.heads
        if self.kv_dtype is not None:
            k_pool, v_pool = (quantise(pool, self.kv_dtype) for pool in (k_pool, v_pool))
        prepared = ops.prepare_attention(
            self.plan(),
            positions=self.positions.to(device),
            slot_mapping=self.slots.to(device),
            pool=k_pool,
            windows=windows or (self.window,),
        )
        pools = k_pool, v_pool
        # what is stored is turned as well; the test of that op says how
        turns = rotation_table(self.positions, torch.zeros(self.head_dim // 2), 1.0).to(device)
        heads = ops.finish_heads(tensors["qkv"], num_heads, None, 0.0, turns, *pools, prepared)
        return ops.attend(*heads, *pools, prepared, self.window)

    def check(self):
        """Compare the kernels with the reference, which computes in float32 on the CPU."""
        assert_close(self.run(), self.run(reference))


def spread_over(num_programs, monkeypatch, num_kv_heads=2):
    """Spread decode rows of any length over `num_programs` programs per KV head."""
    monkeypatch.setattr(step_index, "_MIN_PROGRAM_TOKENS", 1)
    monkeypatch.setattr(step_index, "_SPAN_TOKENS", 1)
    monkeypatch.setattr(step_index, "DECODE_PROGRAMS", num_programs * num_kv_heads)
