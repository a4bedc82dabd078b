"""Rows without a plan: grouped while they wait, joined to live groups, never starved."""

import numpy as np

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Credit, RowRange
from tests.actors.queues import AMPLE, add_plain, held_rows, keys_of, plain_prompts


def groups_run(queue, grants, groups_by_batch):
    """Return the prefixes of the rows in a grant, one entry per run."""
    prefixes = [groups_by_batch[batch_id][row] for batch_id, row in held_rows(grants)]
    return [p for i, p in enumerate(prefixes) if i == 0 or p != prefixes[i - 1]]


def test_members_of_different_batches_run_together():
    queue, groups = RowQueue(3), {0: [1, 2, 3], 1: [3, 1, 2]}
    for batch_id, of_batch in groups.items():
        add_plain(queue, batch_id, of_batch)
    grant = queue.dispatch({1: AMPLE})[1]
    assert [1, 2, 3] == sorted(groups_run(queue, grant, groups))


def test_the_engine_is_told_of_the_groups():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, None, 1])
    row_ranges = queue.dispatch({1: AMPLE})[1]
    groups = queue.groups_of(0, sorted(row_ranges))
    first, alone, second = groups.group_ids.tolist()
    assert (first, -1) == (second, alone)
    assert first >= 0
    assert [8, 0, 8] == groups.prefix_lens.tolist()


def test_a_group_keeps_its_name_from_batch_to_batch():
    names = set()
    for _ in range(2):
        queue = RowQueue(3)
        add_plain(queue, 5, [None, 1, 1])
        queue.dispatch({1: AMPLE})
        names.add(int(queue.groups_of(5, [RowRange(5, 1, 2)]).group_ids[0]))
    assert len(names) == 1


def test_a_late_row_goes_to_the_replica_that_has_its_prefix():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, 1, 2, 2])
    grants = queue.dispatch({1: AMPLE, 2: AMPLE})
    (of_first,) = {row // 2 for _, row in held_rows(grants[1])}
    add_plain(queue, 1, [2, 1])
    late = queue.dispatch({1: AMPLE, 2: AMPLE})
    assert [(1, 1 - of_first)] == held_rows(late[1])
    assert [(1, of_first)] == held_rows(late[2])


def test_a_late_row_goes_before_those_that_wait():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, 1, 2, 2, 3, 3])
    queue.dispatch({1: Credit(tokens=16, rows=2)})
    running = {row for _, row in queue_rows(queue, 0, 1)}
    (group,) = {[1, 1, 2, 2, 3, 3][row] for row in running}
    add_plain(queue, 1, [None, group])
    assert (1, 1) == held_rows(queue.dispatch({1: AMPLE})[1])[0]


def queue_rows(queue, batch_id, replica_id):
    return [(batch_id, row) for row in queue._batches[batch_id].held_by(replica_id).tolist()]


def test_a_short_live_prefix_does_not_keep_rows_from_a_longer_one():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, 1], prefix=4)
    queue.dispatch({1: AMPLE})
    prompts = [np.r_[np.full(4, 1), np.full(40, 5), row] for row in range(2)]
    keys = keys_of(prompts)
    queue.add(1, keys.num_tokens, [10, 10], keys=keys)
    queue.dispatch({1: AMPLE})
    assert [44, 44] == queue.groups_of(1, [RowRange(1, 0, 2)]).prefix_lens.tolist()


def test_the_group_with_most_output_per_prompt_token_goes_first():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, 2, 1, 2], new=[5, 50, 5, 50])
    assert [(0, 1), (0, 3), (0, 0), (0, 2)] == held_rows(queue.dispatch({1: AMPLE})[1])


def test_rows_that_share_nothing_run_as_they_are():
    queue = RowQueue(3)
    add_plain(queue, 0, [None] * 6)
    assert [(0, row) for row in range(6)] == held_rows(queue.dispatch({1: AMPLE})[1])
    assert queue.groups_of(0, [RowRange(0, 0, 6)]) is None


def test_a_row_takes_part_in_few_groupings():
    queue = RowQueue(3)
    num_rows = 0
    for batch_id in range(256):
        add_plain(queue, batch_id, [batch_id % 7, None])
        queue.dispatch({1: Credit(tokens=1, rows=1)})
        num_rows += 2
    # the line grows by a third from one grouping to the next
    assert queue._regrouping.num_groupings <= 3 * np.log(num_rows) / np.log(4 / 3) / 2


def test_a_row_is_not_held_up_by_later_ones_that_the_order_prefers():
    queue = RowQueue(3)
    add_plain(queue, 0, [77, 77], new=1)
    num_before = 0
    for batch_id in range(1, 400):
        add_plain(queue, batch_id, [1000 + batch_id] * 8, new=1000)
        rows = held_rows(queue.dispatch({1: Credit(tokens=80, rows=8)}).get(1, []))
        if any(batch == 0 for batch, _ in rows):
            break
        num_before += len(rows)
        for batch, row in rows:
            queue.finish(1, batch, [row])
    assert 0 < num_before <= 100


def test_planned_rows_of_another_client_are_not_held_up():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, 1, 2, 2])
    queue.add(1, [10], [1])
    for batch_id in range(2, 400):
        add_plain(queue, batch_id, [1000 + batch_id] * 4, new=1000)
        rows = held_rows(queue.dispatch({1: Credit(tokens=40, rows=4)}).get(1, []))
        if (1, 0) in rows:
            return
        for batch, row in rows:
            queue.finish(1, batch, [row])
    raise AssertionError("the row never ran")


def test_rows_of_a_dead_replica_are_grouped_with_those_that_wait():
    queue = RowQueue(3)
    add_plain(queue, 0, [1, 2])
    queue.dispatch({1: AMPLE})
    queue.lose(1)
    add_plain(queue, 1, [1, 2])
    grant = queue.dispatch({2: AMPLE})[2]
    assert [1, 2] == sorted(groups_run(queue, grant, {0: [1, 2], 1: [1, 2]}))


def test_prompts_are_what_the_tests_take_them_for():
    first, second, other = plain_prompts([1, 1, 2])
    assert first[:8].tolist() == second[:8].tolist() != other[:8].tolist()
    assert first[8:].tolist() != second[8:].tolist()
