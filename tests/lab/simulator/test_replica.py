"""A simulated replica pulls and reports as a real one does."""

from itertools import pairwise

import pytest

from raybatch.actors.queue.pulling import REPORT_EVERY_S
from raybatch_lab.simulator.clock import VirtualClock
from raybatch_lab.simulator.replica import SimulatedReplica
from tests.lab.simulator.pools import MESSAGE_S, engine_spec, fixed_rows


class Recorder:
    """A coordinator that answers the first pull with all rows, and records reports."""

    def __init__(self, rows, **prices):
        self.clock, self.demand, self.reports = VirtualClock(), [], []
        self.rows, self.members = rows, [self]
        self.replica = SimulatedReplica(
            0, 0, rows, engine_spec(**prices), self, self.clock, slowness=1.0, message_s=MESSAGE_S
        )
        self.replica.start()
        self.clock.run(lambda: False)

    def pull(self, replica_id, credit):
        self.demand.append((self.clock.now, credit))
        if len(self.demand) == 1:
            self.replica.submit(range(len(self.rows)), [])

    def report(self, replica_id, rows, stats):
        self.reports.append((self.clock.now, list(rows), stats))


def test_finished_rows_are_sent_no_more_often_than_by_a_replica():
    found = Recorder(fixed_rows(400, output=2), step_s=0.001, token_s=0.0001)
    times = [time_s for time_s, _, _ in found.reports]
    gaps = [b - a for a, b in pairwise(times)]
    # the last one comes as soon as the engine has run dry
    assert len(gaps) > 3
    assert min(gaps[:-1]) >= REPORT_EVERY_S - 1e-9
    assert sorted(row for _, rows, _ in found.reports for row in rows) == list(range(400))


def test_the_first_pull_asks_for_four_steps_of_tokens():
    ((time_s, credit), *_) = Recorder(fixed_rows(8)).demand
    assert time_s == pytest.approx(MESSAGE_S)
    assert (credit.rows, credit.tokens) == (64, 4 * 256)


def test_a_replica_pulls_again_when_half_of_its_lead_is_used():
    found = Recorder(fixed_rows(64, prompt=4, output=1))
    (again, credit) = found.demand[1]
    assert again > found.demand[0][0]
    assert 32 <= credit.rows <= 64


def test_the_last_report_follows_the_last_step():
    found = Recorder(fixed_rows(8, prompt=8, output=3))
    end_s = found.replica.busy[-1][1]
    assert found.reports[-1][0] == pytest.approx(end_s + MESSAGE_S)
