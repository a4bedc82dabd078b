"""Row batches between feeders and the queue: cancelled, dropped, failed."""

import asyncio

import numpy as np
import pytest

from raybatch.actors.coordinator.mailbox import Inbox
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import encode_completions
from raybatch.actors.wire.records import Room, Submission
from raybatch.records.types import Completion


def submission(num_rows, token="t", name="", client="c"):
    return Submission(
        token=token,
        client=client,
        name=name,
        prompt_tokens=np.ones(num_rows, np.int32),
        max_new_tokens=np.full(num_rows, 2, np.int64),
    )


@pytest.fixture
def told():
    """Pairs of a replica and a batch that it is to abort."""
    return []


@pytest.fixture
def inbox(told):
    return Inbox(RowQueue(3), on_drop=lambda *args: told.append(args))


def test_a_cancelled_batch_is_not_opened_when_it_arrives_late(inbox):
    inbox.cancel("t")
    assert inbox.add(submission(3)) is None
    assert (len(inbox), inbox.queue.num_waiting()) == (0, 0)
    assert inbox.add(submission(3, "other")) is not None


def test_only_so_many_cancelled_tokens_are_remembered(inbox):
    for i in range(10_001):
        inbox.cancel(str(i))
    assert inbox.add(submission(1, "0")) is not None
    assert inbox.add(submission(1, "1")) is None


def test_a_dropped_batch_is_told_to_the_replicas_that_run_it(inbox, told):
    batch = inbox.add(submission(10))
    inbox.queue.dispatch({1: Room(tokens=2, rows=2), 2: Room(tokens=2, rows=2)})
    inbox.drop(batch)
    assert told == [(1, batch.batch_id), (2, batch.batch_id)]


def test_a_failed_pool_takes_its_rows_out_and_answers_with_the_cause(inbox, told):
    batch = inbox.add(submission(10))
    inbox.queue.dispatch({1: Room(tokens=2, rows=2)})
    inbox.fail(4, "it broke")
    assert (told, inbox.queue.num_waiting()) == ([(1, batch.batch_id)], 0)
    answer = asyncio.run(inbox.answer(batch, 1.0))
    assert (answer.status, answer.rank, answer.cause) == ("failed", 4, "it broke")


def test_results_of_a_dropped_batch_are_not_kept(inbox):
    batch = inbox.add(submission(2))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    inbox.drop(batch)
    results = encode_completions([0], [Completion(request_id=0)])
    assert inbox.take(1, batch.batch_id, results) == 0
    assert inbox.num_results() == 0


def test_a_dropped_batch_leaves_the_counters_of_its_client(inbox):
    inbox.drop(inbox.add(submission(5)))
    counters = inbox.clients["c"]
    received = (counters.rows_received, counters.prompt_tokens_received, counters.max_tokens_left)
    assert received == (0, 0, 0)


def test_a_failed_pool_leaves_only_finished_rows_in_the_counters(inbox):
    before = inbox.add(submission(5, "before"))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    results = encode_completions([0, 1], [Completion(request_id=0), Completion(request_id=1)])
    inbox.take(1, before.batch_id, results)
    inbox.fail(0, "it broke")
    inbox.drop(before)
    inbox.drop(inbox.add(submission(4, "after")))
    counters = inbox.clients["c"]
    received = (counters.rows_received, counters.prompt_tokens_received, counters.max_tokens_left)
    assert (received, counters.rows_done) == ((2, 2, 0), 2)


def finish(inbox, batch, row):
    """Let replica 1 finish a row that it holds."""
    inbox.take(1, batch.batch_id, encode_completions([row], [Completion(request_id=row)]))


def test_an_heir_gets_what_was_finished_before_it_came(inbox):
    batch = inbox.add(submission(2, "first", name="unit 1"))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    finish(inbox, batch, 0)
    heir = inbox.take_over(submission(2, "second", name="unit 1"))
    finish(inbox, batch, 1)
    answer = asyncio.run(inbox.answer(heir, 1.0))
    assert (answer.status, sum(each.num_rows for each in answer.results)) == ("done", 2)
    assert inbox.clients["c"].rows_received == 2


def test_who_was_inherited_from_does_not_take_the_answer(inbox):
    async def run():
        batch = inbox.add(submission(1, "first", name="unit 1"))
        first = asyncio.ensure_future(inbox.answer(batch, 5.0))
        await asyncio.sleep(0)
        heir = inbox.take_over(submission(1, "second", name="unit 1"))
        inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
        finish(inbox, batch, 0)
        return (await first).status, (await inbox.answer(heir, 5.0)).status

    assert asyncio.run(run()) == ("unknown", "done")


@pytest.mark.parametrize(
    "other",
    [
        submission(2, "second"),
        submission(2, "second", name="unit 2"),
        submission(2, "second", name="unit 1", client="d"),
        submission(3, "second", name="unit 1"),
    ],
)
def test_only_the_same_rows_of_the_same_client_are_inherited(inbox, other):
    inbox.add(submission(2, "first", name="unit 1"))
    assert inbox.take_over(other) is None


def test_an_answer_that_nobody_may_have_got_is_there_for_an_heir(inbox):
    batch = inbox.add(submission(1, "first", name="unit 1"))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    finish(inbox, batch, 0)
    assert "done" == asyncio.run(inbox.answer(batch, 1.0)).status
    heir = inbox.take_over(submission(1, "second", name="unit 1"))
    assert "done" == asyncio.run(inbox.answer(heir, 1.0)).status


def test_an_answer_that_is_safe_is_forgotten(inbox):
    batch = inbox.add(submission(1, "first", name="unit 1"))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    finish(inbox, batch, 0)
    asyncio.run(inbox.answer(batch, 1.0))
    assert inbox.has_named("c", "unit 1")
    inbox.forget("c", ["unit 1", "unit 2"])
    assert (len(inbox), inbox.has_named("c", "unit 1")) == (0, False)
    assert inbox.take_over(submission(1, "second", name="unit 1")) is None


def test_other_rows_under_a_name_take_the_place_of_the_first(inbox):
    first = inbox.add(submission(2, "first", name="unit 1"))
    inbox.add(submission(3, "second", name="unit 1"))
    assert (len(inbox), inbox.find("first")) == (1, None)
    assert first.done.is_set()


def test_an_heir_that_was_cancelled_on_its_way_inherits_nothing(inbox):
    inbox.add(submission(2, "first", name="unit 1"))
    inbox.cancel("second")
    assert inbox.take_over(submission(2, "second", name="unit 1")) is None


def test_what_was_finished_before_a_pool_failed_can_still_be_had(inbox):
    batch = inbox.add(submission(3, "first", name="unit 1"))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    finish(inbox, batch, 2)
    inbox.fail(4, "it broke")
    inbox.add(submission(1, "after", name="unit 2"))
    inbox.fail(0, "it was shut down")
    answer = asyncio.run(inbox.answer(batch, 1.0))
    assert (answer.status, answer.rank, answer.cause) == ("failed", 4, "it broke")
    found = inbox.so_far("c", "unit 1", skip=0)
    assert [2] == [row for each in found.results for row in each.column("row").to_pylist()]
    assert found.attempts.tolist() == [1, 1, 1]


def test_prompt_tokens_are_those_that_the_backend_counts(inbox):
    batch = inbox.add(submission(2))
    inbox.queue.dispatch({1: Room(tokens=9, rows=9)})
    counted = Completion(request_id=0, num_input_tokens=40, num_generated_tokens=3, cost=0.5)
    inbox.take(1, batch.batch_id, encode_completions([0], [counted]))
    finish(inbox, batch, 1)
    counters = inbox.clients["c"]
    assert (counters.prompt_tokens_done, counters.generated_tokens) == (41, 3)
    assert counters.cost == 0.5
