"""Row batches between feeders and the queue: cancelled, dropped, failed."""

import asyncio

import numpy as np
import pytest

from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import encode_completions
from raybatch.actors.wire.records import Credit, Submission
from raybatch.records.types import Completion


def submission(num_rows, token="t", name="", client="c", copies=None):
    return Submission(
        token=token,
        client=client,
        name=name,
        prompt_tokens=np.ones(num_rows, np.int32),
        max_new_tokens=np.full(num_rows, 2, np.int64),
        copies=None if copies is None else np.array(copies, np.int32),
    )


@pytest.fixture
def reported():
    """Pairs of a replica and a batch that it is to abort."""
    return []


@pytest.fixture
def registry(reported):
    return BatchRegistry(RowQueue(3), on_drop=lambda *args: reported.append(args))


def test_a_cancelled_batch_is_not_opened_when_it_arrives_late(registry):
    registry.cancel("t")
    assert registry.add(submission(3)) is None
    assert (len(registry), registry.queue.num_waiting()) == (0, 0)
    assert registry.add(submission(3, "other")) is not None


def test_only_so_many_cancelled_tokens_are_remembered(registry):
    for i in range(10_001):
        registry.cancel(str(i))
    assert registry.add(submission(1, "0")) is not None
    assert registry.add(submission(1, "1")) is None


def test_a_dropped_batch_is_told_to_the_replicas_that_run_it(registry, reported):
    batch = registry.add(submission(10))
    registry.queue.dispatch({1: Credit(tokens=2, rows=2), 2: Credit(tokens=2, rows=2)})
    registry.drop(batch)
    assert reported == [(1, batch.batch_id), (2, batch.batch_id)]


def test_a_failed_pool_takes_its_rows_out_and_answers_with_the_cause(registry, reported):
    batch = registry.add(submission(10))
    registry.queue.dispatch({1: Credit(tokens=2, rows=2)})
    registry.fail(4, "it broke")
    assert (reported, registry.queue.num_waiting()) == ([(1, batch.batch_id)], 0)
    answer = asyncio.run(registry.answer(batch, 1.0))
    assert (answer.status, answer.rank, answer.cause) == ("failed", 4, "it broke")


def test_results_of_a_dropped_batch_are_not_kept(registry):
    batch = registry.add(submission(2))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    registry.drop(batch)
    results = encode_completions([0], [Completion(request_id=0)])
    assert registry.take(1, batch.batch_id, results) == 0
    assert registry.num_results() == 0


def test_a_dropped_batch_leaves_the_counters_of_its_client(registry):
    registry.drop(registry.add(submission(5)))
    counters = registry.clients["c"]
    received = (counters.rows_received, counters.prompt_tokens_received, counters.max_tokens_left)
    assert received == (0, 0, 0)


def test_a_failed_pool_leaves_only_finished_rows_in_the_counters(registry):
    before = registry.add(submission(5, "before"))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    results = encode_completions([0, 1], [Completion(request_id=0), Completion(request_id=1)])
    registry.take(1, before.batch_id, results)
    registry.fail(0, "it broke")
    registry.drop(before)
    registry.drop(registry.add(submission(4, "after")))
    counters = registry.clients["c"]
    received = (counters.rows_received, counters.prompt_tokens_received, counters.max_tokens_left)
    assert (received, counters.rows_done) == ((2, 2, 0), 2)


def test_copies_count_with_the_row_whose_answer_they_get(registry):
    batch, counters = registry.add(submission(3, copies=[7, 0, 2])), registry.clients["c"]
    assert (counters.rows_received, counters.rows_done) == (12, 0)
    registry.queue.dispatch({1: Credit(tokens=9, rows=2)})
    finish(registry, batch, 1)
    assert (counters.rows_done, counters.errors) == (1, {})
    failed = Completion(request_id=0, finish_reason="error", error="Odd: row")
    registry.take(1, batch.batch_id, encode_completions([0], [failed]))
    assert (counters.rows_done, counters.errors) == (9, {"Odd": 8})
    registry.drop(batch)
    assert counters.rows_received == 9


def finish(registry, batch, row):
    """Let replica 1 finish a row that it holds."""
    registry.take(1, batch.batch_id, encode_completions([row], [Completion(request_id=row)]))


def test_an_heir_gets_what_was_finished_before_it_came(registry):
    batch = registry.add(submission(2, "first", name="unit 1"))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    finish(registry, batch, 0)
    heir = registry.take_over(submission(2, "second", name="unit 1"))
    finish(registry, batch, 1)
    answer = asyncio.run(registry.answer(heir, 1.0))
    assert (answer.status, sum(each.num_rows for each in answer.results)) == ("done", 2)
    assert registry.clients["c"].rows_received == 2


def test_who_was_inherited_from_does_not_take_the_answer(registry):
    async def run():
        batch = registry.add(submission(1, "first", name="unit 1"))
        first = asyncio.ensure_future(registry.answer(batch, 5.0))
        await asyncio.sleep(0)
        heir = registry.take_over(submission(1, "second", name="unit 1"))
        registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
        finish(registry, batch, 0)
        return (await first).status, (await registry.answer(heir, 5.0)).status

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
def test_only_the_same_rows_of_the_same_client_are_inherited(registry, other):
    registry.add(submission(2, "first", name="unit 1"))
    assert registry.take_over(other) is None


def test_an_answer_that_nobody_may_have_got_is_there_for_an_heir(registry):
    batch = registry.add(submission(1, "first", name="unit 1"))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    finish(registry, batch, 0)
    assert "done" == asyncio.run(registry.answer(batch, 1.0)).status
    heir = registry.take_over(submission(1, "second", name="unit 1"))
    assert "done" == asyncio.run(registry.answer(heir, 1.0)).status


def test_an_answer_that_is_safe_is_forgotten(registry):
    batch = registry.add(submission(1, "first", name="unit 1"))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    finish(registry, batch, 0)
    asyncio.run(registry.answer(batch, 1.0))
    assert registry.has_named("c", "unit 1")
    registry.forget("c", ["unit 1", "unit 2"])
    assert (len(registry), registry.has_named("c", "unit 1")) == (0, False)
    assert registry.take_over(submission(1, "second", name="unit 1")) is None


def test_other_rows_under_a_name_take_the_place_of_the_first(registry):
    first = registry.add(submission(2, "first", name="unit 1"))
    registry.add(submission(3, "second", name="unit 1"))
    assert (len(registry), registry.find("first")) == (1, None)
    assert first.done.is_set()


def test_an_heir_that_was_cancelled_on_its_way_inherits_nothing(registry):
    registry.add(submission(2, "first", name="unit 1"))
    registry.cancel("second")
    assert registry.take_over(submission(2, "second", name="unit 1")) is None


def test_what_was_finished_before_a_pool_failed_can_still_be_had(registry):
    batch = registry.add(submission(3, "first", name="unit 1"))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    finish(registry, batch, 2)
    registry.fail(4, "it broke")
    registry.add(submission(1, "after", name="unit 2"))
    registry.fail(0, "it was shut down")
    answer = asyncio.run(registry.answer(batch, 1.0))
    assert (answer.status, answer.rank, answer.cause) == ("failed", 4, "it broke")
    found = registry.partial_results("c", "unit 1", skip=0)
    assert [2] == [row for each in found.results for row in each.column("row").to_pylist()]
    assert found.attempts.tolist() == [1, 1, 1]


def test_prompt_tokens_are_those_that_the_backend_counts(registry):
    batch = registry.add(submission(2))
    registry.queue.dispatch({1: Credit(tokens=9, rows=9)})
    counted = Completion(request_id=0, num_input_tokens=40, num_generated_tokens=3, cost=0.5)
    registry.take(1, batch.batch_id, encode_completions([0], [counted]))
    finish(registry, batch, 1)
    counters = registry.clients["c"]
    assert (counters.prompt_tokens, counters.generated_tokens) == (41, 3)
    assert counters.cost == 0.5
