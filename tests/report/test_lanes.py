"""How the time of engines is shared out."""

import pytest

from raybatch.report.history import History, RunRecord, RunSample
from raybatch.report.record import lanes_of


def history_of(*runs):
    """Return runs of samples of a second, given as (busy, ready) of each engine or None."""
    records = []
    for samples in runs:
        stretches = []
        for place, engines in enumerate(samples):
            found = tuple(
                (rank, *of_rank) for rank, of_rank in enumerate(engines) if of_rank is not None
            )
            stretches.append(RunSample(end_s=place + 1.0, seconds=1.0, engines=found))
        records.append(
            RunRecord(
                run_id="a", started=0.0, seconds=float(len(samples)), samples=tuple(stretches)
            )
        )
    return History(runs=tuple(records))


def parts(cells):
    return tuple(map(sum, zip(*(seconds for _, _, seconds in cells), strict=True)))


IDLE, BUSY, GONE = (0.0, 1.0), (1.0, 1.0), None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([[GONE], [BUSY]], (1, 1, 0, 0)),
        ([[IDLE], [BUSY]], (1, 1, 0, 0)),
        ([[BUSY], [IDLE], [BUSY]], (2, 0, 1, 0)),
        ([[BUSY], [GONE], [BUSY]], (2, 1, 0, 0)),
        ([[BUSY], [(0.25, 1.0)], [BUSY]], (2.25, 0, 0.75, 0)),
        ([[BUSY], [IDLE], [IDLE]], (1, 0, 0, 0)),
    ],
    ids=["not-ready", "no-rows-yet", "starved", "restarted", "half-busy", "after-all-work"],
)
def test_time_of_one_engine(seconds, expected):
    lane = lanes_of(history_of(seconds))[0]
    assert expected == parts(lane)


def test_an_engine_without_rows_while_others_work_is_the_tail():
    first, second = lanes_of(history_of([[BUSY, BUSY], [BUSY, IDLE], [BUSY, IDLE]])).values()
    assert (3, 0, 0, 0) == parts(first)
    assert (1, 0, 0, 2) == parts(second)


def test_an_engine_that_never_gets_rows_starves():
    lane = lanes_of(history_of([[BUSY, IDLE], [BUSY, IDLE]]))[1]
    assert (0, 1, 1, 0) == parts(lane)


def test_runs_follow_each_other():
    lane = lanes_of(history_of([[BUSY]], [[BUSY]]))[0]
    assert [(0.0, 1.0), (1.0, 2.0)] == [(start_s, end_s) for start_s, end_s, _ in lane]


def test_the_parts_add_up_to_the_length():
    lane = lanes_of(history_of([[GONE], [IDLE], [(0.5, 0.75)], [IDLE], [BUSY]]))[0]
    assert 5.0 == pytest.approx(sum(parts(lane)))
