"""What is learned from steps about computing KV again, and what follows for the choice."""

import numpy as np
import pytest

from raybatch.engine.memory.swap import LearnedRecovery
from raybatch.engine.sequences.schedule import Schedule
from raybatch.engine.sequences.table import SequenceTable
from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.roofline import link

LIMITS = EngineLimits(kv_tokens=4096, max_num_seqs=8, block_size=4, max_batched_tokens=64)
TABLE = SequenceTable(max_slots=8, num_blocks=64, block_size=4, max_model_len=256)
NO_SLOTS = np.empty(0, np.int64)


def recovery(*, token_s, bytes_per_s=1e6, num_steps=20):
    found = LearnedRecovery(link(bytes_per_s), LIMITS)
    note_prefills(found, token_s=token_s, num_steps=num_steps)
    return found


def note_prefills(found, *, token_s, num_steps):
    for i in range(num_steps):
        length = 1 + 3 * (i % 20)
        schedule = Schedule(
            decode_slots=NO_SLOTS,
            chunk_slots=np.array([0]),
            chunk_starts=np.array([0]),
            chunk_lens=np.array([length]),
        )
        found.note(schedule, TABLE, token_s * length)


def is_copy_quicker(found, *, num_bytes, num_tokens=100, num_shared_tokens=0):
    return found.is_copy_quicker(
        num_bytes=num_bytes, num_tokens=num_tokens, num_shared_tokens=num_shared_tokens
    )


@pytest.mark.parametrize(("num_bytes", "is_quicker"), [(90_000, True), (110_000, False)])
def test_the_quicker_way_is_taken(num_bytes, is_quicker):
    # 100 tokens of a millisecond each against bytes of a microsecond each
    assert is_quicker == is_copy_quicker(recovery(token_s=1e-3), num_bytes=num_bytes)


def test_tokens_that_are_found_again_need_not_be_computed():
    found = recovery(token_s=1e-3)
    assert is_copy_quicker(found, num_bytes=49_000, num_shared_tokens=50)
    assert not is_copy_quicker(found, num_bytes=51_000, num_shared_tokens=50)


def test_costs_follow_the_steps():
    found = recovery(token_s=1e-3)
    assert is_copy_quicker(found, num_bytes=50_000)
    note_prefills(found, token_s=1e-4, num_steps=200)
    assert not is_copy_quicker(found, num_bytes=50_000)


def test_long_decoding_does_not_make_prompts_look_cheap():
    found = recovery(token_s=1e-3)
    schedule = Schedule(
        decode_slots=np.arange(8), chunk_slots=NO_SLOTS, chunk_starts=NO_SLOTS, chunk_lens=NO_SLOTS
    )
    for _ in range(1000):
        found.note(schedule, TABLE, 8e-3)
    assert is_copy_quicker(found, num_bytes=90_000)
    assert not is_copy_quicker(found, num_bytes=110_000)


def test_nothing_is_fitted_before_somebody_asks():
    found = recovery(token_s=1e-3)
    assert found._costs is None
    assert is_copy_quicker(LearnedRecovery(link(1.0), LIMITS), num_bytes=10**9)
