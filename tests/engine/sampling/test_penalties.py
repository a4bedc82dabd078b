"""What a sequence remembers of its tokens, and what that does to its logits."""

import numpy as np
import torch

from raybatch.engine.sampling.sampler import TokenHistory, apply_penalties
from raybatch.records.types import Sampling

VOCAB = 400


def history_of(prompt, generated, **options):
    return TokenHistory(Sampling(**options), VOCAB, prompt, generated)


def test_each_token_is_remembered_once_with_its_count():
    history = history_of([6, 5, 6], [7, 7, 8, 5], repetition_penalty=1.5)
    assert [5, 6, 7, 8] == history.ids.tolist()
    assert [1, 0, 2, 1] == history.counts.tolist()


def test_a_prompt_counts_for_repetition_alone():
    history = history_of([6, 5, 6], [7], presence_penalty=1.0)
    assert ([7], [1]) == (history.ids.tolist(), history.counts.tolist())


def test_what_has_no_logit_is_not_remembered():
    history = history_of([-1, 3, VOCAB, VOCAB - 1], [], repetition_penalty=1.5)
    assert [3, VOCAB - 1] == history.ids.tolist()


def test_more_tokens_than_were_expected_are_remembered():
    history = history_of([], range(VOCAB), frequency_penalty=1.0)
    for token_id in range(0, VOCAB, 2):
        history.record(token_id)
    assert list(range(VOCAB)) == history.ids.tolist()
    assert [2, 1] * (VOCAB // 2) == history.counts.tolist()


def test_no_logit_but_those_of_the_tokens_seen_changes():
    history = history_of([9], [5, 6, 6], repetition_penalty=2.0, frequency_penalty=0.5)
    logits = torch.full((2, VOCAB), 4.0)
    logits[1, 5] = -4.0
    apply_penalties(logits, [1], [history])
    expected = torch.full((2, VOCAB), 4.0)
    expected[1, 9], expected[1, 5], expected[1, 6] = 2.0, -8.5, 1.0
    assert torch.equal(expected, logits)
    assert np.array_equal([9, 5, 6], history.ids)
