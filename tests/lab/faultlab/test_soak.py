"""One long job under faults: its figures, and a short one that is real."""

import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from faultlab.figures import FaultFigures, FaultOptions
from faultlab.kills import KILLS
from faultlab.readings import Reading, bytes_per_row, longest_run
from faultlab.rig import MAX_TOKENS, Checked, Rig
from faultlab.soak import SoakOptions, SoakResult, soak, soak_rig

TREE_SEED = next(seed for seed in range(99) if random.Random(seed).choice(KILLS) == "tree")
RIGHT = Checked(
    expected=20_000, written=20_000, lost=0, duplicated=0, wrong=0, is_clean=True, is_verified=True
)


def reading(run, rows_done, driver_bytes, *, num_handles=40, coordinator_bytes=200 << 20):
    return Reading(
        run=run,
        at_s=rows_done / 100,
        rows_done=rows_done,
        driver_bytes=driver_bytes,
        num_handles=num_handles,
        coordinator_bytes=coordinator_bytes,
        num_staged=run,
    )


def of_driver(found):
    return found.driver_bytes


def test_memory_that_grows_with_rows_is_told_per_row():
    readings = [reading(0, rows, 1_000_000 + 3 * rows) for rows in (0, 100, 300)]
    assert bytes_per_row(readings, of_driver) == pytest.approx(3.0)


def test_runs_that_begin_at_different_levels_do_not_look_like_growth():
    levels = {0: 9_000_000, 1: 5_000_000}
    readings = [reading(run, 1000 * run + rows, levels[run]) for run in levels for rows in (0, 50)]
    assert bytes_per_row(readings, of_driver) == pytest.approx(0.0)


def test_slope_of_one_reading_a_run_is_unknown():
    assert bytes_per_row([reading(0, 1, 1), reading(1, 9, 9)], of_driver) is None


def test_memory_that_is_given_back_at_once_does_not_hide_growth():
    readings = [
        reading(0, rows, 9_000_000 + 2 * rows - 500_000 * (rows > 800))
        for rows in range(0, 1000, 50)
    ]
    assert bytes_per_row(readings, of_driver) == pytest.approx(2.0)


def test_the_run_that_lived_longest_is_found():
    readings = [reading(0, 0, 1), reading(0, 100, 1), reading(1, 100, 1), reading(1, 900, 1)]
    assert [1, 1] == [found.run for found in longest_run(readings)]
    assert [] == longest_run([])


@pytest.mark.parametrize("minutes", [0.1, 5, 60])
def test_a_job_has_rows_for_all_its_minutes(tmp_path, minutes):
    rig = soak_rig(tmp_path, minutes)
    steps_of_a_row = (1 + MAX_TOKENS) / 2
    rows_per_s = rig.replicas * rig.max_num_seqs / (steps_of_a_row * rig.step_s)
    assert 200 < rows_per_s < 600
    assert 0 <= rig.num_rows - rows_per_s * 60 * minutes < 2 * rig.unit_rows
    assert rig.num_rows % rig.unit_rows == 0


def make_soak(**changes):
    readings = [
        reading(0, 1000, 10 << 20, num_handles=50),
        reading(1, 3000, 9 << 20, num_handles=41),
        reading(1, 5000, (9 << 20) + 4096, num_handles=43, coordinator_bytes=201 << 20),
    ]
    found = SoakResult(
        options=SoakOptions(minutes=1.0, seed=3),
        rows_per_s=290.0,
        unit_rows=300,
        seconds=90.0,
        faults={"driver": 1, "replica": 2},
        num_drivers=2,
        rows_redone=500,
        late_units=1,
        checked=RIGHT,
        start_s=12.0,
        resume_s=(8.25, 9.5),
        rerun_s=6.0,
        num_left=0,
        readings=tuple(readings),
    )
    return replace(found, **changes)


def make_figures(**changes):
    options = FaultOptions(seed=3, schedules=0, rounds=0, moto_python="python")
    return FaultFigures(options=options, conditions={"cpus": 2}, soak=make_soak(**changes))


def test_the_table_tells_what_a_soak_has_cost():
    text = make_figures().to_text()
    for reported in (
        "1.5 min, 3 faults (1 driver, 2 replica), 2 drivers, expected 20000, written 20000",
        "redone 500 (2.5 %, 167 rows a fault), late commits 1",
        "driver           +2.0 KiB per 1,000 finished rows",
        "coordinator      +512.0 KiB per 1,000 finished rows",
        "driver 9 MiB first, 9 last, coordinator 200 and 201, handles 41 and 43",
        "1 at most, 0 left",
        "12.0 s after the first start, after a fault 8.2 to 9.5 s",
        "6.0 s, the start of Ray with it",
        "verified    1 of 1 outputs",
    ):
        assert reported in text


def test_the_faults_of_a_soak_count_with_the_others():
    assert {"driver": 1, "replica": 2} == make_figures().injected


def test_the_file_holds_what_follows_from_the_readings():
    stored = json.loads(make_figures().to_json())["soak"]
    assert (0.025, 2048.0) == (stored["redone_share"], stored["driver_growth"])
    assert [41, 43] == [one["num_handles"] for one in stored["longest"]]
    assert 3 == len(stored["readings"])


@pytest.mark.parametrize(
    "changes",
    [
        {"checked": replace(RIGHT, lost=1)},
        {"checked": replace(RIGHT, is_verified=False)},
        {"num_left": 1},
        {"problem": "a driver hangs"},
    ],
    ids=["lost", "verify", "left behind", "hangs"],
)
def test_a_soak_that_went_wrong_is_not_right(changes):
    figures = make_figures(**changes)
    assert not figures.is_right
    assert "problem: " in figures.to_text()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak_goes_through_a_fault_and_ends():
    # the folders of pytest are too long for the sockets of Ray
    with tempfile.TemporaryDirectory(prefix="rbf-", ignore_cleanup_errors=True) as name:
        rig = Rig(folder=Path(name) / "job")
        # it comes with the first unit
        options = SoakOptions(
            minutes=0.1, fault_every_s=1.0, max_faults=1, read_every_s=0.2, seed=TREE_SEED
        )
        found = soak(Path(name), options, rig)
    assert "" == found.problem
    assert found.is_right
    assert found.faults == {"tree": 1}
    assert (2, 1) == (found.num_drivers, len(found.resume_s))
    assert found.readings
    assert 0 < found.start_s < found.seconds
