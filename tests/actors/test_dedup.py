"""Identical rows of several batches: one runs, also if its batch is dropped."""

import gc
import weakref

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.actors.coordinator import dedup
from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import combine_results, encode_completions
from raybatch.actors.wire.records import DEDUP_KEY_BYTES, Credit, Submission
from raybatch.records.types import Completion

AMPLE = Credit(tokens=10**6, rows=10**6)


def submission(keys, token, **more):
    """Describe rows by their keys, 0 for a row that is never deduplicated."""
    return Submission(
        token=token,
        client=more.pop("client", "c"),
        prompt_tokens=np.array(keys, np.int32) + 5,
        max_new_tokens=np.full(len(keys), 2, np.int64),
        dedup_keys=b"".join(int(key).to_bytes(DEDUP_KEY_BYTES, "little") for key in keys),
        **more,
    )


class Pool:
    """A batch registry with one replica, whose answer to a row is the key of the row."""

    def __init__(self):
        self.registry = BatchRegistry(RowQueue(3), on_drop=lambda *_: None)
        self.keys, self.finished, self.held = {}, [], []

    def add(self, keys, token="t", **more):
        batch = self.registry.add(submission(keys, token, **more))
        self.keys |= {(batch.batch_id, row): key for row, key in enumerate(keys)}
        return batch

    def pull(self, replica_id=1, credit=AMPLE):
        row_ranges = self.registry.queue.dispatch({replica_id: credit}).get(replica_id, [])
        rows = [(s.batch_id, row) for s in row_ranges for row in range(s.start, s.stop)]
        self.held += rows
        return rows

    def finish(self, place, error="", samples=1):
        batch_id, row = place
        self.held.remove(place)
        done = [
            Completion(
                request_id=row,
                sample_idx=i,
                token_ids=np.array([self.keys[place], i], np.int32),
                finish_reason="error" if error else "stop",
                error=error,
                cost=2.0,
            )
            for i in range(samples)
        ]
        if self.registry.take(1, batch_id, encode_completions([row] * samples, done)):
            self.finished.append(self.keys[place])

    def run(self):
        while rows := self.pull():
            for place in rows:
                self.finish(place)


def answers(pool, batch):
    attempts = pool.registry.queue.attempts(batch.batch_id)
    return combine_results(batch.results, attempts).to_pylist()


@pytest.fixture
def pool():
    return Pool()


def test_rows_with_one_key_run_once_over_all_batches(pool):
    batches = [pool.add([7, 0, 8 + i], str(i)) for i in range(3)]
    for place in pool.pull():
        pool.finish(place, samples=2)
    assert sorted(pool.finished) == [0, 0, 0, 7, 8, 9, 10]
    for batch in batches:
        tokens = [one["token_ids"] for one in answers(pool, batch) if one["row"] == 0]
        assert tokens == [[7, 0], [7, 1]]


def test_a_later_row_takes_the_result_that_was_kept(pool):
    pool.add([7], "first")
    pool.run()
    later = pool.add([7], "later")
    assert later.done.is_set()
    (answer,) = answers(pool, later)
    assert (answer["token_ids"], answer["num_cached_tokens"], answer["cost"]) == ([7, 0], 12, None)
    assert answer["attempts"] == 1


def test_copies_cost_no_tokens_and_count_as_done(pool):
    for i in range(4):
        pool.add([7], str(i))
    pool.run()
    counters = pool.registry.clients["c"]
    assert (counters.rows_received, counters.rows_done) == (4, 4)
    assert (counters.prompt_tokens, counters.generated_tokens, counters.cost) == (12, 2, 2.0)
    assert counters.max_tokens_left == 0


def test_a_row_of_another_client_is_no_duplicate(pool):
    pool.add([7], "first")
    pool.add([7], "other", client="d")
    pool.run()
    assert pool.finished == [7, 7]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_waiting_row_runs_where_the_batch_of_the_first_is_dropped(pool, is_held):
    first, second, third = (pool.add([7], name) for name in "abc")
    if is_held:
        pool.pull()
    pool.registry.drop(first)
    pool.registry.queue.note_aborted(1, first.batch_id)
    assert pool.pull() == [(second.batch_id, 0)]
    pool.finish((second.batch_id, 0))
    assert (True, True) == (second.done.is_set(), third.done.is_set())
    assert pool.finished == [7]


def test_a_waiting_row_of_a_dropped_batch_is_forgotten(pool):
    first, second, third = (pool.add([7], name) for name in "abc")
    pool.registry.drop(second)
    pool.run()
    assert (len(first.results), len(second.results), len(third.results)) == (1, 0, 1)


def test_rows_that_wait_share_an_error_and_later_ones_are_tried_again(pool):
    batches = [pool.add([7], name) for name in "ab"]
    pool.pull()
    pool.finish((0, 0), error="Odd: row")
    assert ["Odd: row"] * 2 == [answers(pool, batch)[0]["error"] for batch in batches]
    assert pool.registry.clients["c"].errors == {"Odd": 2}
    assert pool.add([7], "later").batch_id == pool.pull()[0][0]


def test_a_row_that_is_given_up_gives_up_those_that_wait_for_it(pool):
    batches = [pool.add([7], name) for name in "ab"]
    for replica_id in range(3):
        pool.pull(replica_id)
        pool.registry.note_loss(pool.registry.queue.lose(replica_id))
    assert all(answers(pool, batch)[0]["error"].startswith("ReplicaCrash") for batch in batches)


def test_a_row_with_which_engines_have_died_runs_by_itself(pool):
    pool.add([7], "first")
    pool.add([7], "struck", crashes=np.array([1], np.int16))
    assert len(pool.pull()) == 2


def test_a_failed_pool_starts_no_row_in_place_of_another(pool):
    first, _ = pool.add([7], "first"), pool.add([7], "second")
    pool.registry.fail(0, "it broke")
    pool.registry.drop(first)
    assert pool.registry.queue.num_waiting() == 0


def test_results_are_kept_within_a_bound_and_those_asked_for_longest(pool, monkeypatch):
    monkeypatch.setattr(dedup, "_MAX_LAST_BYTES", 2000)
    for key in range(1, 100):
        pool.add([1, key + 1], str(key))
        pool.run()
    assert pool.finished.count(1) == 1
    kept = pool.registry._dedup
    assert 0 < kept._last_bytes <= 2000
    assert len(kept._place) < 30
    pool.add([3], "again")
    pool.run()
    assert pool.finished.count(3) == 2
    pool.registry.forget_good_row()
    assert (kept._last_bytes, kept._taken_bytes, len(kept._place)) == (0, 0, 0)


class Message(bytearray):
    """Bytes that can be watched."""


@pytest.mark.parametrize("limit", ["_MAX_BATCHES", "_CHUNK_ROWS"])
def test_kept_results_keep_no_message_in_memory(monkeypatch, limit):
    monkeypatch.setattr(dedup, limit, 1)
    kept, of = dedup.InFlightDedup(), submission([1, 2, 0, 3], "t")
    kept.join(1, of)
    done = [Completion(request_id=row, token_ids=np.array([row], np.int32)) for row in range(4)]
    done[1] = Completion(request_id=1, finish_reason="error", error="an error is not kept")
    batch = encode_completions(range(4), done)
    message = Message(batch.serialize())
    results = pa.ipc.read_record_batch(pa.py_buffer(message), batch.schema)
    watched = weakref.ref(message)
    kept.finish(1, of, np.arange(4, dtype=np.int32), results)
    del message, results
    gc.collect()
    assert watched() is None
    _, answered = kept.join(2, submission([2, 3], "u"))
    assert [(i, r.column("token_ids").to_pylist()) for i, r in answered] == [(1, [[3]])]
    (chunk,) = kept._last.values()
    assert [2] == [len(batch) for batch, _ in chunk._copied]


def test_results_of_many_batches_are_found(pool, monkeypatch):
    monkeypatch.setattr(dedup, "_CHUNK_ROWS", 8)
    monkeypatch.setattr(dedup, "_MAX_BATCHES", 2)
    for key in range(1, 40, 2):
        pool.add([key, key + 1], str(key))
        pool.run()
    found = [answers(pool, pool.add([key], f"again {key}")) for key in range(1, 41)]
    assert [[[key, 0]] for key in range(1, 41)] == [[r["token_ids"] for r in of] for of in found]
    assert not pool.pull()
    assert len(pool.registry._dedup._last) == 5


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("pull"), st.integers(1, 3)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("lose"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_every_row_is_answered_once_with_the_result_of_its_key(actions):
    pool, open_batches, replica_id, num_lost = Pool(), [], 1, 0
    for number, (action, value) in enumerate(actions):
        if action == "add":
            # a row batch has each key once
            keys = list(dict.fromkeys(value)) if 0 not in value else [*sorted({*value} - {0}), 0, 0]
            open_batches.append((pool.add(keys, str(number)), keys))
        elif action == "drop" and open_batches:
            batch, _ = open_batches.pop(value % len(open_batches))
            pool.registry.drop(batch)
            pool.registry.queue.note_aborted(replica_id, batch.batch_id)
            pool.held = [place for place in pool.held if place[0] != batch.batch_id]
        elif action == "pull":
            pool.pull(replica_id, Credit(tokens=10**6, rows=value))
        elif action == "finish" and pool.held:
            pool.finish(pool.held[value % len(pool.held)])
        elif action == "lose" and num_lost < 1:
            pool.registry.queue.release(replica_id)
            pool.held, num_lost = [], num_lost + 1
    pool.run()
    for place in list(pool.held):
        pool.finish(place)
    pool.run()
    for batch, keys in open_batches:
        assert batch.done.is_set()
        assert [(row, [key, 0]) for row, key in enumerate(keys)] == [
            (one["row"], one["token_ids"]) for one in answers(pool, batch)
        ]
    assert all(pool.finished.count(key) <= 1 for key in (1, 2, 3))
