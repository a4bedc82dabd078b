"""What the coordinator learns of a request table."""

import numpy as np
import pytest

from raybatch.actors.pool import make_submission, row_keys
from raybatch.actors.wire.columns import request_table
from raybatch.config import EngineConfig
from raybatch.records.types import Sampling
from tests.actors.queues import BLOCK, keys_of, plain_prompts

SAMPLINGS = (Sampling(max_tokens=9),)
PROMPTS = plain_prompts([1, 1, None])


def submitted(client="c", *, caching=True, **columns):
    table = request_table(["a", "b", "c"], PROMPTS, **columns)
    engine = EngineConfig(block_size_tokens=BLOCK, enable_prefix_caching=caching)
    return make_submission(table, SAMPLINGS, client, engine)


def test_rows_without_a_plan_carry_block_keys():
    submission = submitted()
    assert keys_of(PROMPTS).keys.tolist() == submission.block_keys.keys.tolist()
    assert submission.groups is None


def test_planned_rows_carry_their_groups():
    submission = submitted(group_ids=[4, None, 4], prefix_lens=[8, 0, 8])
    first, alone, last = submission.groups.group_ids.tolist()
    assert (first, -1) == (last, alone)
    assert first >= 0
    assert [8, 0, 8] == submission.groups.prefix_lens.tolist()
    assert submission.block_keys is None


def test_planned_rows_that_are_all_alone_are_left_as_they_are():
    assert submitted(group_ids=[None] * 3).block_keys is None


def test_groups_of_two_clients_have_different_ids():
    ids = [submitted(c, group_ids=[4, 5, None]).groups.group_ids for c in ("c", "d")]
    assert 4 == len({*np.concatenate(ids).tolist()} - {-1})


def test_without_prefix_caching_rows_are_not_grouped_but_a_plan_is_kept():
    assert submitted(caching=False).block_keys is None
    assert submitted(caching=False, group_ids=[1, 1, None]).groups is not None


def test_expected_outputs_travel_beside_the_upper_bound():
    submission = submitted(expected_lens=[3, None, 20])
    assert [3, 9, 9] == submission.expected_new_tokens.tolist()
    assert [9, 9, 9] == submission.max_new_tokens.tolist()


def prefix_keys(payloads):
    """Block keys of two rows whose prompts are equal, and their digests."""
    tokens = np.arange(128, dtype=np.int32)
    table = request_table(["a", "b"], [tokens, tokens], payloads=payloads)
    keys = row_keys(table, 64).blocks
    return np.split(keys.keys, 2), keys.digest


@pytest.mark.parametrize(
    ("payloads", "is_shared", "is_identical"),
    [
        ([None, None], True, True),
        (['{"adapter":"x"}', '{"adapter":"x"}'], True, True),
        (['{"adapter":"x"}', '{"adapter":"y"}'], False, False),
        ([None, '{"adapter":"x"}'], False, False),
        ([None, '{"pooling":{"dimensions":2}}'], True, False),
    ],
)
def test_equal_prompts_share_with_the_same_adapter_and_are_alike_with_the_same_payload(
    payloads, is_shared, is_identical
):
    (one, other), digest = prefix_keys(payloads)
    assert is_shared == bool((one == other).all())
    assert is_shared == bool((one == other).any())
    assert is_identical == (digest[0] == digest[1])


def test_rows_of_one_adapter_are_known_by_it_whatever_else_they_have():
    payloads = [
        None,
        '{"adapter":"x"}',
        '{"adapter":"x","images":["i"]}',
        '{"chat":{"adapter":"x"}}',
    ]
    table = request_table(list("abcd"), plain_prompts([1, 1, 1, 1]), payloads=payloads)
    none, x, with_image, below = row_keys(table, BLOCK).adapters.tolist()
    assert (none, below, x) == (0, 0, with_image)
    assert x > 0


def test_rows_with_several_samples_say_how_many():
    samplings = (Sampling(max_tokens=9), Sampling(max_tokens=9, n=4))
    table = request_table(["a", "b", "c"], PROMPTS, sampling=[0, 1, 0])
    assert [1, 4, 1] == make_submission(table, samplings, "c", EngineConfig()).num_samples.tolist()
    assert submitted().num_samples is None
