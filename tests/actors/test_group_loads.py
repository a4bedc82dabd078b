"""Equal engines in lockstep, fed by the queue: they end together and compute no prefix twice."""

import numpy as np
import pytest

from raybatch.actors.queue.pulling import OpenRows, choose_rows
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Credit, RowRange
from raybatch.records.types import Request, Sampling
from tests.actors.queues import add_groups

PREFIX, OWN, NEW = 256, 32, 16
LEAD_TOKENS, LEAD_ROWS, BUDGET, SLOTS = 1024, 32, 256, 64


class Engine:
    """Computes `BUDGET` prompt tokens per step; a prefix lives as long as rows of its group."""

    def __init__(self):
        self.rows = OpenRows()
        self.waiting = []
        self.running = []
        self.num_computed = 0
        self.num_prefixes = 0
        self.last_step = 0
        self._live = set()
        self._todo = 0

    def credit(self):
        tokens = int(LEAD_TOKENS - len(self.waiting) * self.rows.mean_own_tokens())
        rows = LEAD_ROWS - len(self.waiting)
        wants_rows = 2 * tokens >= LEAD_TOKENS and 2 * rows >= LEAD_ROWS
        return Credit(tokens=tokens, rows=rows) if wants_rows else None

    def submit(self, requests):
        self.rows.add(requests)
        self.waiting += requests

    def give_back(self, max_cost):
        max_rows = len(self.waiting) // 2
        groups = self.rows.groups
        given = choose_rows(self.waiting, groups, max_rows=max_rows, max_cost=max_cost)
        ids = {r.request_id for r in given}
        self.waiting = [r for r in self.waiting if r.request_id not in ids]
        for request_id in ids:
            self.rows.give_back(request_id)
        return sorted(ids)

    def step(self, now):
        """Run one step, and return the rows that have finished."""
        finished = [r.request_id for r, end in self.running if end <= now]
        self.running = [(r, end) for r, end in self.running if end > now]
        for request_id in finished:
            self.rows.close(request_id)
        self._live &= self.rows.groups.keys()
        self._todo = max(0, self._todo - BUDGET)
        # members of live groups first, as the engine does
        self.waiting.sort(key=lambda r: r.group_id not in self._live)
        while self.waiting and self._todo < BUDGET and len(self.running) < SLOTS:
            self._start(self.waiting.pop(0), now)
        if self._todo or self.running:
            self.last_step = now
        return finished

    def _start(self, request, now):
        num_new = OWN
        if request.group_id not in self._live:
            self._live.add(request.group_id)
            self.num_prefixes += 1
            num_new += PREFIX
        self.num_computed += num_new
        self._todo += num_new
        self.running.append((request, now + 1 + self._todo // BUDGET + NEW))


def request(row, group):
    prompt = np.zeros(PREFIX + OWN, np.int32)
    return Request(
        request_id=row,
        row_id=str(row),
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=NEW),
        group_id=group,
        prefix_len=PREFIX,
    )


def run(ids, num_engines, rows_per_batch):
    """Run planned rows to their end as the coordinator does, but in turns."""
    queue = RowQueue(3)
    engines = dict(enumerate(Engine() for _ in range(num_engines)))
    for batch_id, start in enumerate(range(0, len(ids), rows_per_batch)):
        batch = ids[start : start + rows_per_batch]
        add_groups(queue, batch_id, batch, prefix=PREFIX, distinct=OWN, new=NEW)
    num_done, now = 0, 0
    while num_done < len(ids):
        now += 1
        credits = {r: credit for r, e in engines.items() if (credit := e.credit()) is not None}
        for replica_id, row_ranges in queue.dispatch(credits).items():
            rows = [
                s.batch_id * rows_per_batch + i for s in row_ranges for i in range(s.start, s.stop)
            ]
            engines[replica_id].submit([request(row, ids[row]) for row in rows])
        idle = [r for r in engines if not queue.load(r).num_rows]
        if idle and not queue.has_waiting():
            steal(queue, engines, idle[0], rows_per_batch)
        for replica_id, engine in engines.items():
            for row in engine.step(now):
                batch_id, of_batch = divmod(row, rows_per_batch)
                assert queue.finish(replica_id, batch_id, [of_batch]).all()
                num_done += 1
    return list(engines.values())


def steal(queue, engines, thief, rows_per_batch):
    victim = max(engines, key=lambda r: len(engines[r].waiting))
    if len(engines[victim].waiting) > 1:
        ids = engines[victim].give_back((queue.load(victim).cost - queue.load(thief).cost) // 2)
        row_ranges = [
            RowRange(b, row, row + 1) for b, row in (divmod(i, rows_per_batch) for i in ids)
        ]
        queue.give_back(victim, row_ranges)


@pytest.mark.parametrize("num_engines", [1, 4])
@pytest.mark.parametrize("degree", [2, 4, 16, 64])
def test_every_prefix_is_computed_once(degree, num_engines):
    num_rows = 4096
    ids = np.repeat(np.arange(num_rows // degree), degree).tolist()
    engines = run(ids, num_engines, rows_per_batch=250)
    closed_form = num_rows // degree * PREFIX + num_rows * OWN
    assert sum(e.num_computed for e in engines) <= 1.01 * closed_form


@pytest.mark.parametrize("degree", [2, 4, 16, 64])
def test_equal_engines_end_together_with_equal_loads(degree):
    num_rows = 4096
    ids = np.repeat(np.arange(num_rows // degree), degree).tolist()
    engines = run(ids, 4, rows_per_batch=250)
    loads = [e.num_computed for e in engines]
    assert np.ptp(loads) <= 0.05 * np.mean(loads)
    ends = [e.last_step for e in engines]
    assert np.ptp(ends) <= 0.05 * max(ends) + NEW


def test_a_group_with_everything_is_cut_once_per_engine():
    engines = run([0] * 4096, 4, rows_per_batch=250)
    assert 4 == sum(e.num_prefixes for e in engines)
    loads = [e.num_computed for e in engines]
    assert np.ptp(loads) <= 0.05 * np.mean(loads)
