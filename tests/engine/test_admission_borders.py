"""Where exactly admission says no: at a peak above the limit, and once the pace is used up."""

import numpy as np
import pytest

from raybatch.engine.scheduling.admission import Admission
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from tests.engine.fakes import make_request

# 6 tokens of a prompt are 2 blocks of 4 with the half that is empty, 8 tokens to come are 2 more
PROMPT, OUTPUT, PEAK = 6, 8, 4
# blocks times steps: 2 blocks that grow to 4 over 8 steps
TAKEN = 24


def make_admission(limit, full_step_tokens=0):
    table = SequenceTable(max_slots=8, num_blocks=64, block_size=4, max_model_len=128)
    return Admission(
        table, BlockManager(64, 4), fraction=limit / 64, full_step_tokens=full_step_tokens
    )


def make_record(number):
    record = Sequence(
        request=make_request(number, np.full(PROMPT, number), max_tokens=OUTPUT),
        sample_idx=0,
        arrival=number,
        max_len=PROMPT + OUTPUT,
    )
    record.expected_len = PROMPT + OUTPUT
    return record


def accepts(admission, number, num_startable, step_tokens=0):
    return admission.accepts(
        make_record(number),
        num_shared=0,
        num_new=0,
        num_startable=num_startable,
        step_tokens=step_tokens,
    )


@pytest.mark.parametrize(("limit", "is_accepted"), [(PEAK, True), (PEAK - 1, False)])
def test_a_peak_at_the_limit_is_accepted_and_one_above_it_is_not(limit, is_accepted):
    admission = make_admission(limit)
    admission.begin_step()
    assert is_accepted == accepts(admission, 0, num_startable=1)


def test_a_sequence_waits_from_the_moment_at_which_the_pace_of_the_step_is_used_up():
    admission = make_admission(TAKEN)
    admission.begin_step()
    assert accepts(admission, 0, num_startable=100)
    admission.add(make_record(0), num_shared=0, num_new=0)
    assert not accepts(admission, 1, num_startable=100)
    admission.begin_step()
    assert accepts(admission, 1, num_startable=100)


def test_who_starts_alone_needs_no_pace():
    admission = make_admission(TAKEN)
    admission.begin_step()
    admission.add(make_record(0), num_shared=0, num_new=0)
    assert accepts(admission, 1, num_startable=1)


@pytest.mark.parametrize(("step_tokens", "is_accepted"), [(15, True), (16, False)])
def test_nobody_waits_in_a_step_that_is_not_full(step_tokens, is_accepted):
    admission = make_admission(PEAK - 1, full_step_tokens=16)
    admission.begin_step()
    assert is_accepted == accepts(admission, 0, num_startable=1, step_tokens=step_tokens)
