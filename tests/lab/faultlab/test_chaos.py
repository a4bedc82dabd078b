"""Real kills of whole jobs; `raybatch bench faults` has many more."""

import json
import random
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from faultlab.chaos import KINDS, Planned, RoundResult, plan_round, run_round
from faultlab.figures import FaultFigures, FaultOptions
from faultlab.peers import Compared
from faultlab.places import Places
from faultlab.rig import NUM_ROWS, NUM_UNITS, Checked, Rig
from faultlab.s3_server import has_moto
from faultlab.sweep import Baseline, PointResult, sweep

RIGHT = Checked(
    expected=NUM_ROWS,
    written=NUM_ROWS,
    lost=0,
    duplicated=0,
    wrong=0,
    is_clean=True,
    is_verified=True,
)


@pytest.fixture(scope="module")
def folder():
    # the folders of pytest are too long for the sockets of Ray
    with tempfile.TemporaryDirectory(prefix="rbf-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def swept(folder):
    return sweep(folder / "swept", "after_publish", {})


@pytest.fixture(scope="module")
def answers(folder, swept):
    return Rig(folder=folder / "swept").answers()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_dies_after_a_commit_goes_on(swept, answers):
    assert swept.is_reached
    assert 0 < swept.parts_kept < NUM_UNITS
    assert (NUM_ROWS, 0, 0, True, True) == (
        swept.checked.written,
        swept.checked.lost,
        swept.checked.duplicated,
        swept.checked.is_clean,
        swept.checked.is_verified,
    )
    assert NUM_ROWS == len(answers)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_survives_the_loss_of_a_replica_and_of_everything(folder, answers):
    planned = Planned(place="local", faults=(("replica", 4), ("tree", 12)))
    places = Places(endpoint=None, has_disks=False)
    found = run_round(folder / "round", planned, answers, places, random.Random(0))
    assert ("", ("replica", "tree"), RIGHT) == (found.problem, found.injected, found.checked)


def test_a_seed_plans_the_same_rounds():
    plans = [[plan_round(7, number, list(KINDS)) for number in range(20)] for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0] != [plan_round(8, number, list(KINDS)) for number in range(20)]


def test_many_rounds_hold_every_kind_of_fault():
    rounds = [plan_round(0, number, list(KINDS)) for number in range(200)]
    kinds = Counter(kind for planned in rounds for kind, _ in planned.faults)
    assert {kind for place in KINDS.values() for kind in place} == set(kinds)


def test_rounds_stay_in_the_places_of_the_host():
    assert {"local"} == {plan_round(0, number, ["local"]).place for number in range(50)}


def make_figures(checked, *, is_reached=True, problem=""):
    options = FaultOptions(seed=3, schedules=0, rounds=1, moto_python="python")
    point = PointResult(
        point="after_publish",
        is_reached=is_reached,
        parts_kept=4,
        rows_redone=0,
        resume_s=1.0,
        checked=RIGHT,
    )
    found = RoundResult(
        planned=Planned(place="local", faults=(("tree", 4),)),
        injected=("tree",),
        num_drivers=2,
        rows_redone=36,
        late_units=2,
        seconds=9.0,
        checked=checked,
        problem=problem,
    )
    return FaultFigures(options=options, conditions={"cpus": 2}, points=(point,), rounds=(found,))


def test_the_figures_of_faults_name_what_was_redone():
    figures = make_figures(RIGHT)
    assert figures.is_right
    text = figures.to_text()
    assert (
        "lost 0, duplicated 0, wrong 0, redone 36 (5.0 %, 36 rows a fault), late commits 2" in text
    )
    assert "seed 3: nothing lost, doubled or wrong" in text


OWN = Compared(
    system="raybatch",
    rows_expected=9,
    rows_done=4,
    rows_written=9,
    lost=0,
    duplicated=0,
    rows_redone=1,
    resume_s=2.0,
    written_by_third=0,
)


@pytest.mark.parametrize(
    ("changes", "is_right"),
    [
        ({}, True),
        ({"rows_written": 8, "lost": 1}, False),
        ({"duplicated": 1}, False),
        ({"written_by_third": 9}, False),
        ({"resume_s": None}, False),
        # others are shown, not held to it
        ({"system": "append", "duplicated": 4}, True),
    ],
)
def test_a_row_that_is_lost_in_the_comparison_counts(changes, is_right):
    figures = replace(make_figures(RIGHT), peers=(replace(OWN, **changes),))
    assert figures.is_right == is_right


def test_the_file_of_the_figures_names_no_interpreter():
    assert "python" not in json.dumps(json.loads(make_figures(RIGHT).to_json())["options"])


def test_a_reference_that_is_not_right_counts():
    wrong = Baseline(answers={}, seconds=1.0, rerun_s=1.0, is_right=False)
    assert not replace(make_figures(RIGHT), undisturbed=wrong).is_right


def test_drivers_that_gave_up_are_told():
    figures = make_figures(RIGHT)
    found = replace(figures.rounds[0], gave_up=("RayError: the cluster is gone",))
    assert "1 drivers failed by themselves" in replace(figures, rounds=(found,)).to_text()


def test_the_table_says_of_how_many_outputs_verify_was_run():
    assert "verified    2 of 2 outputs" in make_figures(RIGHT).to_text()
    assert "verified    1 of 2 " in make_figures(replace(RIGHT, is_verified=False)).to_text()


@pytest.mark.parametrize(
    "figures",
    [
        make_figures(replace(RIGHT, lost=1)),
        make_figures(replace(RIGHT, duplicated=1)),
        make_figures(replace(RIGHT, wrong=1)),
        make_figures(replace(RIGHT, is_clean=False)),
        make_figures(replace(RIGHT, is_verified=False)),
        make_figures(RIGHT, is_reached=False),
        make_figures(RIGHT, problem="a driver hangs"),
    ],
    ids=["lost", "duplicated", "wrong", "audit", "verify", "not reached", "hangs"],
)
def test_figures_with_a_loss_are_not_right(figures):
    assert not figures.is_right
    assert "NOT RIGHT" in figures.to_text()


def test_figures_are_stored_with_their_conditions():
    stored = json.loads(make_figures(RIGHT).to_json())
    assert ({"cpus": 2}, True) == (stored["conditions"], stored["is_right"])
    assert {"tree": 1, "exit at a point": 1} == stored["injected"]


def test_an_interpreter_that_is_not_there_has_no_moto(tmp_path):
    assert not has_moto(str(tmp_path / "python"))
