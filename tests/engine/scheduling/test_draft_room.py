"""Drafts take what is left, and nothing else."""

import numpy as np
import pytest

from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from tests.engine.fakes import make_request


def running(*prompt_lens, num_blocks=32, budget=64, max_tokens=20):
    """A scheduler with decoding sequences in blocks of four."""
    table = SequenceTable(max_slots=8, num_blocks=num_blocks, block_size=4, max_model_len=64)
    blocks = BlockManager(num_blocks, 4)
    scheduler = Scheduler(blocks, table, max_batched_tokens=64, enable_prefix_caching=False)
    for i, length in enumerate(prompt_lens):
        request = make_request(i, range(length))
        record = Sequence(request=request, sample_idx=0, arrival=i, max_len=length + max_tokens)
        scheduler.add(record)
    slots = scheduler.advance(scheduler.schedule())
    table.append_tokens(slots, np.full(len(slots), 7))
    scheduler._budget = budget
    return scheduler


def placed(scheduler, drafts):
    schedule = scheduler.schedule(drafts)
    scheduler.check()
    return schedule.draft_lens.tolist(), schedule.draft_tokens.tolist()


def test_drafts_go_in_the_order_of_the_slots_as_far_as_the_budget_goes():
    scheduler = running(4, 4, 4, budget=3 + 5)
    drafts = {2: [1, 2, 3], 0: [4, 5, 6], 1: [7]}
    assert placed(scheduler, drafts) == ([3, 1, 1], [4, 5, 6, 7, 1])
    assert scheduler.counters.num_drafted_tokens == 5


def test_a_full_budget_has_no_room_for_drafts():
    assert placed(running(4, 4, budget=2), {0: [1, 2]}) == ([], [])


def test_the_last_token_of_a_sequence_is_not_drafted_beyond():
    # 3 of 4 tokens are still to come: one is drawn in any case
    assert placed(running(4, max_tokens=4), {0: [1, 2, 3, 4]}) == ([2], [1, 2])
    assert placed(running(4, max_tokens=2), {0: [1, 2, 3, 4]}) == ([], [])


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(6, 7), (5, 3)])
def test_drafts_take_no_block_that_running_sequences_will_need(num_blocks, num_drafts):
    # the first sequence has room for three drafts, the second one needs a block after this step
    scheduler = running(4, 7, num_blocks=num_blocks)
    assert placed(scheduler, {0: [1, 2, 3, 4, 5, 6, 7]})[0] == [num_drafts, 0]


def test_a_preempted_sequence_has_no_drafts():
    scheduler = running(7, 7, num_blocks=4)
    slots = scheduler.advance(scheduler.schedule())
    scheduler.table.append_tokens(slots, np.full(len(slots), 7))
    schedule = scheduler.schedule({0: [1], 1: [2]})
    assert schedule.preempted == (1,)
    assert schedule.draft_tokens.tolist() == [1]
