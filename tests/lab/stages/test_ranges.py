"""Rows that wait for the replicas of their range: who gets which, and none is lost."""

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Credit
from raybatch_lab.stages import ranges
from raybatch_lab.stages.plan import Stage, StagePlan
from raybatch_lab.stages.ranges import Ranges, lengths_of
from tests.actors.queues import AMPLE, groups_of

FEW = Credit(tokens=10**9, rows=2)


def plan_of(*bounds, counts=None):
    ends = [0, *bounds, 1 << 20]
    counts = counts or [1] * (len(ends) - 1)
    stages = [
        Stage(above=a, up_to=b, num_replicas=n)
        for a, b, n in zip(ends, ends[1:], counts, strict=False)
    ]
    return StagePlan(stages=tuple(stages), seconds=1.0)


class World:
    """A queue with stages, whose replicas and starts a test decides."""

    def __init__(self, *replica_ids, plan=None):
        self.queue, self.able, self.is_expected = RowQueue(9), list(replica_ids), False
        self.num_slots = 100
        self.ranges = Ranges(
            decide=lambda line: None,
            able=lambda: self.able,
            load_of=self.queue.load,
            speed_of=lambda _: 1.0,
            is_expected=lambda: self.is_expected,
            slots_of=lambda _: self.num_slots,
        )
        self.queue.reserve(self.ranges)
        if plan is not None:
            self.ranges.begin(plan)

    def dispatch(self, *replica_ids, credit=AMPLE):
        """Return the rows of the batch 0 that each of these replicas gets."""
        spans = self.queue.dispatch(dict.fromkeys(replica_ids, credit))
        return {
            r: sorted(i for s in spans.get(r, []) for i in range(s.start, s.stop))
            for r in replica_ids
        }


def test_rows_go_to_the_stage_in_which_they_make_most_of_their_tokens():
    world = World(1, 2, plan=plan_of(100))
    # ends within, begins within and makes most tokens behind, begins behind, makes most within
    world.queue.add(0, [10, 90, 150, 60], [50, 90, 5, 70])
    assert world.dispatch(1, 2) == {1: [0, 3], 2: [1, 2]}


def test_a_replica_with_rows_leaves_those_of_another_stage_and_an_idle_one_takes_them():
    world = World(1, 2, plan=plan_of(100))
    world.queue.add(0, [10] * 9 + [200], [10] * 10)
    assert world.dispatch(1, 2, credit=FEW) == {1: [0, 1], 2: [9]}
    assert world.dispatch(2) == {2: []}
    assert world.queue.has_waiting()
    world.queue.finish(2, 0, [9])
    assert world.dispatch(2, credit=FEW) == {2: [2, 3]}


def test_rows_of_a_stage_are_dealt_to_its_replicas_by_what_they_have():
    world = World(1, 2, 3, plan=plan_of(100, counts=[2, 1]))
    world.queue.add(0, [10] * 8 + [200], [10] * 9)
    assert world.dispatch(1, 2, 3) == {1: [0, 2, 4, 6], 2: [1, 3, 5, 7], 3: [8]}


def test_rows_wait_for_a_replica_that_is_about_to_start_and_others_are_kept_busy_without_them():
    world = World(1, plan=plan_of(100))
    world.is_expected = True
    world.queue.add(0, [10, 200, 10, 200], [10] * 4)
    assert world.dispatch(1) == {1: [0, 2]}
    assert world.dispatch(1) == {1: []}
    world.able.append(2)
    assert world.dispatch(1, 2) == {1: [], 2: [1, 3]}


def test_one_that_has_nothing_does_not_wait_for_a_replica_that_starts():
    world = World(1, plan=plan_of(100))
    world.is_expected = True
    world.queue.add(0, [200] * 4, [10] * 4)
    assert world.dispatch(1) == {1: [0, 1, 2, 3]}


def test_rows_that_waited_for_a_start_that_fails_go_to_another_stage():
    world = World(1, plan=plan_of(100))
    world.is_expected = True
    world.queue.add(0, [10, 200, 10, 200], [10] * 4)
    assert world.dispatch(1) == {1: [0, 2]}
    world.is_expected = False
    assert world.dispatch(1) == {1: [1, 3]}


def test_the_first_of_two_that_ask_leaves_the_rows_of_the_other():
    world = World(1, 2, plan=plan_of(100))
    world.queue.add(0, [10] * 4 + [200], [10] * 5)
    assert world.dispatch(2) == {2: [4]}
    world.queue.finish(2, 0, [4])
    assert world.dispatch(2) == {2: []}
    assert world.dispatch(1) == {1: [0, 1, 2, 3]}


def test_rows_of_a_stage_that_nobody_will_have_go_to_the_nearest_one():
    world = World(1, plan=plan_of(100))
    world.queue.add(0, [10, 200, 10, 200], [10] * 4)
    assert world.dispatch(1) == {1: [0, 1, 2, 3]}


def test_members_of_a_group_stay_together_in_the_stage_of_most():
    world = World(1, 2, plan=plan_of(100))
    groups = groups_of([5, 5, 5, None], 8)
    world.queue.add(0, [20, 30, 300, 10], [10] * 4, groups=groups)
    assert world.dispatch(1, 2) == {1: [0, 1, 2, 3], 2: []}


def test_bounds_that_have_moved_sort_anew_what_waits():
    world = World(1, 2, plan=plan_of(100))
    world.queue.add(0, [10] * 4 + [60] * 4, [10] * 8)
    assert world.dispatch(1, credit=FEW) == {1: [0, 1]}
    world.ranges.bounds = np.array([50.0])
    assert world.dispatch(1, 2) == {1: [2, 3], 2: [4, 5, 6, 7]}


@pytest.mark.parametrize(
    ("num_slots", "expected"), [(None, 1), (1, 1), (2, 1), (4, 3), (8, 6), (16, 13)]
)
def test_a_replica_that_rows_grow_into_keeps_slots_free_and_one_of_the_first_stage_none(
    num_slots, expected
):
    world = World(1, 2, plan=plan_of(100))
    world.num_slots = num_slots
    world.queue.add(0, [10] * 30 + [200] * 30, [10] * 60)
    found = world.dispatch(1, 2)
    assert (30, expected) == (len(found[1]), len(found[2]))
    assert world.dispatch(2) == {2: []}
    world.queue.finish(2, 0, found[2][:1])
    assert len(world.dispatch(2)[2]) == 1


def test_without_stages_any_replica_takes_any_row():
    world = World(1, 2)
    world.queue.add(0, [10, 200], [10, 10])
    assert world.dispatch(1) == {1: [0, 1]}


def test_stages_that_end_leave_their_rows_to_all():
    world = World(1, 2, plan=plan_of(100))
    world.queue.add(0, [200] * 4 + [10], [10] * 5)
    assert world.dispatch(1) == {1: [4]}
    world.ranges.end()
    assert world.dispatch(1) == {1: [0, 1, 2, 3]}
    assert not world.queue.has_waiting()


def test_a_new_replica_gets_the_stage_where_most_are_missing():
    failed, attempted = doctest.testmod(ranges, extraglobs={"Stage": Stage})
    assert (0, True) == (failed, attempted > 0)


def test_lengths_are_those_of_rows_that_are_not_done():
    queue = RowQueue(9)
    queue.add(0, [10, 20, 30], [1, 2, 3])
    queue.dispatch({1: FEW})
    queue.finish(1, 0, [0])
    found = lengths_of(queue._batches)
    assert (found.prompt_lens.tolist(), found.final_lens.tolist()) == ([20, 30], [22, 33])
    queue.drop(0)
    assert lengths_of(queue._batches) is None


OPS = st.sampled_from(
    [
        "add",
        "pull",
        "finish",
        "move",
        "commit",
        "lose",
        "start",
        "leave",
        "give back",
        "bounds",
        "end",
    ]
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(OPS, st.integers(0, 1 << 30)), max_size=60), st.booleans())
def test_any_interleaving_hands_out_each_row_once_at_a_time_and_ends_all(ops, has_groups):
    world = World(1, 2, plan=plan_of(60, 200, counts=[1, 1, 1]))
    queue, held, moving = world.queue, {1: set(), 2: set()}, {}
    num_batches, done, all_rows, next_id = 0, set(), set(), 3

    def pull(replica_ids, credit):
        for replica_id, spans in queue.dispatch(dict.fromkeys(replica_ids, credit)).items():
            got = {(s.batch_id, i) for s in spans for i in range(s.start, s.stop)}
            assert not got & set().union(done, *held.values())
            held[replica_id] |= got

    for op, number in ops:
        rng = np.random.default_rng(number)
        ids = list(world.able)
        some = ids[number % len(ids)] if ids else None
        if op == "add":
            size = 1 + number % 7
            groups = groups_of(rng.integers(0, 3, size).tolist(), 4) if has_groups else None
            queue.add(
                num_batches, rng.integers(5, 300, size), rng.integers(1, 200, size), groups=groups
            )
            all_rows |= {(num_batches, i) for i in range(size)}
            num_batches += 1
        elif op == "pull" and some:
            pull(ids if number % 2 else [some], FEW)
        elif op in ("finish", "give back", "move") and some and held[some]:
            batch_id, row = sorted(held[some])[number % len(held[some])]
            if op == "finish":
                assert queue.finish(some, batch_id, [row]).all()
                held[some].discard((batch_id, row))
                done.add((batch_id, row))
                moving.pop((batch_id, row), None)
            elif op == "move" and queue.begin_move(some, batch_id, row):
                moving[batch_id, row] = some
        elif op == "commit" and moving and some:
            (batch_id, row), source = sorted(moving.items())[number % len(moving)]
            del moving[batch_id, row]
            if some != source and queue.commit_move(source, some, batch_id, row, with_kv=True):
                held[source].discard((batch_id, row))
                held[some].add((batch_id, row))
            queue.end_move(source, batch_id, row)
        elif op == "lose" and some:
            queue.lose(some)
            world.able.remove(some)
            lost = held.pop(some)
            moving = {key: at for key, at in moving.items() if at != some}
            assert not lost & done
        elif op == "start" and len(ids) < 4:
            world.able.append(next_id)
            held[next_id] = set()
            next_id += 1
        elif op == "leave" and some:
            # it gets no more, and still has its rows
            world.able.remove(some)
        elif op == "bounds":
            low = int(rng.integers(1, 300))
            world.ranges.bounds = np.array([low, low + 50.0])
        elif op == "end":
            world.ranges.end() if number % 2 else world.ranges.begin(plan_of(number % 400 + 1))
        world.is_expected = number % 3 == 0
        assert queue.num_waiting() == len(all_rows) - len(done) - sum(map(len, held.values()))
        for replica_id, rows in held.items():
            assert queue.load(replica_id).num_rows == len(rows)
    world.is_expected = False
    if not world.able:
        world.able.append(next_id)
        held[next_id] = set()
    for replica_id in list(held):
        for batch_id, row in held[replica_id]:
            queue.finish(replica_id, batch_id, [row])
            done.add((batch_id, row))
        held[replica_id] = set()
    while queue.num_waiting():
        pull(world.able, AMPLE)
        assert any(held.values()), "rows wait that no replica gets"
        for replica_id in world.able:
            for batch_id, row in held[replica_id]:
                assert queue.finish(replica_id, batch_id, [row]).all()
                done.add((batch_id, row))
            held[replica_id] = set()
    assert done == all_rows


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_map_has_as_many_replicas_for_each_stage_as_the_plan(stages):
    plan = plan_of(*range(100, 100 * stages, 100), counts=[2] * stages)
    found = ranges.StageMap(plan).follow(list(range(1, 2 * stages + 1)))
    assert [2] * stages == np.bincount(list(found.values())).tolist()
