import pytest
import torch

from raybatch.kernels import attention as reference
from raybatch.kernels import step_index
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefixSegment
from raybatch.kernels.byte_numbers import FP8, INT8
from raybatch.kernels.step_index import StepIndex, parts_of
from raybatch.kernels.triton import attention as kernels
from raybatch.kernels.triton.launch import Pools
from tests.kernels.triton.support import DTYPES, Step, assert_close, spread_over
from tests.tiers import pairs, singles

HEADS = [(2, 2), (4, 2), (8, 1), (6, 2)]


MIXED = [(13, 1, 0), (8, 1, 0), (21, 1, 1), (5, 1), (0, 7), (12, 1, 1), (13, 9, 0), (0, 40)]


def heads_name(heads):
    return f"{heads[0]}of{heads[1]}"


@pytest.mark.parametrize(
    ("window", "cached", "heads"), pairs([None, 6], [[0], [1, 2, 3], [7, 0, 30, 11]], HEADS)
)
def test_decode_tokens_attend_to_all_their_blocks(cached, heads, window, device):
    sequences = [(n, 1) for n in cached]
    Step(sequences, num_decode=len(cached), heads=heads, window=window, device=device).check()


@pytest.mark.parametrize(("dtype", "window"), pairs([INT8, FP8], [None, 6]), ids=str)
def test_rows_of_8_bits_are_read_and_written_as_the_reference_does(dtype, window, device):
    Step(MIXED, num_decode=4, prefixes=(2, 3), kv_dtype=dtype, window=window, device=device).check()


@pytest.mark.parametrize(
    ("window", "lengths", "heads"), pairs([None, 6], [[1], [1, 9, 2, 17], [8, 150]], HEADS)
)
def test_prompts_attend_causally_to_themselves(lengths, heads, window, device):
    sequences = [(0, length) for length in lengths]
    Step(sequences, heads=heads, window=window, device=device).check()


@pytest.mark.parametrize(("joined_tokens", "window", "heads"), pairs([0, 4096], [None, 6], HEADS))
def test_chunks_see_their_cached_context(heads, window, joined_tokens, device, monkeypatch):
    monkeypatch.setattr(step_index, "MAX_JOINED_TOKENS", joined_tokens)
    Step([(5, 4), (0, 3), (16, 55), (70, 1)], heads=heads, window=window, device=device).check()


@pytest.mark.parametrize(("heads", "window"), singles(HEADS, [None, 1, 6, 50]))
def test_decode_chunks_and_shared_prefixes_run_in_one_step(heads, window, device):
    step = Step(MIXED, num_decode=4, prefixes=(2, 3), heads=heads, window=window, device=device)
    step.check()


@pytest.mark.parametrize(
    ("shape", "dtype"), singles([(10, 4), (16, 16), (64, 64), (80, 5), (128, 16)], DTYPES)
)
def test_head_dims_block_sizes_and_dtypes(shape, dtype, device):
    head_dim, block_size = shape
    sequences = [(2 * block_size + 3, 1, 0), (2 * block_size, 1, 0), (5, 1), (9, 6), (0, 3)]
    step = Step(
        sequences,
        num_decode=3,
        prefixes=(2,),
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    step.check()


def test_layers_of_one_model_may_differ_in_their_window(device):
    step = Step(MIXED, num_decode=4, prefixes=(2, 3), device=device)
    for window in (None, 6):
        step.window = window
        made, expected = (step.run(ops, windows=(None, 6)) for ops in (kernels, reference))
        assert_close(made, expected)


def test_garbage_in_unused_slots_and_foreign_blocks_does_not_leak(device):
    step = Step(MIXED, num_decode=4, prefixes=(2, 3), device=device)
    clean = step.run()
    used = torch.zeros_like(step.tensors["k_pool"], dtype=torch.bool)
    for table, (cached, _, _) in zip(step.tables, step.sequences, strict=True):
        for position in range(cached):
            used[table[position // step.block_size], :, position % step.block_size] = True
    step.tensors["k_pool"][~used] = 1e30
    step.tensors["v_pool"][~used] = float("nan")
    assert torch.equal(clean, step.run())


def test_a_step_without_tokens_gives_an_empty_output(device):
    plan = AttentionPlan(num_decode=0, decode=None, prefill=None, segments=())
    none = torch.zeros(0, dtype=torch.int64, device=device)
    pool = torch.zeros(3, 2, 4, 16, device=device)
    prepared = kernels.prepare_attention(
        plan, positions=none, slot_mapping=none, pool=pool, windows=(None,)
    )
    turns = torch.zeros(0, 1, 8, dtype=torch.complex64, device=device)
    projected = torch.zeros(0, 8, 16, device=device)
    heads = kernels.finish_heads(projected, 4, None, 0.0, turns, pool, pool, prepared)
    assert (0, 64) == tuple(kernels.attend(*heads, pool, pool, prepared, None).shape)


class Decode:
    """Sequences of some blocks each, the last one partly valid, in a random pool."""

    def __init__(self, num_blocks, device, heads=(4, 2), block_size=4, head_dim=16):
        torch.manual_seed(0)
        self.device = device
        total = sum(num_blocks)
        self.block_ids = torch.randperm(total + 2)[:total].sort()[0]
        self.owners = torch.arange(len(num_blocks)).repeat_interleave(torch.tensor(num_blocks))
        first = torch.cat([torch.arange(n) * block_size for n in num_blocks])
        self.positions = torch.tensor([n * block_size - 2 for n in num_blocks])
        self.part = {
            "block_ids": self.block_ids,
            "owners": self.owners,
            "num_valid": (self.positions[self.owners] + 1 - first).clamp(max=block_size),
            "first_positions": first,
        }
        self.k_pool, self.v_pool = torch.randn(2, total + 2, heads[1], block_size, head_dim)
        self.q = torch.randn(len(num_blocks), heads[0], head_dim)

    def run(self, ops, device, window=None):
        num_seqs = len(self.positions)
        plan = AttentionPlan(
            num_decode=num_seqs,
            decode=DecodePart(**self.part, is_contiguous=False),
            prefill=None,
            segments=(),
        )
        pools = self.k_pool.to(device), self.v_pool.to(device)
        positions = self.positions.to(device)
        prepared = ops.prepare_attention(
            plan, positions=positions, slot_mapping=positions, pool=pools[0], windows=(window,)
        )
        return ops.attend(self.q.to(device), *(self.q[:, :1],) * 2, *pools, prepared, window)

    def check(self, window=None):
        expected = self.run(reference, "cpu", window)
        assert_close(self.run(kernels, self.device, window), expected)


@pytest.mark.parametrize("num_programs", [1, 2, 5, 40])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_spreading_the_blocks_of_sequences_over_programs_changes_nothing(
    num_programs, window, device, monkeypatch
):
    spread_over(num_programs, monkeypatch)
    Decode([1, 9, 2, 21, 80], device).check(window)


@pytest.mark.parametrize("num_programs", [2, 40])
@pytest.mark.parametrize("window", [None, 30])
def test_tiles_that_lie_in_one_block_change_nothing(num_programs, window, device, monkeypatch):
    spread_over(num_programs, monkeypatch)
    Decode([1, 3, 2, 7], device, block_size=64).check(window)


def test_a_block_that_two_decode_tokens_own_serves_both(device):
    decode = Decode([2, 2], device)
    decode.part["block_ids"] = torch.tensor([1, 1, 3, 3])
    decode.part["owners"] = torch.tensor([0, 1, 1, 0])
    decode.part["first_positions"] = torch.tensor([0, 0, 4, 4])
    decode.part["num_valid"] = torch.tensor([4, 4, 3, 3])
    decode.check()


def test_a_window_without_first_positions_is_refused(device):
    decode = Decode([2], device)
    decode.part["first_positions"] = None
    with pytest.raises(ValueError, match="first_positions"):
        decode.run(kernels, device, 4)


class Segments:
    """Rows with results so far, and runs that some of them read.

    Args:
        runs: (rows, cached positions, first position) of each.
    """

    BLOCK_SIZE = 4

    def __init__(self, num_rows, runs, device, heads=(4, 2), head_dim=16):
        torch.manual_seed(0)
        self.device, self.runs = device, runs
        counts = [-(-tokens // self.BLOCK_SIZE) for _, tokens, _ in runs]
        self.blocks = torch.randperm(sum(counts) + 2)[: sum(counts)].split(counts)
        self.k_pool, self.v_pool = torch.randn(
            2, sum(counts) + 2, heads[1], self.BLOCK_SIZE, head_dim
        )
        self.q, self.output = torch.randn(2, num_rows, heads[0], head_dim)
        self.lse = torch.randn(num_rows, heads[0])
        end = max(first + tokens for _, tokens, first in runs)
        self.positions = end + torch.arange(num_rows) % 5

    def plan(self):
        parts = [
            PrefixSegment(
                query_idx=torch.tensor(rows),
                block_ids=blocks,
                num_tokens=tokens,
                first_position=first,
            )
            for (rows, tokens, first), blocks in zip(self.runs, self.blocks, strict=True)
        ]
        return AttentionPlan(num_decode=0, decode=None, prefill=None, segments=tuple(parts))

    def index(self):
        return StepIndex(self.plan(), num_rows=len(self.q), num_kv_heads=2, block_size=4)

    def expected(self, window):
        output, lse = self.output.clone(), self.lse.clone()
        prepared = reference.prepare_segments(
            self.plan().segments, positions=self.positions, pool=self.k_pool, windows=(window,)
        )
        reference.merge_segments_(output, lse, self.q, self.k_pool, self.v_pool, prepared, window)
        return output, lse

    def run(self, window):
        names = ("output", "lse", "q", "k_pool", "v_pool", "positions")
        tensors = [getattr(self, name).to(self.device, copy=True) for name in names]
        output, lse, q, *pools, positions = tensors
        index = self.index()
        parts = parts_of(index.size, torch.from_numpy(index.array()).to(self.device))
        kernels.add_segments_(output, lse, q, Pools(*pools), index.size, parts, positions, window)
        return output, lse

    def check(self, window=None):
        for tensor, wanted in zip(self.run(window), self.expected(window), strict=True):
            assert_close(tensor, wanted)


RUNS = {
    "one run of all rows": [([0, 1, 2, 3, 4, 5], 8, 0)],
    "of other sizes": [([0, 2, 5], 7, 0), ([1, 3], 12, 0), ([4], 1, 0)],
    "nested": [([0, 1, 2, 3, 4, 5], 4, 0), ([1, 3, 5], 8, 4), ([5], 3, 12)],
    "some rows read none": [([4], 9, 0), ([1], 70, 0)],
}


@pytest.mark.parametrize(("runs", "window", "heads"), pairs(list(RUNS), [None, 3, 9], HEADS))
def test_all_shared_runs_of_a_step_are_merged_into_their_rows(runs, window, heads, device):
    Segments(6, RUNS[runs], device, heads).check(window)


@pytest.mark.parametrize("window", [None, 30])
def test_runs_that_are_cut_into_spans_give_the_same(window, device, monkeypatch):
    monkeypatch.setattr(step_index, "_MIN_SPAN_TOKENS", 1)
    segments = Segments(5, [([0, 1, 2, 3, 4], 70, 0), ([2, 3], 9, 70)], device)
    # 18 spans of one block each for the long run, 3 for the short one
    assert 21 == segments.index().size.segment_items
    segments.check(window)


def test_a_run_is_one_item_however_many_rows_fit_a_program(device):
    segments = Segments(128, [(list(range(128)), 64, 0)], device)
    assert 1 == segments.index().size.segment_items


@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (6, 2)], ids=heads_name)
def test_sets_of_rows_larger_than_an_item_are_exact(heads, device):
    many = list(range(150))
    Segments(151, [(many, 6, 0), ([150], 3, 0)], device, heads).check()


def test_runs_that_are_merged_in_rounds_give_the_same(device, monkeypatch):
    sequences = [(13, 1, 0), (8, 1, 0), (21, 1, 1), (0, 5), (13, 3, 1)]
    step = Step(sequences, num_decode=3, prefixes=(2, 3), device=device)
    # a round for what chunks read alone, and one for each run
    monkeypatch.setattr(step_index, "MAX_RUNS", 0)
    assert 3 == len(step_index.rounds_of(step.plan(), len(step.positions)))
    step.check()
