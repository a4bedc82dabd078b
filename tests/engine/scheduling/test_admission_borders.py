"""Where exactly admission says no: at a peak above the pool, in a step that is full."""

import numpy as np
import pytest

from raybatch.engine.scheduling.admission import Admission, Need
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.shared_prompts import SharedPrompts
from raybatch.engine.sequences.table import Sequence, SequenceTable
from tests.engine.fakes import make_request

# 6 tokens of a prompt are 2 blocks of 4 with the half that is empty, 8 tokens to come are 2 more
PROMPT, OUTPUT, PEAK = 6, 8, 4


def make_record(number):
    record = Sequence(
        request=make_request(number, np.full(PROMPT, number), max_tokens=OUTPUT),
        sample_idx=0,
        arrival=number,
        max_len=PROMPT + OUTPUT,
    )
    record.expected_len = PROMPT + OUTPUT
    return record


def accepts(num_blocks, *, num_before=0, step_tokens=0, full_step_tokens=0):
    table = SequenceTable(max_slots=8, num_blocks=64, block_size=4, max_model_len=128)
    blocks = BlockManager(num_blocks, 4)
    shared = SharedPrompts(blocks, has_cache=True)
    admission = Admission(table, blocks, shared, full_step_tokens=full_step_tokens)
    admission.begin_step()
    need = Need(hits=[], num_total=2, num_available=2, num_shared=0, num_new_shared=0, room=2)
    for number in range(num_before + 1):
        record = make_record(number)
        is_accepted = admission.accepts(record, need, step_tokens=step_tokens)
        admission.add(record, need)
    return is_accepted


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_a_peak_of_the_whole_pool_is_accepted_and_one_above_it_is_not(num_before):
    peak = (num_before + 1) * PEAK
    assert accepts(peak, num_before=num_before)
    assert not accepts(peak - 1, num_before=num_before)


@pytest.mark.parametrize(("step_tokens", "is_accepted"), [(15, True), (16, False)])
def test_nobody_waits_in_a_step_that_is_not_full(step_tokens, is_accepted):
    assert is_accepted == accepts(PEAK - 1, step_tokens=step_tokens, full_step_tokens=16)
