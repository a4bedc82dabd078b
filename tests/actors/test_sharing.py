"""What the user is told about a plan that there was not."""

import numpy as np
import pytest

from raybatch.actors.coordinator.counters import Sharing
from raybatch.actors.coordinator.mailbox import Mailbox
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Submission
from tests.actors.queues import groups_of, keys_of, plain_prompts

NUM_TOKENS = 40 * 12


@pytest.fixture
def sharing():
    """Forty rows with two prefixes of 8 tokens, and 4 tokens of their own each."""
    known = Sharing()
    known.received(keys_of(plain_prompts([1, 2] * 20)))
    return known


def test_the_user_is_told_what_a_plan_would_save(sharing):
    # 40 last blocks and two prefixes are computed, and the last token of each row
    text = sharing.message(NUM_TOKENS // 10, NUM_TOKENS)
    assert "saved 10% of 480 prompt tokens" in text
    assert f"save up to {1 - (40 * 4 + 2 * 8 + 40) / NUM_TOKENS:.0%} " in text


def test_nothing_is_told_where_a_plan_would_save_no_more(sharing):
    assert sharing.message(NUM_TOKENS * 6 // 10, NUM_TOKENS) == ""


def test_nothing_is_told_twice(sharing):
    assert sharing.message(0, NUM_TOKENS)
    assert sharing.message(0, NUM_TOKENS) == ""
    sharing.received(keys_of(plain_prompts([1, 2] * 20)))
    assert sharing.message(0, 2 * NUM_TOKENS - 1) == ""


def test_a_material_change_is_told(sharing):
    assert sharing.message(0, NUM_TOKENS)
    sharing.received(keys_of(plain_prompts([None] * 40)))
    assert sharing.message(0, 2 * NUM_TOKENS)


def test_nothing_is_told_without_rows():
    assert Sharing().message(0, 0) == ""


@pytest.mark.parametrize("is_planned", [False, True], ids=["plain", "planned"])
def test_only_clients_without_a_plan_are_told(is_planned):
    mailbox = Mailbox(RowQueue(3), on_drop=lambda *_: None)
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
    mailbox.add(submission)
    mailbox.clients["c"].prompt_tokens = NUM_TOKENS
    assert is_planned == (mailbox.sharing_messages() == [])
