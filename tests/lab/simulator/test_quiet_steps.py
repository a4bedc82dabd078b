"""Many quiet steps at once leave what the same steps leave one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import EMPTY, Sequence, SequenceTable
from raybatch.records.types import Request, Sampling
from raybatch_lab.simulator.engine import CountedTokens
from raybatch_lab.simulator.quiet_steps import count_quiet_steps, run_quiet_steps
from tests.tiers import examples

COLUMNS = ("num_tokens", "num_computed", "num_blocks", "num_reserved", "arrival", "phase")


def make_scheduler(rows, *, num_blocks, block_size, max_slots):
    table = SequenceTable(
        max_slots=max_slots,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=1000,
        generated=CountedTokens(),
    )
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size),
        table,
        max_batched_tokens=max_slots + 16,
        enable_prefix_caching=True,
    )
    for row, (prompt, output) in enumerate(rows):
        request = Request(
            request_id=row,
            row_id=str(row),
            prompt_token_ids=np.full(prompt, row, np.int32),
            sampling=Sampling(max_tokens=output),
        )
        scheduler.add(Sequence(request=request, sample_idx=0, arrival=row, max_len=prompt + output))
    return scheduler


def finish_ended(scheduler):
    table = scheduler.table
    running = np.flatnonzero(table.phase != EMPTY)
    ended = running[table.num_tokens[running] >= table.max_len[running]].tolist()
    return [(slot, scheduler.finish(slot).request.request_id) for slot in ended]


def step(scheduler):
    slots = scheduler.advance(scheduler.schedule())
    scheduler.table.count_tokens(slots, 1)
    return finish_ended(scheduler)


def state_of(scheduler):
    table = scheduler.table
    columns = {name: getattr(table, name).tolist() for name in COLUMNS}
    running = np.flatnonzero(table.phase != EMPTY).tolist()
    blocks = {slot: table.blocks(slot).tolist() for slot in running}
    free = sorted(scheduler.blocks._free), list(scheduler.blocks._cached)
    return columns, blocks, free, vars_of(scheduler.counters)


def vars_of(counters):
    return {name: getattr(counters, name) for name in counters.__slots__}


rows = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12)


@given(rows, st.integers(8, 60), st.sampled_from((1, 4, 16)), st.integers(1, 6))
@settings(max_examples=examples(50, full=3000), deadline=None)
def test_quiet_steps_leave_what_single_steps_leave(rows, num_blocks, block_size, max_slots):
    longest = max(map(sum, rows))
    num_blocks += -(-longest // block_size)
    shape = {"num_blocks": num_blocks, "block_size": block_size, "max_slots": max_slots}
    plain, quick = make_scheduler(rows, **shape), make_scheduler(rows, **shape)
    while plain.num_waiting or plain.table.num_running:
        table = quick.table
        running = np.flatnonzero(table.phase != EMPTY)
        left = int((table.max_len[running] - table.num_tokens[running]).min(initial=1000))
        num_steps = count_quiet_steps(quick, left) if len(running) else 0
        ended = [event for _ in range(max(1, num_steps)) for event in step(plain)]
        if num_steps:
            slots = run_quiet_steps(quick, num_steps)
            table.count_tokens(slots, num_steps)
            assert finish_ended(quick) == ended
        else:
            assert step(quick) == ended
        assert state_of(quick) == state_of(plain)
        quick.check()


def test_a_step_in_which_somebody_could_start_is_not_quiet():
    scheduler = make_scheduler([(4, 50)] * 3, num_blocks=100, block_size=4, max_slots=4)
    assert count_quiet_steps(scheduler, 10) == 0
    step(scheduler)
    assert count_quiet_steps(scheduler, 10) == 10


def test_quiet_steps_end_where_blocks_are_short():
    scheduler = make_scheduler([(4, 50)] * 2, num_blocks=6, block_size=4, max_slots=2)
    step(scheduler)
    # both have one block, and five tokens with the first that they generate
    assert count_quiet_steps(scheduler, 40) == 8
