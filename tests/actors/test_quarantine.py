"""The quarantine separates a broken engine from rows that crash engines; deaths are simulated."""

import itertools

import numpy as np
import pytest

from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.quarantine import MAX_GIVEN_UP
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import combine_results, decode_completions, encode_completions
from raybatch.actors.wire.records import Credit, Submission
from raybatch.backends.fake import FakeBackend, FakeOptions, fake_tokens
from raybatch.records.types import Completion, Request, RowProgress, Sampling

POISON = 999
SAMPLING = Sampling(max_tokens=2)
CREDIT = Credit(tokens=64, rows=64)


def submission(prompts, token="t"):
    num_rows = len(prompts)
    return Submission(
        token=token,
        client="c",
        refs=[prompts],
        prompt_tokens=np.ones(num_rows, np.int32),
        max_new_tokens=np.full(num_rows, 2, np.int64),
    )


class Pool:
    """The coordinator's decisions for fake backends that die by an exception."""

    def __init__(self, *, num_replicas=1, max_row_crashes=1, **options):
        self.queue = RowQueue(max_row_crashes)
        self.registry = BatchRegistry(self.queue, on_drop=lambda replica_id, batch_id: None)
        self.num_deaths = 0
        self.verdict = ""
        self._options = FakeOptions(raise_on=POISON, max_num_seqs=64, **options)
        self._ids = itertools.count(1)
        self._backends = {}
        for _ in range(num_replicas):
            self._start()

    def run(self, batch):
        """Work until the batch is done or the engine is found broken."""
        for _ in range(5000):
            if batch.done.is_set() or self.verdict:
                return
            self._fill()
            for replica_id, backend in list(self._backends.items()):
                self._step(replica_id, backend)
        raise AssertionError("the pool makes no progress")

    def _start(self):
        self._backends[next(self._ids)] = FakeBackend(self._options)

    def _fill(self):
        # as many as run at once, even if some run already
        demand = dict.fromkeys(self._backends, CREDIT)
        for replica_id, row_ranges in self.queue.dispatch(demand).items():
            requests = [
                Request(
                    request_id=batch_id << 32 | row,
                    row_id=str(row),
                    prompt_token_ids=self.registry.refs(batch_id)[0][row],
                    sampling=SAMPLING,
                    seed=row,
                )
                for batch_id, start, stop in row_ranges
                for row in range(start, stop)
            ]
            self._backends[replica_id].submit(requests)

    def _step(self, replica_id, backend):
        try:
            completions = backend.poll()
        except RuntimeError:
            del self._backends[replica_id]
            self.num_deaths += 1
            self.verdict = self.verdict or self.registry.note_loss(self.queue.lose(replica_id))
            self._start()
            return
        for completion in completions:
            row = completion.request_id & 0xFFFFFFFF
            results = encode_completions([row], [completion])
            self.registry.take(replica_id, completion.request_id >> 32, results)


def prompts_of(num_rows, poison=()):
    return [np.array([POISON if row in poison else row % 97], np.int32) for row in range(num_rows)]


def answers(pool, batch):
    table = combine_results(batch.results, pool.queue.attempts(batch.batch_id))
    return decode_completions(table)


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("max_row_crashes", [1, 2])
@pytest.mark.parametrize("first", [0, 150, 300], ids=["head", "middle", "end"])
def test_a_hundred_neighbouring_poison_rows_cost_only_themselves(
    first, max_row_crashes, num_replicas
):
    poison = set(range(first, first + 100))
    prompts = prompts_of(400, poison)
    pool = Pool(num_replicas=num_replicas, max_row_crashes=max_row_crashes)
    batch = pool.registry.add(submission(prompts))
    pool.run(batch)
    assert pool.verdict == ""
    expected = [
        [] if row in poison else fake_tokens(prompts[row], row, SAMPLING).tolist()
        for row in range(400)
    ]
    done = answers(pool, batch)
    assert expected == [c.token_ids.tolist() for c in done]
    assert poison == {c.request_id for c in done if c.error.startswith("ReplicaCrash")}


def test_a_batch_of_poison_alone_after_good_ones_becomes_error_rows():
    pool = Pool()
    first = pool.registry.add(submission(prompts_of(10), "a"))
    pool.run(first)
    pool.registry.drop(first)
    second = pool.registry.add(submission(prompts_of(40, set(range(40))), "b"))
    pool.run(second)
    assert pool.verdict == ""
    assert len([c for c in answers(pool, second) if c.error]) == 40


def test_one_row_that_is_poison_is_an_error_row_also_as_the_first():
    pool = Pool(max_row_crashes=3)
    batch = pool.registry.add(submission(prompts_of(1, {0})))
    pool.run(batch)
    assert (pool.verdict, pool.num_deaths) == ("", 3)


@pytest.mark.parametrize("num_replicas", [1, 4])
@pytest.mark.parametrize("max_row_crashes", [1, 3])
def test_an_engine_that_dies_on_every_row_is_found_broken_soon(max_row_crashes, num_replicas):
    pool = Pool(num_replicas=num_replicas, max_row_crashes=max_row_crashes)
    batch = pool.registry.add(submission(prompts_of(400, set(range(400)))))
    pool.run(batch)
    assert "ran only an unrelated row" in pool.verdict
    # all replicas that had rows at first, then two canaries
    assert pool.num_deaths == num_replicas + 2


@pytest.mark.parametrize(("num_rows", "num_replicas"), [(3, 1), (3, 2), (58, 1), (58, 5)])
def test_few_rows_that_all_end_a_new_engine_are_not_tried_one_by_one(num_rows, num_replicas):
    pool = Pool(num_replicas=num_replicas, max_row_crashes=3)
    batch = pool.registry.add(submission(prompts_of(num_rows, set(range(num_rows)))))
    pool.run(batch)
    assert "never finished a row" in pool.verdict
    assert pool.num_deaths <= num_replicas + 2


def test_a_death_of_an_engine_whose_rows_came_far_holds_nothing_back():
    pool = Pool()
    batch = pool.registry.add(submission(prompts_of(100)))
    pool.queue.dispatch({1: CREDIT, 2: CREDIT})
    ids = np.array([batch.batch_id << 32 | 3])
    far = RowProgress(request_ids=ids, num_tokens=np.array([40]), num_generated=np.array([20]))
    pool.registry.note_running(1, far)
    pool.registry.note_loss(pool.queue.lose(1))
    # more than one row, unlike the first after a death in a new pool
    assert (
        sum(row_range.stop - row_range.start for row_range in pool.queue.dispatch({3: CREDIT})[3])
        > 1
    )


@pytest.mark.parametrize("place", [0, 30, 59])
def test_one_bad_row_among_the_first_ones_costs_only_itself(place):
    pool = Pool(num_replicas=2, max_row_crashes=3)
    batch = pool.registry.add(submission(prompts_of(60, {place})))
    pool.run(batch)
    assert pool.verdict == ""
    assert [c.request_id for c in answers(pool, batch) if c.error] == [place]


@pytest.mark.parametrize("num_poison", [MAX_GIVEN_UP - 1, MAX_GIVEN_UP])
def test_rows_that_end_engines_end_the_run_once_they_are_many(num_poison):
    pool = Pool(max_row_crashes=1)
    # every other row
    batch = pool.registry.add(submission(prompts_of(1000, set(range(0, 2 * num_poison, 2)))))
    pool.run(batch)
    assert pool.verdict.startswith(f"{MAX_GIVEN_UP} rows crashed") == (num_poison == MAX_GIVEN_UP)
    assert bool(pool.verdict) == (num_poison == MAX_GIVEN_UP)


def test_an_engine_that_breaks_later_dies_on_a_row_that_had_finished():
    pool = Pool(max_row_crashes=3)
    first = pool.registry.add(submission(prompts_of(10), "a"))
    pool.run(first)
    pool.registry.drop(first)
    # the same table, with every row ending its replica from here on
    for prompt in first.submission.refs[0]:
        prompt[:] = POISON
    batch = pool.registry.add(submission(prompts_of(100, set(range(100))), "b"))
    pool.run(batch)
    assert "a row that had finished before" in pool.verdict
    assert pool.num_deaths == 2 + 3


def test_a_first_batch_of_poison_alone_is_taken_for_a_broken_engine():
    pool = Pool(max_row_crashes=1)
    batch = pool.registry.add(submission(prompts_of(60, set(range(60)))))
    pool.run(batch)
    assert pool.verdict
    assert pool.num_deaths <= 20


def test_rows_with_an_error_do_not_vouch_for_the_engine():
    pool = Pool(error_on=5)
    first = pool.registry.add(submission([np.array([5], np.int32)], "a"))
    pool.run(first)
    pool.registry.drop(first)
    second = pool.registry.add(submission(prompts_of(100, set(range(100))), "b"))
    pool.run(second)
    assert "an unrelated row" in pool.verdict


def test_a_canary_that_finishes_clears_the_engine():
    pool = Pool(max_row_crashes=9)
    first = pool.registry.add(submission(prompts_of(10), "a"))
    pool.run(first)
    pool.registry.drop(first)
    pool.registry.add(submission(prompts_of(40, set(range(40))), "b"))
    verdicts, num_canaries = set(), 0
    for replica_id in range(50, 80):
        grants = pool.queue.dispatch({replica_id: CREDIT})
        canary = grants[replica_id][0]
        is_canary = pool.registry.refs(canary.batch_id) == first.submission.refs
        num_canaries += is_canary
        # every other canary is lost by accident
        if is_canary and num_canaries % 2:
            results = encode_completions([canary.start], [Completion(request_id=0)])
            pool.registry.take(replica_id, canary.batch_id, results)
        verdicts.add(pool.registry.note_loss(pool.queue.lose(replica_id)))
    assert (verdicts, num_canaries >= 6) == ({""}, True)


def pool_with_a_canary():
    """Return a pool whose next row is a canary, after two deaths with other rows."""
    pool = Pool()
    first = pool.registry.add(submission(prompts_of(10), "a"))
    pool.run(first)
    pool.registry.drop(first)
    pool.registry.add(submission(prompts_of(20, set(range(20))), "b"))
    for replica_id in (50, 51):
        pool.queue.dispatch({replica_id: CREDIT})
        pool.registry.note_loss(pool.queue.lose(replica_id))
    return pool, first.submission


def test_a_canary_whose_table_is_gone_is_forgotten():
    pool, first = pool_with_a_canary()
    canary = pool.queue.dispatch({52: CREDIT})[52][0].batch_id
    assert pool.registry.refs(canary) == first.refs
    pool.registry.lose_table(canary)
    pool.queue.note_aborted(52, canary)
    assert (pool.registry.refs(canary), pool.queue.has_canary()) == (None, False)


def test_a_canary_that_comes_back_unstarted_runs_after_another_death():
    pool, first = pool_with_a_canary()
    canary = pool.queue.dispatch({52: CREDIT})[52]
    pool.queue.dispatch({53: CREDIT})
    pool.queue.give_back(52, canary)
    pool.registry.note_loss(pool.queue.lose(53))
    assert pool.queue.dispatch({54: CREDIT})[54] == canary
    assert pool.registry.refs(canary[0].batch_id) == first.refs


def test_a_canary_comes_from_another_place_once_the_kept_row_is_forgotten():
    pool, _ = pool_with_a_canary()
    pool.registry.forget_good_row()
    other = pool.registry.add(submission(prompts_of(5), "c"))
    assert not pool.queue.has_canary()
    pool.queue.dispatch({52: CREDIT})
    pool.registry.note_loss(pool.queue.lose(52))
    assert pool.queue.has_canary()
    assert pool.queue.dispatch({53: CREDIT})[53][0].batch_id == other.batch_id


@pytest.mark.parametrize("is_running", [False, True])
def test_a_failed_pool_runs_no_canary(is_running):
    pool, _ = pool_with_a_canary()
    if is_running:
        pool.queue.dispatch({52: CREDIT})
    pool.registry.fail(0, "shut down")
    assert pool.queue.num_waiting() == 0
    assert pool.registry.note_loss(pool.queue.lose(52)) == ""
    assert not pool.queue.has_canary()
