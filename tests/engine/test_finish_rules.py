"""Which stop tokens end which sequence; whole engines are tested in `test_engine.py`."""

import numpy as np

from raybatch.engine.finish_rules import FinishRules
from raybatch.records.types import Sampling
from raybatch.text.detokenizer import StopChecker

NO_IDS = np.array([], np.int32)


def ended(rules: FinishRules, slots: list[int], token_id: int) -> list[int]:
    """Return the slots that end where all of them have made one token."""
    ones = np.ones(len(slots), np.int64)
    return [
        slot for slot, *_ in rules.find(np.array(slots, np.int64), token_id * ones, ones, 9 * ones)
    ]


def test_one_of_many_stop_tokens_ends_its_own_sequence_alone():
    rules = FinishRules(3, (), StopChecker(None))
    rules.add(0, Sampling(stop_token_ids=tuple(range(100, 100_000))), NO_IDS, NO_IDS)
    rules.add(2, Sampling(stop_token_ids=(5,)), NO_IDS, NO_IDS)
    assert ended(rules, [0, 2], 5) == [2]
    assert ended(rules, [0, 2], 777) == [0]
    assert ended(rules, [2], 777) == []
    # a draft round in which other sequences made nothing
    assert ended(rules, [], 5) == []


def test_many_stop_tokens_leave_with_their_sequence():
    rules = FinishRules(1, (), StopChecker(None))
    rules.add(0, Sampling(stop_token_ids=tuple(range(100))), NO_IDS, NO_IDS)
    rules.remove(0)
    rules.add(0, Sampling(), NO_IDS, NO_IDS)
    assert ended(rules, [0], 7) == []
