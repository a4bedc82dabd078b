from raybatch.actors.queue.row_states import RowStates
from raybatch.actors.queue.waiting_queues import PrefixAffinity, WaitingQueues
from raybatch.actors.wire.records import RowRange
from tests.actors.queues import groups_of


def test_few_rows_join_their_home_wherever_in_the_batch_they_are():
    num_rows = 3000
    groups = groups_of([7] * num_rows, 100)
    batches = {0: RowStates([110] * num_rows, [10] * num_rows, groups=groups)}
    affinity = PrefixAffinity()
    affinity.start(1, [(7, 100)])
    queue = WaitingQueues(batches, affinity)
    for start in (2000, 2010, 2020):
        queue.add(RowRange(0, start, start + 10))
    assert (0, 30) == (queue.shared.num_rows, queue.own(1).num_rows)
