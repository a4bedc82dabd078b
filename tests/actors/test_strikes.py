"""Deaths that earlier runs have counted go on counting, and who waits hears of each at once."""

import asyncio

import numpy as np
import pytest

from raybatch.actors.coordinator.mailbox import Mailbox
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import decode_completions
from raybatch.actors.wire.records import Room, RowCrashes, Span, Submission
from tests.actors.queues import BLOCK, ROOMY, groups_of, held_rows, keys_of, plain_prompts


def strikes_of(*counts):
    return np.array(counts, np.int16)


def struck_queue(*counts, **options):
    queue = RowQueue(3)
    queue.add(0, [10] * len(counts), [10] * len(counts), strikes=strikes_of(*counts), **options)
    return queue


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": groups_of([1, 1, 1, 1, None], 8)},
        {"keys": keys_of(plain_prompts([1, 1, 1, 1, None]))},
    ],
    ids=["plain", "planned", "grouped"],
)
def test_rows_that_were_struck_twice_run_alone_and_the_others_together(options):
    queue = struck_queue(0, 2, 1, 0, 3, **options)
    first, second, third = (held_rows(queue.dispatch({r: ROOMY})[r]) for r in (1, 2, 3))
    assert ([(0, 1)], [(0, 4)]) == (first, second)
    assert [(0, 0), (0, 2), (0, 3)] == sorted(third)


def test_a_row_that_was_struck_twice_is_given_up_at_the_next_death():
    queue = struck_queue(0, 2)
    assert {1: [Span(0, 1, 2)]} == queue.dispatch({1: ROOMY})
    loss = queue.lose(1)
    assert [(0, RowCrashes(1, 3, True))] == loss.given_up()
    assert {0: [RowCrashes(1, 3, True)]} == loss.crashes


def test_a_row_that_finishes_has_no_more_strikes_to_tell_of():
    queue = struck_queue(0, 0)
    queue.dispatch({1: ROOMY})
    queue.finish(1, 0, [0])
    assert {0: [RowCrashes(1, 1, False)]} == queue.lose(1).crashes


def submission(num_rows, crashes=None):
    return Submission(
        token="t",
        client="c",
        refs=[],
        prompt_tokens=np.full(num_rows, BLOCK, np.int32),
        max_new_tokens=np.full(num_rows, 2, np.int64),
        crashes=crashes,
    )


@pytest.fixture
def mailbox():
    return Mailbox(RowQueue(3), on_drop=lambda *args: None)


def lose(mailbox, replica_id):
    mailbox.queue.dispatch({replica_id: Room(tokens=99, rows=99)})
    mailbox.note_loss(mailbox.queue.lose(replica_id))


def test_a_death_is_told_at_once_and_only_once(mailbox):
    async def run():
        batch = mailbox.add(submission(2))
        waiting = asyncio.ensure_future(mailbox.answer(batch, 60.0))
        await asyncio.sleep(0)
        lose(mailbox, 1)
        return await waiting, await mailbox.answer(batch, 0.01)

    told, again = asyncio.run(run())
    crashes = (RowCrashes(0, 1, False), RowCrashes(1, 1, False))
    assert ("pending", crashes) == (told.status, told.crashes)
    assert ("pending", ()) == (again.status, again.crashes)


def test_deaths_between_two_answers_are_told_as_one_count(mailbox):
    async def run():
        batch = mailbox.add(submission(1))
        lose(mailbox, 1)
        lose(mailbox, 2)
        return await mailbox.answer(batch, 60.0)

    assert (RowCrashes(0, 2, False),) == asyncio.run(run()).crashes


def test_the_last_answer_tells_which_row_was_given_up(mailbox):
    async def run():
        batch = mailbox.add(submission(1, strikes_of(2)))
        lose(mailbox, 1)
        return await mailbox.answer(batch, 60.0)

    answer = asyncio.run(run())
    assert ("done", (RowCrashes(0, 3, True),)) == (answer.status, answer.crashes)
    (results,) = answer.results
    (completion,) = decode_completions(results)
    assert "ReplicaCrash: the engine died 3 times with this row" == completion.error
