"""How many rows a replica requests at once, and how often it reports."""

import numpy as np
import pytest

from raybatch.actors.queue.pulling import (
    HEARTBEAT_S,
    REPORT_EVERY_S,
    Done,
    Lead,
    OpenRows,
    PullPace,
    credit_for,
    report_every_s,
)
from raybatch.records.types import Capacity, Request, Sampling

CAPACITY = Capacity(kv_tokens=1 << 20, max_model_len=4096, max_num_seqs=64, block_size=16)


def pace_of(intervals):
    """Return the leads of an engine that finishes these rows and tokens between its requests."""
    pace, now_s, done = PullPace(), 0.0, Done(0, 0)
    for interval_s, rows, tokens in intervals:
        now_s += interval_s
        done = Done(done.rows + rows, done.tokens + tokens)
        lead = Lead(rows=64 * pace.num_leads, tokens=1000 * pace.num_leads)
        pace.note_pull(lead, done, now_s=now_s)
    return pace.num_leads


FAST = (0.1, 2048, 0)


@pytest.mark.parametrize(
    ("intervals", "num_leads"),
    [
        ([FAST], 1),
        ([FAST] * 4, 8),
        ([FAST] * 40, 8),
        # few rows of many tokens
        ([(0.1, 1, 32_000)] * 4, 8),
        # it is asked for rows, but finishes few
        ([(0.1, 1, 100)] * 40, 1),
        # of a larger lead
        ([(0.1, 30, 400)] * 40, 2),
        # neither fast nor slow
        ([FAST] * 4 + [(0.5, 2048, 0)] * 9, 8),
        ([FAST] * 4 + [(2.0, 2048, 0)] * 2, 2),
        ([FAST] * 4 + [(2.0, 2048, 0)] * 9, 1),
    ],
)
def test_fast_engines_pull_more_rows_at_once(intervals, num_leads):
    assert pace_of(intervals) == num_leads


def run_engine(*, step_s, steps_of_row, max_num_seqs, seconds):
    """Return (number of requests for rows, largest number of leads, rows that wait at the end)."""
    rows, pace, next_id = OpenRows(), PullPace(), 0
    waiting, running = [], {}
    num_pulls = most = 0
    for step in range(int(seconds / step_s)):
        lead = Lead.of(CAPACITY, min_tokens=8192, num_leads=pace.num_leads)
        credit = credit_for(lead, rows, num_waiting=len(waiting), cached_fraction=0.0)
        if credit is not None:
            num = min(credit.rows, credit.tokens // 100)
            prompt = np.zeros(100, np.int32)
            some = [
                Request(
                    request_id=next_id + i,
                    row_id="",
                    prompt_token_ids=prompt,
                    sampling=Sampling(max_tokens=9),
                    seed=0,
                )
                for i in range(num)
            ]
            next_id += num
            rows.add(some)
            pace.note_pull(lead, rows.done, now_s=step * step_s)
            waiting += [request.request_id for request in some]
            num_pulls, most = num_pulls + 1, max(most, pace.num_leads)
        while waiting and len(running) < max_num_seqs:
            running[waiting.pop(0)] = step + steps_of_row
        for request_id in [one for one, end in running.items() if end <= step]:
            del running[request_id]
            rows.close(request_id)
    return num_pulls, most, len(waiting)


def test_an_engine_of_long_rows_queues_no_more_than_its_lead():
    """A larger lead makes it request rows at once, however slow it is."""
    _, most, num_waiting = run_engine(step_s=0.03, steps_of_row=1000, max_num_seqs=64, seconds=60)
    assert most == 1
    assert num_waiting <= 64


def test_an_engine_of_short_rows_requests_many_at_once():
    num_pulls, most, _ = run_engine(step_s=0.005, steps_of_row=2, max_num_seqs=64, seconds=10)
    assert most == 8
    assert num_pulls < 300


def test_many_replicas_report_less_often():
    assert report_every_s(1) == report_every_s(10) == REPORT_EVERY_S
    assert report_every_s(128) == pytest.approx(1.28)
    assert report_every_s(10_000) == 2


def test_many_replicas_report_before_they_are_taken_for_stuck():
    assert report_every_s(600, stuck_after_s=180) == 2
    assert report_every_s(600, stuck_after_s=2) + HEARTBEAT_S < 2
    assert report_every_s(600, stuck_after_s=None) == 2
