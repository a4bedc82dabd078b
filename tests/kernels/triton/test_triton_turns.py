"""Programs that take items of prompts in turns have nearly equal work, and leave nothing out."""

import numpy as np
import pytest
import torch

from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart
from raybatch.kernels.step_index import Item, StepIndex, parts_of
from raybatch.kernels.triton import attention
from raybatch.kernels.triton.jit.attention import work_of_turn
from tests.kernels.triton.support import Step

NUM_KV_HEADS, TILE_QUERIES = 8, 32


def keys_of_programs(lens, num_programs):
    """Keys that each program reads for prompts of such lengths, in the order of the kernel."""
    starts = np.cumsum([0, *lens])
    part = PrefillPart(starts=tuple(starts[:-1].tolist()), lens=tuple(lens))
    plan = AttentionPlan(num_decode=0, decode=None, prefill=part, segments=())
    index = StepIndex(plan, num_rows=starts[-1], num_kv_heads=NUM_KV_HEADS, block_size=64)
    items = [Item(*row) for row in parts_of(index.size, index.array()).chunks.reshape(-1, 7)]
    num_parts = -(-index.size.chunk_queries // TILE_QUERIES)
    num_works = len(items) * num_parts * NUM_KV_HEADS
    keys = np.zeros(num_programs, np.int64)
    taken = []
    for program in range(num_programs):
        for turn in range(-(-num_works // num_programs)):
            work = work_of_turn.fn(turn, program, num_programs)
            if work >= num_works:
                continue
            taken.append(work)
            part = len(items) * num_parts - 1 - work // NUM_KV_HEADS
            item, skipped = items[part // num_parts], part % num_parts * TILE_QUERIES
            if skipped < item.num_queries:
                stop = min(item.num_queries, skipped + TILE_QUERIES)
                keys[program] += item.first_query - item.chunk_start + stop
    assert sorted(taken) == list(range(num_works))
    return keys


@pytest.mark.parametrize(
    "lens",
    [(2048,), (512,) * 4, (1024,) * 8, (8192,), (480,) * 16],
    ids=lambda x: f"{len(x)}x{x[0]}",
)
def test_the_program_with_most_keys_has_little_more_than_the_mean(lens):
    keys = keys_of_programs(lens, attention.LOOPING_PROGRAMS[8])
    assert keys.max() <= 1.2 * keys.mean()


@pytest.mark.parametrize("num_programs", [1, 3, 5])
def test_few_programs_take_all_items(num_programs, device, monkeypatch):
    monkeypatch.setattr(attention, "LOOPING_PROGRAMS", dict.fromkeys((4, 8), num_programs))
    monkeypatch.setattr(attention, "MERGE_PROGRAMS", num_programs)
    sequences = [(13, 1, 0), (21, 1, 1), (5, 1), (0, 40), (13, 3, 0), (7, 2)]
    Step(
        sequences=sequences, num_decode=3, prefixes=(2, 3), dtype=torch.float32, device=device
    ).check()
