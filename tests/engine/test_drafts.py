"""Guesses from prompts and answers, without an engine."""

import numpy as np
import pytest

from raybatch.engine.drafts import AnswerIndex, Guesser

PROMPT = np.array([10, 11, 12, 13, 14, 15, 16, 90, 91, 92], np.int32)


def guesser(prompt=PROMPT, answers=None, *, group=0, lag=4):
    answers = AnswerIndex() if answers is None else answers
    return Guesser(np.asarray(prompt, np.int32), answers, group=group, lag=lag)


def complete(answers, tokens, *, prompt=PROMPT, group=0):
    """Add a complete answer to the index."""
    found = guesser(prompt, answers, group=group)
    found.feed(tokens)
    found.finish()


def test_a_passage_of_the_prompt_is_continued():
    found = guesser()
    found.feed([11, 12, 13])
    assert found.draft(3) == [14, 15, 16]
    assert found.draft(9) == [14, 15, 16, 90, 91, 92]


def test_two_tokens_are_too_few_to_match():
    found = guesser()
    found.feed([5, 12, 13])
    assert found.draft(3) == []


def test_the_last_place_in_the_prompt_counts():
    found = guesser([1, 2, 3, 40, 1, 2, 3, 50, 8, 9])
    found.feed([1, 2, 3])
    assert found.draft(2) == [50, 8]


def test_a_wrong_guess_ends_the_passage():
    found = guesser()
    found.feed([11, 12, 13, 14, 77])
    assert found.draft(3) == []


def test_an_answer_repeats_itself():
    found = guesser(lag=2)
    found.feed([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert found.draft(3) == [4, 5, 6]


def test_a_passage_with_too_few_tokens_is_not_found_yet():
    # rows of a template run side by side: a sequence learns nothing from one that just ended
    answers = AnswerIndex()
    first, second = guesser(answers=answers, lag=3), guesser(answers=answers, lag=3)
    first.feed([1, 2, 3, 4, 5])
    second.feed([1, 2])
    assert second.draft(3) == [3, 4, 5]
    second.feed([3])
    first.feed([6])
    assert second.draft(3) == [4, 5, 6]
    third = guesser(answers=answers, lag=3)
    third.feed([1, 2, 3])
    assert third.draft(3) == [4, 5, 6]


def test_the_first_tokens_of_an_answer_follow_from_the_end_of_the_prompt():
    answers = AnswerIndex()
    complete(answers, [1, 2, 3, 4, 5])
    found = guesser([55, 90, 91, 92], answers)
    found.feed([1])
    assert found.draft(9) == [2, 3, 4, 5]


def test_answers_of_the_group_go_before_later_ones_of_others():
    answers = AnswerIndex()
    complete(answers, [1, 2, 3, 4], group=7)
    complete(answers, [1, 2, 3, 5], group=8)
    in_group, other = guesser(answers=answers, group=7), guesser(answers=answers)
    for found in (in_group, other):
        found.feed([1, 2, 3])
    assert (in_group.draft(1), other.draft(1)) == ([4], [5])


def test_the_prompt_goes_before_answers():
    answers = AnswerIndex()
    complete(answers, [11, 12, 13, 99], prompt=[1, 2, 3])
    found = guesser(answers=answers)
    found.feed([11, 12, 13])
    assert found.draft(1) == [14]


def test_old_answers_are_forgotten_and_memory_is_bounded():
    answers = AnswerIndex(max_contexts=100)
    for i in range(50):
        complete(answers, [1000 + 20 * i + k for k in range(20)], group=3)
        assert len(answers) <= 200 + 2 * 20
    for i, expected in ((0, []), (49, [1983])):
        found = guesser([5, 6, 7], answers)
        found.feed([1000 + 20 * i + k for k in range(3)])
        assert found.draft(1) == expected


def test_tokens_that_were_skipped_are_found_like_others():
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, 1 << 21, 60).tolist()
    fed, skipped = AnswerIndex(), AnswerIndex()
    complete(fed, tokens)
    found = guesser(answers=skipped)
    found.skip(tokens[:25])
    found.skip([])
    found.feed(tokens[25:30])
    found.skip(tokens[30:])
    found.finish()
    assert found.num_fed == 60
    for start in range(50):
        drafts = []
        for answers in (fed, skipped):
            other = guesser([5], answers)
            other.feed(tokens[start : start + 3])
            drafts.append(other.draft(4))
        assert drafts[0] == drafts[1] == tokens[start + 3 : start + 7]


@pytest.mark.parametrize("prompt", [[7], [7, 8], [7, 8, 9]])
def test_a_short_prompt_has_nothing_to_find(prompt):
    found = guesser(prompt)
    found.feed([7, 8, 9, 1])
    assert found.draft(3) == []


def test_acceptance_follows_guesses_with_or_without_drafts():
    copies, strays = guesser(), guesser()
    copies.feed([10, 11, 12, 13, 14, 15, 16])
    # each context matches the passage, the next token does not
    for i in range(4):
        strays.feed([10, 11, 12, 77 + i])
    assert copies.acceptance == pytest.approx(1 - 0.5 * (7 / 8) ** 4)
    assert strays.acceptance == pytest.approx(0.5 * (7 / 8) ** 4)


def test_a_new_sequence_begins_with_the_acceptance_of_all():
    answers = AnswerIndex()
    assert guesser(answers=answers).acceptance == 0.5
    for _ in range(30):
        complete(answers, [10, 11, 12, 77])
    assert guesser(answers=answers).acceptance != 0.5
