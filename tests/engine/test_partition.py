"""Schedules taken apart: all of it, in order, and no part waits for another one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import logits_order, slots_with_logits, split_schedule
from raybatch.engine.engine import Engine
from tests.engine.fakes import FakeRunner, FakeSampler, FakeSpec, FakeStopChecker, make_request

BLOCK = 4


def written(schedule, table):
    """The blocks that each chunk of a schedule fills."""
    stops = schedule.chunk_starts + schedule.chunk_lens
    return [
        set(table.block_table[slot, start // BLOCK : -(-stop // BLOCK)].tolist())
        for slot, start, stop in zip(
            schedule.chunk_slots.tolist(),
            schedule.chunk_starts.tolist(),
            stops.tolist(),
            strict=True,
        )
    ]


def read(schedule, table):
    """The blocks that hold what each chunk of a schedule attends to besides itself."""
    return [
        set(table.block_table[slot, : -(-start // BLOCK)].tolist())
        for slot, start in zip(
            schedule.chunk_slots.tolist(), schedule.chunk_starts.tolist(), strict=True
        )
    ]


def check(schedule, table, max_tokens):
    parts = split_schedule(schedule, table, max_tokens)
    assert np.concatenate([p.decode_slots for p in parts]).tolist() == (
        schedule.decode_slots.tolist()
    )
    chunks = [slot for p in parts for slot in p.chunk_slots.tolist()]
    assert sorted(chunks) == sorted(schedule.chunk_slots.tolist())
    assert sum(p.num_tokens for p in parts) == schedule.num_tokens
    for i, part in enumerate(parts):
        assert part.num_tokens > 0
        # larger only where nothing could be taken off
        assert part.num_tokens <= max_tokens or not len(part.decode_slots)
        others = [blocks for j, p in enumerate(parts) if j != i for blocks in written(p, table)]
        for blocks in read(part, table):
            assert not any(blocks & filled for filled in others)
    order = logits_order(schedule, parts, table)
    found = np.concatenate([slots_with_logits(p, table) for p in parts])
    assert found[order].tolist() == slots_with_logits(schedule, table).tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), max_tokens=st.integers(1, 30), budget=st.integers(16, 60))
def test_parts_of_every_step_hold_all_of_it_and_wait_for_nobody(seed, max_tokens, budget):
    rng = np.random.default_rng(seed)
    spec = FakeSpec(1000, (), 512)
    config = EngineConfig(block_size_tokens=BLOCK, max_batched_tokens=budget, max_num_seqs=16)
    runner = FakeRunner(num_blocks=90, block_size=BLOCK, spec=spec)
    engine = Engine(runner, FakeSampler(), FakeStopChecker(), config)
    stem = rng.integers(0, 1000, 20)
    for i in range(12):
        prompt = np.r_[stem[: rng.integers(20)], rng.integers(0, 1000, rng.integers(1, 12))]
        engine.add([make_request(i, prompt, max_tokens=int(rng.integers(1, 9)))])
    plan = engine._scheduler.schedule

    def checked(drafts):
        schedule = plan(drafts)
        if schedule.num_tokens:
            check(schedule, engine.table, max_tokens)
        return schedule

    engine._scheduler.schedule = checked
    while engine.num_unfinished():
        engine.step()
