"""Which replica gets which members of prefix groups, as tables."""

import numpy as np
import pytest

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Credit, RowRange
from tests.actors.queues import AMPLE, add_groups, grouped_queue, groups_of, held_rows

ONE_GROUP = Credit(tokens=150, rows=5)


def groups_at(grants, ids):
    return {r: [ids[row] for _, row in held_rows(row_ranges)] for r, row_ranges in grants.items()}


def num_prefixes(grants, ids):
    """Count the prefixes that replicas compute: one for each of their groups."""
    return sum(len({*of_replica} - {None}) for of_replica in groups_at(grants, ids).values())


def test_groups_are_shared_out_whole():
    ids = np.repeat(range(4), 5).tolist()
    grants = grouped_queue(ids).dispatch({1: AMPLE, 2: AMPLE})
    assert {1: [0] * 5 + [1] * 5, 2: [2] * 5 + [3] * 5} == groups_at(grants, ids)


def test_members_of_all_batches_go_together():
    queue = grouped_queue([0, 0, 1])
    add_groups(queue, 1, [1, 1, 2])
    assert {
        1: [RowRange(0, 0, 2), RowRange(0, 2, 3), RowRange(1, 0, 2), RowRange(1, 2, 3)]
    } == queue.dispatch({1: AMPLE})


def test_members_that_come_late_go_to_the_replica_that_has_their_prefix():
    queue = grouped_queue([0, 0, 1, 1])
    queue.dispatch({1: AMPLE, 2: AMPLE})
    add_groups(queue, 1, [1, 1, 0])
    assert {2: [RowRange(1, 0, 2)]} == queue.dispatch({2: Credit(tokens=20, rows=2)})
    assert {1: [RowRange(1, 2, 3)]} == queue.dispatch({1: AMPLE})


def test_the_replica_that_had_a_group_last_gets_it_again():
    queue = grouped_queue([0, 1])
    queue.dispatch({1: AMPLE, 2: AMPLE})
    queue.finish(1, 0, [0])
    add_groups(queue, 1, [0, 5])
    assert {2: [RowRange(1, 1, 2)]} == queue.dispatch({2: AMPLE})
    assert {1: [RowRange(1, 0, 1)]} == queue.dispatch({1: AMPLE})


def test_the_prefix_counts_once_in_the_room():
    queue = grouped_queue([0] * 5)
    # five whole prompts are 550 tokens
    assert {1: [RowRange(0, 0, 5)]} == queue.dispatch({1: ONE_GROUP})


def test_a_group_above_the_room_left_waits_for_the_next_pull():
    queue = grouped_queue([0] * 4 + [1] * 4)
    assert {1: [RowRange(0, 0, 4)]} == queue.dispatch({1: ONE_GROUP})


def test_the_first_group_of_a_pull_may_exceed_the_room():
    queue = grouped_queue([0] * 9)
    assert {1: [RowRange(0, 0, 9)]} == queue.dispatch({1: ONE_GROUP})


def test_the_rest_of_a_group_above_the_room_is_reserved():
    queue = grouped_queue([0] * 40 + [1] * 4)
    assert {1: [RowRange(0, 0, 5)]} == queue.dispatch({1: ONE_GROUP})
    assert {2: [RowRange(0, 40, 44)]} == queue.dispatch({2: ONE_GROUP})
    assert {1: [RowRange(0, 5, 10)]} == queue.dispatch({1: Credit(tokens=50, rows=5)})


def test_a_replica_takes_reserved_rows_before_it_would_idle():
    queue = grouped_queue([0] * 200)
    queue.dispatch({1: ONE_GROUP})
    assert 20 == len(held_rows(queue.dispatch({2: Credit(tokens=300, rows=20)})[2]))


def test_reserved_rows_worth_less_than_their_prefix_stay():
    queue = grouped_queue([0] * 10, prefix=500)
    queue.dispatch({1: Credit(tokens=10, rows=1)})
    assert queue.dispatch({2: AMPLE}) == {}
    assert {1: [RowRange(0, 1, 10)]} == queue.dispatch({1: AMPLE})


def test_rows_for_a_replica_that_does_not_ask_go_to_another_when_it_has_no_prefix():
    queue = grouped_queue([0])
    queue.dispatch({1: AMPLE})
    queue.finish(1, 0, [0])
    add_groups(queue, 1, [0])
    assert {2: [RowRange(1, 0, 1)]} == queue.dispatch({2: AMPLE})


def test_a_group_that_fits_no_room_is_cut_once_per_replica():
    ids = [0] * 400
    queue = grouped_queue(ids)
    grants = {r: [] for r in (1, 2, 3, 4)}
    while queue.num_waiting():
        for replica_id, row_ranges in queue.dispatch(dict.fromkeys(grants, ONE_GROUP)).items():
            grants[replica_id] += row_ranges
    assert 4 == num_prefixes(grants, ids)
    costs = [queue.load(r).cost for r in grants]
    assert (max(costs) - min(costs)) / np.mean(costs) < 0.05


def test_a_group_that_fits_the_room_is_not_cut_for_the_share():
    assert {1: [RowRange(0, 0, 40)]} == grouped_queue([0] * 40).dispatch({1: AMPLE, 2: AMPLE})


def test_a_small_queue_does_not_cut_a_group():
    ids = [0] * 8 + [1] * 8 + [2] * 8
    grants = grouped_queue(ids).dispatch({1: AMPLE, 2: AMPLE})
    assert {1: [0] * 8, 2: [1] * 8 + [2] * 8} == groups_at(grants, ids)


@pytest.mark.parametrize("seed", range(5))
def test_loads_are_level_without_a_cut_where_the_sizes_allow_it(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 30, 300)
    ids = np.repeat(np.arange(300), sizes).tolist()
    queue = grouped_queue(ids, prefix=np.repeat(rng.integers(1, 20, 300) * 16, sizes))
    grants = queue.dispatch(dict.fromkeys(range(4), AMPLE))
    while queue.has_waiting():
        late = queue.dispatch({min(range(4), key=queue.cost): AMPLE})
        grants = {r: [*grants[r], *late.get(r, [])] for r in grants}
    costs = [queue.load(r).cost for r in range(4)]
    assert (max(costs) - min(costs)) / np.mean(costs) < 0.05
    assert 300 == num_prefixes(grants, ids)


def test_a_group_that_exceeds_the_share_is_not_passed_over_for_ever():
    queue = grouped_queue([0] * 50)
    credit = Credit(tokens=500, rows=50)
    for batch_id in range(1, 40):
        add_groups(queue, batch_id, [10 * batch_id, 10 * batch_id + 1, 10 * batch_id + 2])
        for row_range in queue.dispatch({1: credit}, num_expected=3).get(1, []):
            if row_range.batch_id == 0:
                assert batch_id > 3
                return
            queue.finish(1, row_range.batch_id, range(row_range.start, row_range.stop))
    raise AssertionError("the large group never ran")


def test_expected_outputs_level_the_load():
    queue = RowQueue(3)
    groups = groups_of([0, 0, 1, 1, 2, 2], 100)
    queue.add(0, [110] * 6, [500, 500, 5, 5, 5, 5], groups=groups)
    grants = queue.dispatch({1: AMPLE, 2: AMPLE})
    at = groups_at(grants, [0, 0, 1, 1, 2, 2])
    assert [[0, 0], [1, 1, 2, 2]] == sorted(at.values())


def test_the_load_of_a_replica_is_its_rows_and_each_prefix_once():
    queue = grouped_queue([0, 0, None, 1])
    queue.dispatch({1: AMPLE})
    assert 4 * 20 + 2 * 100 == queue.load(1).cost
    queue.finish(1, 0, [0])
    assert 3 * 20 + 2 * 100 == queue.load(1).cost
    queue.finish(1, 0, [1, 2])
    assert 20 + 100 == queue.load(1).cost


def test_a_dropped_batch_weighs_with_its_prefixes_until_it_is_confirmed():
    queue = grouped_queue([0, 0, 1])
    queue.dispatch({1: AMPLE})
    queue.drop(0)
    assert 3 * 20 + 2 * 100 == queue.load(1).cost
    queue.note_aborted(1, 0)
    assert queue.load(1).cost == 0


def test_what_waits_for_a_dead_replica_goes_anywhere():
    queue = grouped_queue([0] * 40)
    queue.dispatch({1: ONE_GROUP})
    queue.lose(1)
    assert [(0, row) for row in range(40)] == held_rows(queue.dispatch({2: AMPLE})[2])


def test_a_group_that_is_given_back_whole_goes_anywhere():
    queue = grouped_queue([0, 0, 1, 1])
    queue.dispatch({1: AMPLE})
    add_groups(queue, 1, [1, 1])
    queue.give_back(1, [RowRange(0, 2, 3), RowRange(0, 3, 4)])
    rows = held_rows(queue.dispatch({2: AMPLE})[2])
    assert [(0, 2), (0, 3), (1, 0), (1, 1)] == sorted(rows)


def test_a_giant_group_does_not_starve_other_rows():
    queue = grouped_queue([0] * 5)
    queue.dispatch({1: ONE_GROUP})
    for batch_id in range(1, 31):
        add_groups(queue, batch_id, [0] * 100)
    add_groups(queue, 99, [7])
    num_before = 0
    while True:
        # the stream never ends
        batch_id += 1 + (batch_id == 98)
        add_groups(queue, batch_id, [0] * 100)
        rows = held_rows(queue.dispatch({1: Credit(tokens=1000, rows=100)})[1])
        if (99, 0) in rows:
            break
        num_before += len(rows)
    # twice what waited when it came, since as much came while that ran, and what may join
    assert num_before <= 2 * 3000 + 2 * 1124


def test_the_groups_of_spans_are_those_of_their_rows():
    queue = grouped_queue([3, None, 4])
    groups = queue.groups_of(0, [RowRange(0, 2, 3), RowRange(0, 0, 2)])
    assert ([4, 3, -1], [100, 100, 0]) == (groups.group_ids.tolist(), groups.prefix_lens.tolist())


def test_rows_without_groups_have_none():
    assert grouped_queue([None, None]).groups_of(0, [RowRange(0, 0, 2)]) is None
