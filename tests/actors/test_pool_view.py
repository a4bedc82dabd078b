"""The state of replicas that the coordinator keeps between two plans."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.wire.records import ROW_BITS, Credit, Progress, Submission
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import RowMove
from raybatch.policy.pool.spread import MAX_MOVES
from raybatch.records.types import Capacity, ReplicaStats, RowProgress
from tests.actors.queues import AMPLE, held_rows, queue_of

# rows that a replica holds, rows that it reports as waiting in its engine, whether it requests more
REPLICAS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=6)


@given(REPLICAS)
def test_where_a_glance_finds_nothing_to_steal_no_plan_would(replicas):
    queue = queue_of(sum(num_held for num_held, _, _ in replicas))
    view, members, pulling = PoolView(queue, LearnedLengths()), [], []
    for replica_id, (num_held, num_waiting, is_pulling) in enumerate(replicas):
        if num_held:
            queue.dispatch({replica_id: Credit(tokens=10 * num_held, rows=num_held)})
        stats = ReplicaStats(num_waiting=num_waiting)
        view.note_report(replica_id, stats, None)
        members.append(SimpleNamespace(replica_id=replica_id, is_ready=True, stats=stats))
        pulling += [replica_id] * is_pulling
    steal = plan_pool(view.snapshot(members, pulling, with_rows=False)).steal
    assert steal is None or view.may_steal(pulling)
    assert not view.may_steal(r for r in pulling if replicas[r][0])


class CountingLengths(LearnedLengths):
    """Counts its calls."""

    num_requested = 0

    def expected_left(self, batch_id, rows, num_tokens):
        self.num_requested += 1
        return super().expected_left(batch_id, rows, num_tokens)


def reported(ids):
    """Return the progress of a replica whose n-th row has n tokens."""
    num_generated = np.arange(1, len(ids) + 1)
    rows = RowProgress(
        request_ids=np.array(ids, "i8"), num_tokens=10 + num_generated, num_generated=num_generated
    )
    capacity = Capacity(kv_tokens=10_000, max_model_len=100, max_num_seqs=9, block_size=16)
    return Progress(rows=rows, capacity=capacity)


def test_rows_of_a_batch_are_looked_at_together_wherever_they_run():
    queue, lengths, held = queue_of(8, 8, 8), CountingLengths(), {r: [] for r in range(4)}
    for batch_id in range(3):
        prompts, bounds = np.full(8, 10, np.int32), np.arange(20, 28)
        lengths.open(
            batch_id, Submission(token="", client="c", prompt_tokens=prompts, max_new_tokens=bounds)
        )
    for turn in range(24):
        for replica_id, row_ranges in queue.dispatch({turn % 4: Credit(tokens=10, rows=1)}).items():
            held[replica_id] += held_rows(row_ranges)
    view = PoolView(queue, lengths)
    members = [
        SimpleNamespace(replica_id=r, is_ready=True, is_tp_driver=False, stats=ReplicaStats())
        for r in held
    ]
    for member in members:
        member.host_id = "host"
        # the last row of each is reported by the next replica, which does not have it
        ids = [batch_id << ROW_BITS | row for batch_id, row in held[member.replica_id][:-1]]
        ids += [b << ROW_BITS | row for b, row in held[(member.replica_id + 1) % 4][-1:]]
        view.note_report(member.replica_id, ReplicaStats(), reported(ids))
    found = view.snapshot(members, (), with_rows=True)
    assert lengths.num_requested == 3
    for replica in found.replicas:
        its = held[replica.replica_id][:-1]
        assert [b << ROW_BITS | row for b, row in its] == replica.rows.ids.tolist()
        left = [20 + row - num_tokens for num_tokens, (_, row) in enumerate(its, 1)]
        assert left == replica.rows.left.tolist()
        assert [left] == np.unique(replica.rows.quantiles.T, axis=0).tolist()


def pool_of(num_rows):
    """Return a queue whose rows replica 0 runs, and a view with three more idle replicas."""
    queue, lengths = queue_of(num_rows), LearnedLengths()
    prompts, bounds = np.full(num_rows, 10, np.int32), np.full(num_rows, 30)
    lengths.open(0, Submission(token="", client="c", prompt_tokens=prompts, max_new_tokens=bounds))
    queue.dispatch({0: AMPLE})
    view = PoolView(queue, lengths)
    for replica_id in range(4):
        view.note_report(replica_id, ReplicaStats(), reported(range(0 if replica_id else num_rows)))
    return queue, view


def seen(view):
    members = [
        SimpleNamespace(
            replica_id=r, is_ready=True, is_tp_driver=False, stats=ReplicaStats(), host_id=""
        )
        for r in range(4)
    ]
    return view.snapshot(members, (), with_rows=True).replicas


def test_a_copy_is_a_row_of_the_replica_that_has_it_and_of_its_owner():
    queue, view = pool_of(2)
    assert queue.copies.begin(1, 0)
    for replica_id, ids in ((1, [0, 1]), (2, [0, 1])):
        view.note_report(replica_id, ReplicaStats(), reported(ids))
    rows = [replica.rows for replica in seen(view)]
    assert [r.ids.tolist() for r in rows] == [[0, 1], [0], [], []]
    assert [r.left.tolist() for r in rows] == [[29, 28], [29], [], []]
    # neither of the two is planned to move
    assert [r.can_move.tolist() for r in rows] == [[False, True], [False], [], []]


def test_a_move_under_way_counts_at_both_ends_and_its_tokens_at_the_target():
    queue, view = pool_of(MAX_MOVES + 1)
    for row in range(MAX_MOVES):
        move = RowMove(row, 0, 1, with_kv=True)
        assert view.may_begin(move)
        assert queue.begin_move(0, 0, row)
        view.begin_move(move, seen(view)[0].rows)
    assert [view.num_moves(r) for r in range(4)] == [MAX_MOVES, MAX_MOVES, 0, 0]
    ends = [(0, 2), (2, 0), (1, 2), (2, 1), (2, 3)]
    may_begin = [view.may_begin(RowMove(MAX_MOVES, *each, with_kv=True)) for each in ends]
    assert may_begin == [False, False, False, False, True]
    source, target, *_ = seen(view)
    assert (source.num_moves, target.num_moves) == (MAX_MOVES, MAX_MOVES)
    assert source.rows.ids.tolist() == [MAX_MOVES]
    assert target.rows.ids.tolist() == list(range(MAX_MOVES))
    assert target.rows.tokens.tolist() == [11 + row for row in range(MAX_MOVES)]
    assert target.free_kv_tokens == 10_000 - sum(11 + row for row in range(MAX_MOVES))
    assert target.free_seqs == 9 - MAX_MOVES


def test_a_row_that_came_and_moves_on_counts_where_it_goes():
    queue, view = pool_of(1)
    there, on = RowMove(0, 0, 1, with_kv=True), RowMove(0, 1, 2, with_kv=True)
    queue.begin_move(0, 0, 0)
    view.begin_move(there, seen(view)[0].rows)
    queue.commit_move(0, 1, 0, 0, with_kv=True)
    view.end_move(there, has_moved=True)
    # its target has not reported it yet
    assert [r.rows.ids.tolist() for r in seen(view)] == [[], [0], [], []]
    queue.begin_move(1, 0, 0)
    view.begin_move(on, seen(view)[1].rows)
    assert [r.rows.ids.tolist() for r in seen(view)] == [[], [], [0], []]
    assert [r.free_kv_tokens for r in seen(view)] == [10_000, 10_000, 10_000 - 11, 10_000]
