"""When rows may wait: in full steps, and where not all that can start would fit."""

import pytest

from raybatch.policy.admission import WEIGHT_READ_TOKENS, full_step_tokens, num_startable


@pytest.mark.parametrize(
    ("kv_bytes", "used_fraction", "times"), [(0, 1, 1), (32, 1, 3), (0, 0.25, 4), (32, 0.25, 12)]
)
def test_a_step_is_full_from_more_tokens_on_where_it_reads_more(kv_bytes, used_fraction, times):
    tokens = full_step_tokens(weight_bytes=16, kv_bytes=kv_bytes, used_fraction=used_fraction)
    assert tokens == times * WEIGHT_READ_TOKENS


ROOM = {"rows": 9, "slots": 8, "blocks": 21, "tokens": 50, "row_blocks": 3, "row_tokens": 10}


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ({}, 5),
        ({"rows": 4}, 4),
        ({"slots": 3}, 3),
        ({"blocks": 8}, 2),
        ({"tokens": 49}, 4),
        # a long prompt takes several steps, and one of blocks that are there takes none
        ({"tokens": 1}, 1),
        ({"row_blocks": 0, "row_tokens": 0}, 8),
    ],
)
def test_as_many_rows_can_start_as_the_scarcest_thing_allows(changed, count):
    assert num_startable(**(ROOM | changed)) == count
