"""Jobs whose rows move while engines end; `raybatch bench faults` has many more."""

import dataclasses
import json
import random
import tempfile
from pathlib import Path

import pytest

from faultlab.chaos import MOVING, Planned, plan_round
from faultlab.moving import moving_answers, run_moving_round
from faultlab.moving_driver import Moved, MoveFault, MovePlan
from tests.lab.faultlab.test_chaos import RIGHT, make_figures

FAULT = MoveFault(num_before=3, step="arrive", is_after=True, victim="source", hangs=True)
MOVED = Moved(num_moved=5, num_failed=2, num_bytes=3_000_000, num_hung=1, faults=(FAULT,))


@pytest.mark.parametrize("kept", [MOVED, MovePlan(seed=4, every_s=None, faults=(FAULT, FAULT))])
def test_what_a_driver_is_told_and_tells_is_read_as_it_was_written(tmp_path, kept):
    path = tmp_path / "kept.json"
    path.write_text(json.dumps(dataclasses.asdict(kept)), encoding="utf-8")
    assert kept == type(kept).load(path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"num_moved": 0}, "no row moved"),
        ({"num_hung": 0}, "1 engines hung, and 0 were replaced as hanging"),
        ({"num_hung": 2}, "1 engines hung, and 2 were replaced as hanging"),
        ({"num_hung": 0, "faults": ()}, ""),
        ({"num_hung": 0, "num_launched": 4}, ""),
        ({"num_hung": 2, "num_launched": 4}, "1 engines hung, and 2 were replaced as hanging"),
        ({"num_moved": 0, "num_tp_groups": 0}, "no TP group formed"),
        ({"num_moved": 0, "num_tp_groups": 1}, ""),
    ],
)
def test_a_run_without_moves_or_with_an_engine_that_hung_for_good_is_a_problem(changes, problem):
    assert problem == dataclasses.replace(MOVED, **changes).problem


def test_the_table_tells_how_many_rows_moved():
    figures = make_figures(RIGHT)
    found = dataclasses.replace(figures.rounds[0], moved=MOVED)
    text = dataclasses.replace(figures, rounds=(found, *figures.rounds)).to_text()
    assert "rows moved       5 in 1 jobs, 3 MB of KV; 2 moves left their row where it was" in text
    assert "1 engines that hung were replaced" in text


@pytest.mark.parametrize("place", MOVING)
def test_engines_end_at_every_side_of_moves_and_tp_groups(place):
    planned = [plan_round(0, number, [place]) for number in range(20)]
    kinds = {kind for each in planned for kind, _ in each.faults}
    of_moves = {"source killed", "target killed", "source hangs", "target hangs"}
    of_tp_groups = {"driver killed", "worker killed", "worker hangs"}
    assert (of_tp_groups if place == "teams" else of_moves) == kinds


def go_through(place, *faults):
    """Return the result of a round with these faults."""
    with tempfile.TemporaryDirectory(prefix="rbf-", ignore_cleanup_errors=True) as name:
        still = moving_answers(Path(name) / "still", place)
        planned = Planned(place=place, faults=faults)
        return run_moving_round(Path(name) / "round", planned, still, random.Random(0))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_rows_move_survives_engines_that_end_and_hang():
    found = go_through("moves", ("target killed", 4), ("source hangs", 8))
    assert found.problem == ""
    assert found.injected == ("target killed", "source hangs")
    assert found.is_right
    assert (found.moved.num_hung, found.moved.num_moved > 8) == (1, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_engines_form_tp_groups_survives_their_ends():
    found = go_through("teams", ("worker killed", 4), ("driver killed", 8))
    assert found.problem == ""
    assert found.injected == ("worker killed", "driver killed")
    assert found.is_right
    assert found.moved.num_tp_groups > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_last_rows_of_a_job_which_may_run_twice_survive_an_engine_that_hangs():
    found = go_through("tail", ("source hangs", 20))
    assert found.problem == ""
    assert found.injected == ("source hangs",)
    assert found.is_right
