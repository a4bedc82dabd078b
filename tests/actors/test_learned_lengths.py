"""What the mailbox learns of output lengths, and where it goes: costs, engines, coverage."""

import itertools
from dataclasses import astuple

import numpy as np
import pytest

from raybatch.actors.coordinator.learned_lengths import COVERED_SHARES
from raybatch.actors.coordinator.mailbox import Mailbox
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import encode_completions
from raybatch.actors.wire.records import ROW_BITS, Room, RowGroups, Span, Submission
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
    """Return what a replica tells of rows that it runs, given by row."""
    ids = np.array(list(num_tokens), np.int64) + (batch_id << ROW_BITS)
    generated = np.array(list(num_tokens.values()), np.int64)
    return RowProgress(request_ids=ids, num_tokens=PROMPT + generated, num_generated=generated)


@pytest.fixture
def mailbox():
    return Mailbox(RowQueue(3), on_drop=lambda *_: None)


def pull(mailbox, num_rows, replica_id=1):
    """Return batch and row of what a replica gets, with the assignments."""
    spans = mailbox.queue.dispatch({replica_id: Room(tokens=10**9, rows=num_rows)}).get(replica_id)
    rows = [(s.batch_id, row) for s in spans or () for row in range(s.start, s.stop)]
    return rows, mailbox.assign(spans or ())


def end(mailbox, batch_id, lengths, replica_id=1, *, reason="stop", error=""):
    """End rows with these numbers of tokens, given by row."""
    completions = [
        Completion(request_id=row, finish_reason=reason, num_generated_tokens=length, error=error)
        for row, length in lengths.items()
    ]
    mailbox.take(replica_id, batch_id, encode_completions(list(lengths), completions))


def taught(mailbox, lengths, **known):
    """Let a batch of rows end with these lengths."""
    batch = mailbox.add(submission(len(lengths), token="first", **known))
    pull(mailbox, len(lengths))
    end(mailbox, batch.batch_id, dict(enumerate(lengths)))
    return batch


def waiting_cost(mailbox):
    return mailbox.queue._line.cost_for([])


def test_rows_cost_their_bound_while_nothing_is_known(mailbox):
    mailbox.add(submission(3))
    assert waiting_cost(mailbox) == 3 * (PROMPT + BOUND)


def test_later_rows_cost_what_earlier_ones_have_come_to(mailbox):
    taught(mailbox, [20, 40] * 16)
    mailbox.add(submission(3))
    assert waiting_cost(mailbox) == 3 * (PROMPT + 30)


def test_each_sample_of_a_row_counts(mailbox):
    taught(mailbox, [20, 40] * 16)
    mailbox.add(submission(3, samples=4))
    assert waiting_cost(mailbox) == 3 * (PROMPT + 4 * 30)


def test_rows_of_another_client_cost_their_bound(mailbox):
    taught(mailbox, [20, 40] * 16)
    mailbox.add(submission(3, client="d"))
    assert waiting_cost(mailbox) == 3 * (PROMPT + BOUND)


def test_rows_with_a_plan_cost_what_it_expects(mailbox):
    taught(mailbox, [20, 40] * 16)
    mailbox.add(submission(3, expected_new_tokens=np.array([7, 8, 9])))
    assert waiting_cost(mailbox) == 3 * PROMPT + 7 + 8 + 9


def test_a_batch_without_rows_is_taken(mailbox):
    taught(mailbox, [20] * 32)
    assert mailbox.add(submission(0, token="u")).done.is_set()


def test_errors_teach_nothing(mailbox):
    batch = mailbox.add(submission(40))
    pull(mailbox, 40)
    end(mailbox, batch.batch_id, dict.fromkeys(range(40), 1), error="Odd: row", reason="error")
    mailbox.add(submission(1, token="u"))
    assert waiting_cost(mailbox) == PROMPT + BOUND


def test_errors_among_good_rows_teach_nothing(mailbox):
    batch = mailbox.add(submission(64))
    pull(mailbox, 64)
    good = [Completion(request_id=row, num_generated_tokens=30) for row in range(32)]
    bad = [
        Completion(request_id=row, num_generated_tokens=1, finish_reason="error", error="Odd: row")
        for row in range(32, 64)
    ]
    mailbox.take(1, batch.batch_id, encode_completions(range(64), good + bad))
    mailbox.add(submission(1, token="u"))
    assert waiting_cost(mailbox) == PROMPT + 30


def test_waiting_rows_are_weighed_anew_and_held_ones_keep_their_cost(mailbox):
    batch = mailbox.add(submission(100))
    pull(mailbox, 60)
    end(mailbox, batch.batch_id, dict.fromkeys(range(32), 30))
    assert waiting_cost(mailbox) == 40 * (PROMPT + 30)
    assert mailbox.queue.load(1).cost == 28 * (PROMPT + BOUND)
    mailbox.queue.give_back(1, [Span(batch.batch_id, 50, 60)])
    assert waiting_cost(mailbox) == 40 * (PROMPT + 30) + 10 * (PROMPT + BOUND)
    end(mailbox, batch.batch_id, dict.fromkeys(range(32, 50), 30))
    assert (mailbox.queue.load(1).num_rows, mailbox.queue.load(1).cost) == (0, 0)


def test_rows_that_are_off_by_little_are_not_weighed_anew(mailbox):
    batch = mailbox.add(submission(200))
    pull(mailbox, 100)
    end(mailbox, batch.batch_id, dict.fromkeys(range(32), 30))
    end(mailbox, batch.batch_id, dict.fromkeys(range(32, 100), 33))
    assert waiting_cost(mailbox) == 100 * (PROMPT + 30)


def test_costs_add_up_to_nothing_when_all_rows_are_done(mailbox):
    random = np.random.default_rng(0)
    groups = RowGroups(
        group_ids=np.repeat([3, -1, 5, 6], 50), prefix_lens=np.repeat([8, 0, 8, 8], 50).astype("i4")
    )
    batch = mailbox.add(submission(200, groups=groups))
    held = {1: [], 2: []}
    for replica_id, turn in zip(itertools.cycle(held), range(400), strict=False):
        rows, _ = pull(mailbox, 1 + int(random.integers(20)), replica_id)
        held[replica_id] += [row for _, row in rows]
        if not mailbox.queue.num_waiting() and not any(held.values()):
            break
        random.shuffle(held[replica_id])
        back = held[replica_id][: 2 * (turn < 20)]
        mailbox.queue.give_back(replica_id, [Span(batch.batch_id, r, r + 1) for r in sorted(back)])
        done = held[replica_id][len(back) :][:10]
        held[replica_id] = held[replica_id][len(back) + len(done) :]
        if done:
            end(mailbox, batch.batch_id, {r: int(random.integers(1, 50)) for r in done}, replica_id)
    assert mailbox.queue.is_done(batch.batch_id)
    assert (0, 0, 0) == (
        waiting_cost(mailbox),
        mailbox.queue.load(1).cost,
        mailbox.queue.load(2).cost,
    )


def likely_of(mailbox, num_rows):
    _, (assignment,) = pull(mailbox, num_rows)
    likely = assignment.likely
    return None if likely is None else likely.between(0, num_rows)


def test_an_engine_gets_the_lengths_that_the_pool_has_seen(mailbox):
    taught(mailbox, [10] * 24 + [30] * 8)
    mailbox.add(submission(2))
    assert [(10,) * 24 + (30,) * 8] * 2 == likely_of(mailbox, 2)


def test_an_engine_gets_no_lengths_while_none_are_known(mailbox):
    mailbox.add(submission(2))
    assert likely_of(mailbox, 2) is None


def test_an_engine_gets_no_lengths_of_rows_with_a_plan(mailbox):
    taught(mailbox, [10] * 32)
    mailbox.add(submission(2, expected_new_tokens=np.array([7, BOUND])))
    assert [(), (10,) * 32] == likely_of(mailbox, 2)


def test_lengths_never_exceed_the_bound_of_the_row(mailbox):
    taught(mailbox, [10] * 16 + [90] * 16)
    mailbox.add(submission(1, bound=50))
    assert {10, 50} == set(likely_of(mailbox, 1)[0])


def test_a_large_group_has_lengths_of_its_own(mailbox):
    groups = RowGroups(group_ids=np.repeat([1, 2], 64), prefix_lens=np.full(128, 8, np.int32))
    batch = mailbox.add(submission(128, groups=groups))
    pull(mailbox, 64)
    pull(mailbox, 64, 2)
    first = mailbox.queue.rows_left(batch.batch_id)
    end(mailbox, batch.batch_id, {int(r): 10 for r in first if r < 40}, 1)
    end(mailbox, batch.batch_id, {int(r): 90 for r in first if 64 <= r < 104}, 2)
    left = mailbox.lengths.expected_left(batch.batch_id, np.array([50, 120]), np.array([0, 0]))
    assert [10, 90] == left.tolist()


def test_what_is_left_follows_from_the_tokens_so_far(mailbox):
    taught(mailbox, [10] * 16 + [90] * 16)
    batch = mailbox.add(submission(4, expected_new_tokens=np.array([BOUND, BOUND, BOUND, 40])))
    now = np.array([0, 10, 89, 5])
    left = mailbox.lengths.expected_left(batch.batch_id, np.arange(4), now)
    assert [50, 80, 1, 35] == left.tolist()


def test_what_shares_of_rows_have_left_is_known_with_their_lengths(mailbox):
    taught(mailbox, [10] * 16 + [90] * 8 + [200] * 8)
    batch = mailbox.add(submission(4, expected_new_tokens=np.array([BOUND, BOUND, 40, 40])))
    now, shares = np.array([0, 10, 5, 45]), (0.25, 0.75)
    left = mailbox.lengths.quantiles_left(batch.batch_id, np.arange(4), now, shares)
    # by the outputs so far, by a plan, and by the outputs again once a plan is outgrown
    assert [[10, 90], [80, 190], [35, 35], [45, 155]] == left.tolist()


def test_nothing_but_the_bound_is_known_of_lengths_at_first(mailbox):
    batch = mailbox.add(submission(1))
    left = mailbox.lengths.quantiles_left(batch.batch_id, np.array([0]), np.array([7]), (0.1, 0.9))
    assert [[BOUND - 7] * 2] == left.tolist()


def test_a_row_that_outgrew_its_plan_is_taken_to_go_on_for_a_while(mailbox):
    batch = mailbox.add(submission(1, expected_new_tokens=np.array([40])))
    left = mailbox.lengths.expected_left(batch.batch_id, np.array([0]), np.array([80]))
    assert [11] == left.tolist()


def test_rows_that_run_are_known_to_be_longer(mailbox):
    batch = mailbox.add(submission(64))
    pull(mailbox, 64)
    rows = np.arange(32, 64)
    mailbox.note_running(1, running(batch.batch_id, dict.fromkeys(rows.tolist(), 20)))
    end(mailbox, batch.batch_id, dict.fromkeys(range(32), 10))
    left = mailbox.lengths.expected_left(batch.batch_id, np.array([40]), np.array([0]))
    # half of them is taken for twice as long as the longest that was seen
    assert [(10 + 2 * 21) / 2] == left.tolist()
    end(mailbox, batch.batch_id, dict.fromkeys(range(32, 64), 30))
    again = mailbox.add(submission(1, token="u"))
    left = mailbox.lengths.expected_left(again.batch_id, np.array([0]), np.array([0]))
    assert [20] == left.tolist()


def test_tokens_of_rows_that_a_replica_does_not_hold_are_not_noted(mailbox):
    batch = mailbox.add(submission(64))
    pull(mailbox, 32)
    mailbox.note_running(2, running(batch.batch_id, dict.fromkeys(range(32), 500)))
    mailbox.note_running(1, running(batch.batch_id, dict.fromkeys(range(32, 64), 500)))
    mailbox.note_running(1, running(99, {0: 500}))
    end(mailbox, batch.batch_id, dict.fromkeys(range(32), 10))
    assert waiting_cost(mailbox) == 32 * (PROMPT + 10)


def after_running(mailbox, *, at_once):
    """Return what rows of three batches have to come, once a half has ended and a half has run."""
    kinds = [("a", 500), ("a", 4000), ("b", 500)]
    batches = [mailbox.add(submission(64, client=of, bound=bound)) for of, bound in kinds]
    pull(mailbox, 3 * 64)
    told = [
        running(batch.batch_id, {row: 7 + 30 * i + row for row in range(32, 64)})
        for i, batch in enumerate(batches)
    ]
    if at_once:
        names = ("request_ids", "num_tokens", "num_generated")
        joined = {name: np.concatenate([getattr(of, name) for of in told]) for name in names}
        told = [RowProgress(**joined)]
    for progress in told:
        mailbox.note_running(1, progress)
    for i, batch in enumerate(batches):
        end(mailbox, batch.batch_id, {row: 10 + 5 * i + row for row in range(32)})
    rows = np.arange(32, 64)
    return [mailbox.lengths.so_far(batch.batch_id, rows)[1].tolist() for batch in batches]


def test_rows_of_several_batches_are_learnt_as_if_told_one_by_one(mailbox, monkeypatch):
    other = Mailbox(RowQueue(3), on_drop=lambda *_: None)
    expected, clients = after_running(other, at_once=False), []
    model, note = mailbox.lengths.model, mailbox.lengths.model.note_running

    def counting(rows, before, now):
        clients.append(rows.client)
        note(rows, before, now)

    monkeypatch.setattr(model, "note_running", counting)
    assert expected == after_running(mailbox, at_once=True)
    assert ["a", "b"] == clients


def test_rows_of_a_dropped_batch_do_not_count_as_running(mailbox):
    batch = mailbox.add(submission(64))
    pull(mailbox, 64)
    mailbox.note_running(1, running(batch.batch_id, dict.fromkeys(range(64), 500)))
    mailbox.drop(batch)
    mailbox.queue.note_aborted(1, batch.batch_id)
    taught(mailbox, [10] * 32)
    mailbox.add(submission(1))
    assert waiting_cost(mailbox) == PROMPT + 10


def w4(random, num_rows):
    """A long tail."""
    lengths = random.lognormal(np.log(6), 1.95, num_rows)
    return np.minimum(lengths, 9.2 * np.quantile(lengths, 0.95))


def w7(random, num_rows):
    """A spread that a bound cuts off."""
    return random.lognormal(2.7, 0.8, num_rows)


def run_rows(mailbox, lengths, bound, *, slots=32, rows_per_batch=500, running_every=10):
    """Run rows at two replicas with so many slots each, a token a step for each row that runs."""
    left = {}
    for first in range(0, len(lengths), rows_per_batch):
        part = lengths[first : first + rows_per_batch]
        batch = mailbox.add(submission(len(part), token=f"{len(mailbox)}", bound=bound))
        left |= {(batch.batch_id, row): int(length) for row, length in enumerate(part)}
    runs = {1: {}, 2: {}}
    for step in itertools.count(1):
        for replica_id, rows in runs.items():
            if len(rows) < slots:
                rows |= dict.fromkeys(pull(mailbox, slots - len(rows), replica_id)[0], 0)
            for place in rows:
                rows[place] += 1
            ended = {place for place, num_tokens in rows.items() if left[place] == num_tokens}
            for is_cut, reason in ((True, "length"), (False, "stop")):
                of_reason = {place for place in ended if (left[place] == bound) == is_cut}
                for batch_id, of_batch in by_batch({p: rows[p] for p in of_reason}).items():
                    end(mailbox, batch_id, of_batch, replica_id, reason=reason)
            runs[replica_id] = {p: n for p, n in rows.items() if p not in ended}
            if step % running_every == 0:
                for batch_id, of_batch in by_batch(runs[replica_id]).items():
                    mailbox.note_running(replica_id, running(batch_id, of_batch))
        if not any(runs.values()) and not mailbox.queue.num_waiting():
            return


def by_batch(rows):
    of_batch = {}
    for (batch_id, row), num_tokens in rows.items():
        of_batch.setdefault(batch_id, {})[row] = num_tokens
    return of_batch


def covered(mailbox):
    coverage = mailbox.clients["c"].coverage
    return np.array([coverage.num_below, coverage.num_at_most]), coverage.num_rows


@pytest.mark.parametrize(("draw", "bound"), [(w4, 4096), (w7, 128)])
def test_quantiles_hold_for_the_share_of_rows_that_they_say(mailbox, draw, bound):
    random = np.random.default_rng(0)
    lengths = np.clip(np.rint(draw(random, 3000)), 1, bound).astype(int)
    run_rows(mailbox, lengths[:1000], bound)
    before, num_before = covered(mailbox)
    run_rows(mailbox, lengths[1000:], bound)
    counts, num_rows = covered(mailbox)
    assert num_rows - num_before == 2000
    below, at_most = (counts - before) / 2000
    # outputs of just the predicted length may be on either side
    assert (below < np.array(COVERED_SHARES) + 0.03).all()
    assert (at_most > np.array(COVERED_SHARES) - 0.03).all()


def test_rows_that_run_keep_the_first_predictions_from_being_short(mailbox):
    lengths = np.clip(np.rint(w4(np.random.default_rng(0), 1000)), 1, 4096).astype(int)
    run_rows(mailbox, lengths, 4096, running_every=1)
    untold = Mailbox(RowQueue(3), on_drop=lambda *_: None)
    run_rows(untold, lengths, 4096, running_every=10**9)
    shares = [counts[1, 2] / num_rows for counts, num_rows in map(covered, (mailbox, untold))]
    assert shares[0] > shares[1] + 0.05
    assert abs(shares[0] - 0.9) < 0.03


def test_coverage_is_in_the_stats_of_the_client(mailbox):
    taught(mailbox, [10] * 32)
    assert mailbox.clients["c"].stats(now=0.0).length_coverage == ()
    batch = mailbox.add(submission(4))
    pull(mailbox, 4)
    end(mailbox, batch.batch_id, {0: 9, 1: 10, 2: 11, 3: 12})
    told = mailbox.clients["c"].stats(now=0.0).length_coverage
    assert [(share, 4, 1, 2) for share in COVERED_SHARES] == [astuple(one) for one in told]


def test_a_row_that_is_handed_out_again_keeps_its_prediction(mailbox):
    taught(mailbox, [10] * 32)
    batch = mailbox.add(submission(1, token="a"))
    pull(mailbox, 1)
    taught(mailbox, [90] * 320)
    mailbox.queue.give_back(1, [Span(batch.batch_id, 0, 1)])
    assert [(batch.batch_id, 0)] == pull(mailbox, 1)[0]
    before = covered(mailbox)[0]
    end(mailbox, batch.batch_id, {0: 50})
    # it is longer than the first prediction, which was 10, and shorter than the second one
    assert (covered(mailbox)[0] == before).all()
