"""Deaths that earlier runs have counted go on counting, and who waits hears of each at once."""

import asyncio

import numpy as np
import pytest

from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import decode_completions
from raybatch.actors.wire.records import Credit, RowCrashes, RowRange, Submission
from tests.actors.queues import AMPLE, BLOCK, groups_of, held_rows, keys_of, plain_prompts


def crash_counts_of(*counts):
    return np.array(counts, np.int16)


def struck_queue(*counts, **options):
    queue = RowQueue(3)
    queue.add(
        0, [10] * len(counts), [10] * len(counts), crash_counts=crash_counts_of(*counts), **options
    )
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
    first, second, third = (held_rows(queue.dispatch({r: AMPLE})[r]) for r in (1, 2, 3))
    assert ([(0, 1)], [(0, 4)]) == (first, second)
    assert [(0, 0), (0, 2), (0, 3)] == sorted(third)


def test_a_row_that_was_struck_twice_is_given_up_at_the_next_death():
    queue = struck_queue(0, 2)
    assert {1: [RowRange(0, 1, 2)]} == queue.dispatch({1: AMPLE})
    loss = queue.lose(1)
    assert [(0, RowCrashes(1, 3, True))] == loss.given_up()
    assert {0: [RowCrashes(1, 3, True)]} == loss.crashes


def test_a_row_that_finishes_has_no_more_crashes_to_tell_of():
    queue = struck_queue(0, 0)
    queue.dispatch({1: AMPLE})
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
def registry():
    return BatchRegistry(RowQueue(3), on_drop=lambda *args: None)


def lose(registry, replica_id):
    registry.queue.dispatch({replica_id: Credit(tokens=99, rows=99)})
    registry.note_loss(registry.queue.lose(replica_id))


def test_a_death_is_told_at_once_and_only_once(registry):
    async def run():
        batch = registry.add(submission(2))
        waiting = asyncio.ensure_future(registry.answer(batch, 60.0))
        await asyncio.sleep(0)
        lose(registry, 1)
        return await waiting, await registry.answer(batch, 0.01)

    reported, again = asyncio.run(run())
    crashes = (RowCrashes(0, 1, False), RowCrashes(1, 1, False))
    assert ("pending", crashes) == (reported.status, reported.crashes)
    assert ("pending", ()) == (again.status, again.crashes)


def test_deaths_between_two_answers_are_told_as_one_count(registry):
    async def run():
        batch = registry.add(submission(1))
        lose(registry, 1)
        lose(registry, 2)
        return await registry.answer(batch, 60.0)

    assert (RowCrashes(0, 2, False),) == asyncio.run(run()).crashes


def test_the_last_answer_tells_which_row_was_given_up(registry):
    async def run():
        batch = registry.add(submission(1, crash_counts_of(2)))
        lose(registry, 1)
        return await registry.answer(batch, 60.0)

    answer = asyncio.run(run())
    assert ("done", (RowCrashes(0, 3, True),)) == (answer.status, answer.crashes)
    (results,) = answer.results
    (completion,) = decode_completions(results)
    assert "ReplicaCrash: the engine died 3 times with this row" == completion.error
