"""Queues of equal rows, and what tests read from the grants."""

from raybatch.actors.queue import RowQueue
from raybatch.actors.records import Room

ROOMY = Room(tokens=10**9, rows=10**9)


def queue_of(*num_rows, prompt=10, new=10, max_row_crashes=3):
    queue = RowQueue(max_row_crashes)
    for batch_id, num in enumerate(num_rows):
        queue.add(batch_id, [prompt] * num, [new] * num)
    return queue


def held_rows(grants):
    return [(s.batch_id, row) for s in grants for row in range(s.start, s.stop)]
