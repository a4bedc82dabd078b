"""Output lengths that the batch registry learns, and their use in costs, engines and coverage."""

import itertools
from dataclasses import astuple

import numpy as np
import pytest

from raybatch.actors.coordinator.learned_lengths import COVERED_SHARES
from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import encode_completions
from raybatch.actors.wire.records import ROW_BITS, Credit, RowGroups, RowRange, Submission
from raybatch.records.types import Completion, RowProgress

PROMPT, BOUND = 10, 1000


def submission(num_rows, *, token="t", client="c", bound=BOUND, samples=1, **known):
    return Submission(
        token=token,
        client=client,
        prompt_tokens=np.full(num_rows, PROMPT, np.int32),
        max_new_tokens=np.full(num_rows, bound * samples, np.int64),
        num_samples=None if samples == 1 else np.full(num_rows, samples, np.int32),
        **known,
    )


def running(batch_id, num_tokens):
    """Return the progress that a replica reports, from token counts by row."""
    ids = np.array(list(num_tokens), np.int64) + (batch_id << ROW_BITS)
    generated = np.array(list(num_tokens.values()), np.int64)
    return RowProgress(request_ids=ids, num_tokens=PROMPT + generated, num_generated=generated)


@pytest.fixture
def registry():
    return BatchRegistry(RowQueue(3), on_drop=lambda *_: None)


def pull(registry, num_rows, replica_id=1):
    """Return batch and row of each row that a replica gets, and the assignments."""
    row_ranges = registry.queue.dispatch({replica_id: Credit(tokens=10**9, rows=num_rows)}).get(
        replica_id
    )
    rows = [(s.batch_id, row) for s in row_ranges or () for row in range(s.start, s.stop)]
    return rows, registry.assign(row_ranges or ())


def end(registry, batch_id, lengths, replica_id=1, *, reason="stop", error=""):
    """End rows with these token counts by row."""
    completions = [
        Completion(request_id=row, finish_reason=reason, num_generated_tokens=length, error=error)
        for row, length in lengths.items()
    ]
    registry.take(replica_id, batch_id, encode_completions(list(lengths), completions))


def taught(registry, lengths, **known):
    """Let a batch of rows end with these lengths."""
    batch = registry.add(submission(len(lengths), token="first", **known))
    pull(registry, len(lengths))
    end(registry, batch.batch_id, dict(enumerate(lengths)))
    return batch


def waiting_cost(registry):
    return registry.queue._waiting.cost_for([])


def test_rows_cost_their_bound_while_nothing_is_known(registry):
    registry.add(submission(3))
    assert waiting_cost(registry) == 3 * (PROMPT + BOUND)


def test_later_rows_cost_as_much_as_finished_ones(registry):
    taught(registry, [20, 40] * 16)
    registry.add(submission(3))
    assert waiting_cost(registry) == 3 * (PROMPT + 30)


def test_each_sample_of_a_row_counts(registry):
    taught(registry, [20, 40] * 16)
    registry.add(submission(3, samples=4))
    assert waiting_cost(registry) == 3 * (PROMPT + 4 * 30)


def test_rows_of_another_client_cost_their_bound(registry):
    taught(registry, [20, 40] * 16)
    registry.add(submission(3, client="d"))
    assert waiting_cost(registry) == 3 * (PROMPT + BOUND)


def test_rows_with_a_plan_cost_what_it_expects(registry):
    taught(registry, [20, 40] * 16)
    registry.add(submission(3, expected_new_tokens=np.array([7, 8, 9])))
    assert waiting_cost(registry) == 3 * PROMPT + 7 + 8 + 9


def test_a_batch_without_rows_is_taken(registry):
    taught(registry, [20] * 32)
    assert registry.add(submission(0, token="u")).done.is_set()


def test_errors_teach_nothing(registry):
    batch = registry.add(submission(40))
    pull(registry, 40)
    end(registry, batch.batch_id, dict.fromkeys(range(40), 1), error="Odd: row", reason="error")
    registry.add(submission(1, token="u"))
    assert waiting_cost(registry) == PROMPT + BOUND


def test_errors_among_good_rows_teach_nothing(registry):
    batch = registry.add(submission(64))
    pull(registry, 64)
    good = [Completion(request_id=row, num_generated_tokens=30) for row in range(32)]
    bad = [
        Completion(request_id=row, num_generated_tokens=1, finish_reason="error", error="Odd: row")
        for row in range(32, 64)
    ]
    registry.take(1, batch.batch_id, encode_completions(range(64), good + bad))
    registry.add(submission(1, token="u"))
    assert waiting_cost(registry) == PROMPT + 30


def test_waiting_rows_are_weighed_again_and_held_ones_keep_their_cost(registry):
    batch = registry.add(submission(100))
    pull(registry, 60)
    end(registry, batch.batch_id, dict.fromkeys(range(32), 30))
    assert waiting_cost(registry) == 40 * (PROMPT + 30)
    assert registry.queue.load(1).cost == 28 * (PROMPT + BOUND)
    registry.queue.give_back(1, [RowRange(batch.batch_id, 50, 60)])
    assert waiting_cost(registry) == 40 * (PROMPT + 30) + 10 * (PROMPT + BOUND)
    end(registry, batch.batch_id, dict.fromkeys(range(32, 50), 30))
    assert (registry.queue.load(1).num_rows, registry.queue.load(1).cost) == (0, 0)


def test_rows_that_are_off_by_little_are_not_weighed_again(registry):
    batch = registry.add(submission(200))
    pull(registry, 100)
    end(registry, batch.batch_id, dict.fromkeys(range(32), 30))
    end(registry, batch.batch_id, dict.fromkeys(range(32, 100), 33))
    assert waiting_cost(registry) == 100 * (PROMPT + 30)


def test_costs_add_up_to_nothing_when_all_rows_are_done(registry):
    random = np.random.default_rng(0)
    groups = RowGroups(
        group_ids=np.repeat([3, -1, 5, 6], 50), prefix_lens=np.repeat([8, 0, 8, 8], 50).astype("i4")
    )
    batch = registry.add(submission(200, groups=groups))
    held = {1: [], 2: []}
    for replica_id, turn in zip(itertools.cycle(held), range(400), strict=False):
        rows, _ = pull(registry, 1 + int(random.integers(20)), replica_id)
        held[replica_id] += [row for _, row in rows]
        if not registry.queue.num_waiting() and not any(held.values()):
            break
        random.shuffle(held[replica_id])
        back = held[replica_id][: 2 * (turn < 20)]
        registry.queue.give_back(
            replica_id, [RowRange(batch.batch_id, r, r + 1) for r in sorted(back)]
        )
        done = held[replica_id][len(back) :][:10]
        held[replica_id] = held[replica_id][len(back) + len(done) :]
        if done:
            end(
                registry, batch.batch_id, {r: int(random.integers(1, 50)) for r in done}, replica_id
            )
    assert registry.queue.is_done(batch.batch_id)
    assert (0, 0, 0) == (
        waiting_cost(registry),
        registry.queue.load(1).cost,
        registry.queue.load(2).cost,
    )


def likely_of(registry, num_rows):
    _, (assignment,) = pull(registry, num_rows)
    likely = assignment.likely
    return None if likely is None else likely.between(0, num_rows)


def test_an_engine_gets_the_lengths_that_the_pool_has_seen(registry):
    taught(registry, [10] * 24 + [30] * 8)
    registry.add(submission(2))
    assert [(10,) * 24 + (30,) * 8] * 2 == likely_of(registry, 2)


def test_an_engine_gets_no_lengths_while_none_are_known(registry):
    registry.add(submission(2))
    assert likely_of(registry, 2) is None


def test_an_engine_gets_no_lengths_of_rows_with_a_plan(registry):
    taught(registry, [10] * 32)
    registry.add(submission(2, expected_new_tokens=np.array([7, BOUND])))
    assert [(), (10,) * 32] == likely_of(registry, 2)


def test_lengths_never_exceed_the_bound_of_the_row(registry):
    taught(registry, [10] * 16 + [90] * 16)
    registry.add(submission(1, bound=50))
    assert {10, 50} == set(likely_of(registry, 1)[0])


def test_a_large_group_has_its_own_lengths(registry):
    groups = RowGroups(group_ids=np.repeat([1, 2], 64), prefix_lens=np.full(128, 8, np.int32))
    batch = registry.add(submission(128, groups=groups))
    pull(registry, 64)
    pull(registry, 64, 2)
    first = registry.queue.rows_left(batch.batch_id)
    end(registry, batch.batch_id, {int(r): 10 for r in first if r < 40}, 1)
    end(registry, batch.batch_id, {int(r): 90 for r in first if 64 <= r < 104}, 2)
    left = registry.lengths.expected_left(batch.batch_id, np.array([50, 120]), np.array([0, 0]))
    assert [10, 90] == left.tolist()


def test_expected_remaining_tokens_follow_from_the_tokens_so_far(registry):
    taught(registry, [10] * 16 + [90] * 16)
    batch = registry.add(submission(4, expected_new_tokens=np.array([BOUND, BOUND, BOUND, 40])))
    now = np.array([0, 10, 89, 5])
    left = registry.lengths.expected_left(batch.batch_id, np.arange(4), now)
    assert [50, 80, 1, 35] == left.tolist()


def quantiles_left(registry, batch, rows, num_tokens, shares):
    left = registry.lengths.expected_left(batch.batch_id, rows, num_tokens)
    return registry.lengths.quantiles_left(batch.batch_id, rows, num_tokens, shares, left)


def test_quantiles_of_remaining_tokens_are_known_with_the_lengths(registry):
    taught(registry, [10] * 16 + [90] * 8 + [200] * 8)
    batch = registry.add(submission(4, expected_new_tokens=np.array([BOUND, BOUND, 40, 40])))
    now, shares = np.array([0, 10, 5, 45]), (0.25, 0.75)
    left = quantiles_left(registry, batch, np.arange(4), now, shares)
    # by finished outputs, by a plan, and by finished outputs again for a row beyond its plan
    assert [[10, 90], [80, 190], [35, 35], [45, 155]] == left.tolist()


def test_at_first_only_the_bound_of_lengths_is_known(registry):
    batch = registry.add(submission(1))
    left = quantiles_left(registry, batch, np.array([0]), np.array([7]), (0.1, 0.9))
    assert [[BOUND - 7] * 2] == left.tolist()


def test_a_row_beyond_its_planned_length_is_expected_to_continue(registry):
    batch = registry.add(submission(1, expected_new_tokens=np.array([40])))
    left = registry.lengths.expected_left(batch.batch_id, np.array([0]), np.array([80]))
    assert [11] == left.tolist()


def test_rows_that_run_are_known_to_be_longer(registry):
    batch = registry.add(submission(64))
    pull(registry, 64)
    rows = np.arange(32, 64)
    registry.note_running(1, running(batch.batch_id, dict.fromkeys(rows.tolist(), 20)))
    end(registry, batch.batch_id, dict.fromkeys(range(32), 10))
    left = registry.lengths.expected_left(batch.batch_id, np.array([40]), np.array([0]))
    # half of them are expected to be twice as long as the longest finished row
    assert [(10 + 2 * 21) / 2] == left.tolist()
    end(registry, batch.batch_id, dict.fromkeys(range(32, 64), 30))
    again = registry.add(submission(1, token="u"))
    left = registry.lengths.expected_left(again.batch_id, np.array([0]), np.array([0]))
    assert [20] == left.tolist()


def test_tokens_of_rows_that_a_replica_does_not_hold_are_not_noted(registry):
    batch = registry.add(submission(64))
    pull(registry, 32)
    registry.note_running(2, running(batch.batch_id, dict.fromkeys(range(32), 500)))
    registry.note_running(1, running(batch.batch_id, dict.fromkeys(range(32, 64), 500)))
    registry.note_running(1, running(99, {0: 500}))
    end(registry, batch.batch_id, dict.fromkeys(range(32), 10))
    assert waiting_cost(registry) == 32 * (PROMPT + 10)


def after_running(registry, *, at_once):
    """Return the remaining tokens of rows of three batches, after half ended and half ran."""
    kinds = [("a", 500), ("a", 4000), ("b", 500)]
    batches = [registry.add(submission(64, client=of, bound=bound)) for of, bound in kinds]
    pull(registry, 3 * 64)
    reported = [
        running(batch.batch_id, {row: 7 + 30 * i + row for row in range(32, 64)})
        for i, batch in enumerate(batches)
    ]
    if at_once:
        names = ("request_ids", "num_tokens", "num_generated")
        joined = {name: np.concatenate([getattr(of, name) for of in reported]) for name in names}
        reported = [RowProgress(**joined)]
    for progress in reported:
        registry.note_running(1, progress)
    for i, batch in enumerate(batches):
        end(registry, batch.batch_id, {row: 10 + 5 * i + row for row in range(32)})
    rows = np.arange(32, 64)
    return [registry.lengths.tokens_so_far(batch.batch_id, rows)[1].tolist() for batch in batches]


def test_rows_of_several_batches_are_learnt_as_if_reported_one_by_one(registry, monkeypatch):
    other = BatchRegistry(RowQueue(3), on_drop=lambda *_: None)
    expected, clients = after_running(other, at_once=False), []
    model, note = registry.lengths.model, registry.lengths.model.note_running

    def counting(rows, before, now):
        clients.append(rows.client)
        note(rows, before, now)

    monkeypatch.setattr(model, "note_running", counting)
    assert expected == after_running(registry, at_once=True)
    assert ["a", "b"] == clients


def test_rows_of_a_dropped_batch_do_not_count_as_running(registry):
    batch = registry.add(submission(64))
    pull(registry, 64)
    registry.note_running(1, running(batch.batch_id, dict.fromkeys(range(64), 500)))
    registry.drop(batch)
    registry.queue.note_aborted(1, batch.batch_id)
    taught(registry, [10] * 32)
    registry.add(submission(1))
    assert waiting_cost(registry) == PROMPT + 10


def w4(random, num_rows):
    """A long tail."""
    lengths = random.lognormal(np.log(6), 1.95, num_rows)
    return np.minimum(lengths, 9.2 * np.quantile(lengths, 0.95))


def w7(random, num_rows):
    """A distribution that a bound cuts off."""
    return random.lognormal(2.7, 0.8, num_rows)


def run_rows(registry, lengths, bound, *, slots=32, rows_per_batch=500, running_every=10):
    """Run rows at two replicas with `slots` slots each; each running row gets a token per step."""
    left = {}
    for first in range(0, len(lengths), rows_per_batch):
        part = lengths[first : first + rows_per_batch]
        batch = registry.add(submission(len(part), token=f"{len(registry)}", bound=bound))
        left |= {(batch.batch_id, row): int(length) for row, length in enumerate(part)}
    runs = {1: {}, 2: {}}
    for step in itertools.count(1):
        for replica_id, rows in runs.items():
            if len(rows) < slots:
                rows |= dict.fromkeys(pull(registry, slots - len(rows), replica_id)[0], 0)
            for place in rows:
                rows[place] += 1
            ended = {place for place, num_tokens in rows.items() if left[place] == num_tokens}
            for is_cut, reason in ((True, "length"), (False, "stop")):
                of_reason = {place for place in ended if (left[place] == bound) == is_cut}
                for batch_id, of_batch in by_batch({p: rows[p] for p in of_reason}).items():
                    end(registry, batch_id, of_batch, replica_id, reason=reason)
            runs[replica_id] = {p: n for p, n in rows.items() if p not in ended}
            if step % running_every == 0:
                for batch_id, of_batch in by_batch(runs[replica_id]).items():
                    registry.note_running(replica_id, running(batch_id, of_batch))
        if not any(runs.values()) and not registry.queue.num_waiting():
            return


def by_batch(rows):
    of_batch = {}
    for (batch_id, row), num_tokens in rows.items():
        of_batch.setdefault(batch_id, {})[row] = num_tokens
    return of_batch


def covered(registry):
    coverage = registry.clients["c"].coverage
    return np.array([coverage.num_below, coverage.num_at_most]), coverage.num_rows


@pytest.mark.parametrize(("draw", "bound"), [(w4, 4096), (w7, 128)])
def test_quantiles_hold_for_their_share_of_rows(registry, draw, bound):
    random = np.random.default_rng(0)
    lengths = np.clip(np.rint(draw(random, 3000)), 1, bound).astype(int)
    run_rows(registry, lengths[:1000], bound)
    before, num_before = covered(registry)
    run_rows(registry, lengths[1000:], bound)
    counts, num_rows = covered(registry)
    assert num_rows - num_before == 2000
    below, at_most = (counts - before) / 2000
    # outputs of exactly the predicted length may be on either side
    assert (below < np.array(COVERED_SHARES) + 0.03).all()
    assert (at_most > np.array(COVERED_SHARES) - 0.03).all()


def test_rows_that_run_keep_the_first_predictions_from_being_short(registry):
    lengths = np.clip(np.rint(w4(np.random.default_rng(0), 1000)), 1, 4096).astype(int)
    run_rows(registry, lengths, 4096, running_every=1)
    untold = BatchRegistry(RowQueue(3), on_drop=lambda *_: None)
    run_rows(untold, lengths, 4096, running_every=10**9)
    shares = [counts[1, 2] / num_rows for counts, num_rows in map(covered, (registry, untold))]
    assert shares[0] > shares[1] + 0.05
    assert abs(shares[0] - 0.9) < 0.03


def test_coverage_is_in_the_stats_of_the_client(registry):
    taught(registry, [10] * 32)
    assert registry.clients["c"].stats(now=0.0).length_coverage == ()
    batch = registry.add(submission(4))
    pull(registry, 4)
    end(registry, batch.batch_id, {0: 9, 1: 10, 2: 11, 3: 12})
    reported = registry.clients["c"].stats(now=0.0).length_coverage
    assert [(share, 4, 1, 2) for share in COVERED_SHARES] == [astuple(one) for one in reported]


def test_a_row_that_is_handed_out_again_keeps_its_prediction(registry):
    taught(registry, [10] * 32)
    batch = registry.add(submission(1, token="a"))
    pull(registry, 1)
    taught(registry, [90] * 320)
    registry.queue.give_back(1, [RowRange(batch.batch_id, 0, 1)])
    assert [(batch.batch_id, 0)] == pull(registry, 1)[0]
    before = covered(registry)[0]
    end(registry, batch.batch_id, {0: 50})
    # it is longer than the first prediction, which was 10, and shorter than the second one
    assert (covered(registry)[0] == before).all()
