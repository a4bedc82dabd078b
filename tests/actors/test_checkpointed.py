"""Tokens so far stay with their rows: on the way, with the coordinator, and to the next replica."""

import asyncio

import numpy as np
import pyarrow as pa
import pytest

from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import (
    CheckpointedTokens,
    encode_checkpointed,
    encode_completions,
    sequence_states,
)
from raybatch.actors.wire.records import Submission
from raybatch.records.types import Completion, Request, Sampling, SequenceState
from tests.actors.queues import AMPLE

LOGPROBS = ((np.array([4, 5], np.int32), np.array([-0.5, -1.5], np.float32)),)


def request(request_id, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array([1], np.int32),
        sampling=Sampling(**sampling),
    )


def state(num_tokens, *, sample_idx=0, **fields):
    tokens = np.arange(num_tokens, dtype=np.int32)
    return SequenceState(
        request=request(0), sample_idx=sample_idx, token_ids=tokens, num_cached_tokens=3, **fields
    )


def found(lengths):
    """Tokens so far, given as row to number of tokens."""
    return encode_checkpointed(list(lengths), [state(length) for length in lengths.values()])


def lengths_of(checkpointed):
    if checkpointed is None:
        return {}
    lengths = checkpointed.column("token_ids").value_lengths().to_pylist()
    return dict(zip(checkpointed.column("row").to_pylist(), lengths, strict=True))


def test_a_sequence_comes_back_as_it_was():
    states = [state(2, logprobs=LOGPROBS * 2)]
    ((back,),) = sequence_states({7: request(70)}, encode_checkpointed([7], states)).values()
    assert (70, [0, 1], 3) == (
        back.request.request_id,
        back.token_ids.tolist(),
        back.num_cached_tokens,
    )
    ids, values = back.logprobs[1]
    assert ([4, 5], [-0.5, -1.5]) == (ids.tolist(), values.tolist())


def test_samples_that_nothing_is_known_of_begin_at_their_first_token():
    checkpointed = encode_checkpointed([7], [state(5, sample_idx=1)])
    (states,) = sequence_states({7: request(70, n=3)}, checkpointed).values()
    assert [(0, 0), (1, 5), (2, 0)] == [(s.sample_idx, len(s.token_ids)) for s in states]


def test_rows_without_tokens_are_not_begun():
    requests = {row: request(row) for row in range(3)}
    assert [1] == list(sequence_states(requests, found({1: 4})))


def test_the_longest_that_is_known_of_a_sample_holds():
    checkpointed = CheckpointedTokens(found({0: 4, 1: 4}))
    checkpointed.add(found({0: 6, 1: 2}))
    assert {0: 6, 1: 4} == lengths_of(checkpointed.of({0, 1, 2}))


def test_news_is_what_was_gained_since_the_last_time():
    checkpointed = CheckpointedTokens(found({0: 4, 1: 4}))
    assert checkpointed.take_new() is None
    checkpointed.add(found({0: 4, 1: 5}))
    assert {1: 5} == lengths_of(checkpointed.take_new())
    assert checkpointed.take_new() is None


def test_a_finished_row_is_forgotten():
    checkpointed = CheckpointedTokens()
    checkpointed.add(found({0: 4, 1: 4}))
    checkpointed.drop({0})
    assert {1: 4} == lengths_of(checkpointed.of({0, 1})) == lengths_of(checkpointed.take_new())


def test_a_row_begins_with_what_its_shortest_sample_has():
    checkpointed = CheckpointedTokens(found({0: 4}))
    checkpointed.add(encode_checkpointed([7, 7, 8], [state(5), state(3, sample_idx=1), state(9)]))
    assert [4, 0, 3, 9] == checkpointed.num_tokens([0, 1, 7, 8]).tolist()
    checkpointed.add(encode_checkpointed([7], [state(6, sample_idx=1)]))
    checkpointed.drop({8, 9})
    assert [5, 0] == checkpointed.num_tokens([7, 8]).tolist()


def test_what_is_sent_on_is_no_larger_than_its_own_rows():
    checkpointed = CheckpointedTokens(found({0: 100_000, 1: 4}))
    sent = checkpointed.of({1})
    assert sent.get_total_buffer_size() < 1000


@pytest.fixture
def registry():
    return BatchRegistry(RowQueue(3), on_drop=lambda *args: None)


def add(registry, num_rows, checkpointed=None):
    return registry.add(
        Submission(
            token="t",
            client="c",
            refs=[None],
            prompt_tokens=np.ones(num_rows, np.int32),
            max_new_tokens=np.full(num_rows, 9, np.int64),
            checkpointed=checkpointed,
        )
    )


def dispatch(registry, replica_id):
    """What a replica gets, as row to number of tokens."""
    row_ranges = registry.queue.dispatch({replica_id: AMPLE})[replica_id]
    (assignment,) = registry.assign(row_ranges)
    return lengths_of(assignment.checkpointed)


def test_the_next_replica_gets_what_the_dead_one_had(registry):
    batch = add(registry, 3)
    assert {} == dispatch(registry, 1)
    registry.note_checkpointed(batch.batch_id, found({0: 5, 2: 7}))
    registry.note_loss(registry.queue.lose(1))
    assert {0: 5, 2: 7} == dispatch(registry, 2)


def test_the_first_replica_gets_what_earlier_runs_had(registry):
    add(registry, 3, found({1: 5}))
    assert {1: 5} == dispatch(registry, 1)


def test_tokens_of_a_row_that_is_finished_are_not_kept(registry):
    batch = add(registry, 2)
    dispatch(registry, 1)
    registry.note_checkpointed(batch.batch_id, found({0: 5}))
    registry.take(1, batch.batch_id, encode_completions([0], [Completion(request_id=0)]))
    registry.note_checkpointed(batch.batch_id, found({0: 6, 1: 6}))
    assert {1: 6} == lengths_of(batch.checkpointed.of({0, 1}))


def test_tokens_of_a_batch_that_nobody_waits_for_are_not_kept(registry):
    batch = add(registry, 1)
    registry.drop(batch)
    registry.note_checkpointed(batch.batch_id, found({0: 5}))
    assert batch.checkpointed.of([0]) is None


def test_who_waits_is_told_of_tokens_when_the_wait_is_over(registry):
    batch = add(registry, 2, found({1: 3}))
    registry.note_checkpointed(batch.batch_id, found({0: 5}))

    async def ask_twice():
        return [await registry.answer(batch, 0.01) for _ in range(2)]

    answers = asyncio.run(ask_twice())
    assert [("pending", {0: 5}), ("pending", {})] == [
        (answer.status, lengths_of(answer.checkpointed)) for answer in answers
    ]


def test_tokens_begun_without_log_probabilities_have_a_null_for_them():
    column = found({0: 1}).column("logprobs")
    assert pa.types.is_list(column.type)
    assert [None] == column.to_pylist()
