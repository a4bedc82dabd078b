"""The message about tokens that a plan would save in a run without one."""

import numpy as np
import pytest

from raybatch.actors.coordinator.counters import Sharing
from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Submission
from tests.actors.queues import groups_of, keys_of, plain_prompts

NUM_TOKENS = 40 * 12


@pytest.fixture
def sharing():
    """Forty rows with two prefixes of 8 tokens, followed by 4 different tokens."""
    known = Sharing()
    known.received(keys_of(plain_prompts([1, 2] * 20)))
    return known


def test_the_message_says_how_much_a_plan_would_save(sharing):
    # 40 last blocks and two prefixes are computed, and the last token of each row
    text = sharing.message(NUM_TOKENS // 10, NUM_TOKENS)
    assert "saved 10% of 480 prompt tokens" in text
    assert f"save up to {1 - (40 * 4 + 2 * 8 + 40) / NUM_TOKENS:.0%} " in text


def test_no_message_if_a_plan_would_save_no_more(sharing):
    assert sharing.message(NUM_TOKENS * 6 // 10, NUM_TOKENS) == ""


def test_a_message_is_not_repeated(sharing):
    assert sharing.message(0, NUM_TOKENS)
    assert sharing.message(0, NUM_TOKENS) == ""
    sharing.received(keys_of(plain_prompts([1, 2] * 20)))
    assert sharing.message(0, 2 * NUM_TOKENS - 1) == ""


def test_a_material_change_is_reported(sharing):
    assert sharing.message(0, NUM_TOKENS)
    sharing.received(keys_of(plain_prompts([None] * 40)))
    assert sharing.message(0, 2 * NUM_TOKENS)


def test_no_message_without_rows():
    assert Sharing().message(0, 0) == ""


@pytest.mark.parametrize("is_planned", [False, True], ids=["plain", "planned"])
def test_only_clients_without_a_plan_get_a_message(is_planned):
    registry = BatchRegistry(RowQueue(3), on_drop=lambda *_: None)
    keys = keys_of(plain_prompts([1, 2] * 20))
    submission = Submission(
        token="t",
        client="c",
        refs=[],
        prompt_tokens=keys.num_tokens.astype(np.int32),
        max_new_tokens=np.ones(40, np.int64),
        groups=groups_of([0, 1] * 20, 8) if is_planned else None,
        block_keys=None if is_planned else keys,
    )
    registry.add(submission)
    registry.clients["c"].prompt_tokens = NUM_TOKENS
    assert is_planned == (registry.sharing_messages() == [])
