"""Engines as counts of steps: rows of known lengths, and predictions by which they start."""

import heapq

import numpy as np

from raybatch.policy.admission_order import next_batch, shortest_first


def run_batches(lengths, predicted, *, batch_rows, max_bins, num_waiting):
    """Run closed batches over a queue that is refilled to `num_waiting` rows.

    Returns the rows per step, as long as rows come, and per row the batches that it waited for.
    """
    waiting, num_come = np.empty(0, np.int64), 0
    come, gone = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    num_steps = num_batches = 0
    while num_come < len(lengths):
        new = np.arange(num_come, min(len(lengths), num_come + num_waiting - len(waiting)))
        num_come += len(new)
        come[new] = num_batches
        waiting = np.append(waiting, new)
        chosen = next_batch(
            predicted[waiting],
            np.ones(len(waiting), np.int64),
            batch_rows=batch_rows,
            max_bins=max_bins,
        )
        gone[waiting[chosen]] = num_batches
        num_steps += lengths[waiting[chosen]].max()
        num_batches += 1
        waiting = np.delete(waiting, chosen)
    num_done = len(lengths) - len(waiting)
    is_done = np.isin(np.arange(len(lengths)), waiting, invert=True)
    return num_done / num_steps, (gone - come)[is_done]


def run_continuously(lengths, order, *, num_slots):
    """Return the steps at which rows end, each in the first slot that becomes free."""
    slots, ends = [0.0] * num_slots, np.zeros(len(lengths))
    for row in order:
        ends[row] = heapq.heappop(slots) + lengths[row]
        heapq.heappush(slots, ends[row])
    return ends


def run_stream(arrivals, service, *, patience, num_slots=1):
    """Serve entries that come at given steps, shortest first; return them as they start."""
    waiting, started, free_at = [], [], [0.0] * num_slots
    by_arrival = sorted(range(len(service)), key=lambda i: (arrivals[i], i))
    now, num_come = 0.0, 0
    while len(started) < len(service):
        now = max(now, min(free_at))
        if not waiting and num_come < len(service):
            now = max(now, float(arrivals[by_arrival[num_come]]))
        while num_come < len(service) and arrivals[by_arrival[num_come]] <= now:
            waiting.append(by_arrival[num_come])
            num_come += 1
        if not waiting:
            continue
        order = shortest_first(service[waiting], arrivals[waiting], patience=patience)
        entry = waiting.pop(int(order[0]))
        started.append((entry, now))
        free_at.remove(min(free_at))
        free_at.append(now + float(service[entry]))
    return started
