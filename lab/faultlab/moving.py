"""Whole jobs whose rows move between engines or form TP groups, which end or hang meanwhile."""

import dataclasses
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from faultlab.chaos import Planned, RoundResult
from faultlab.drivers import Driver, wait_until
from faultlab.moving_driver import DONE, PLAN, Moved, MoveFault, MovePlan
from faultlab.rig import NUM_UNITS, Answers, Rig
from raybatch.actors.wire.records import MoveStep
from raybatch.demo import CHECKPOINT_PATH
from raybatch_extensions.tp_groups.pool import TPGroupStep

_EVERY_S = 0.03
_NATIVE = ("native moves", "teams")
_STUCK_AFTER_S = 5.0
# of a move that goes well; without KV it begins with the fourth
_STEPS = tuple(step for step in get_args(MoveStep) if step != "stay")
_UNIT_ROWS = {"moves": 6, "tail": 3, "native moves": 4, "teams": 1}
# of a TP group: where an engine may be killed, and where a worker that hangs is noticed
_TP_GROUP_STEPS, _NOTICED = (
    get_args(TPGroupStep),
    (("follow", False), ("lead", False), ("lead", True)),
)


def moving_rig(folder: Path, place: str, *, is_alone: bool = False) -> Rig:
    """Return a job whose rows are long enough to move.

    Args:
        folder: empty.
        place: one of those in `chaos.MOVING`.
        is_alone: for one engine, which is as fast as it can be.
    """
    unit_rows = _UNIT_ROWS[place]
    return Rig(
        folder=folder,
        num_rows=NUM_UNITS * unit_rows,
        unit_rows=unit_rows,
        executor="local",
        module="faultlab.moving_driver",
        stage=_stage(folder, place, is_alone),
    )


def moving_answers(folder: Path, place: str) -> Answers:
    """Return the texts of a run with one engine, so that no row moves."""
    rig = moving_rig(folder, place, is_alone=True)
    rig.prepare()
    driver = _start(rig, MovePlan(seed=0, every_s=None))
    _wait(driver)
    return rig.answers()


def run_moving_round(
    folder: Path, planned: Planned, expected: Answers, rng: random.Random
) -> RoundResult:
    """Run a job while its rows move and engines end at steps of moves, until it is done.

    Args:
        folder: empty, of this round.
        planned: the faults, each after a number of moves.
        expected: the text of every row.
        rng: chooses rows, and the steps at which faults come.
    """
    began, problem, done = time.monotonic(), "", None
    rig = moving_rig(folder, planned.place)
    rig.prepare()
    driver = _start(rig, _plan(planned, rig, rng))
    try:
        _wait(driver)
        done = Moved.load(driver.folder / DONE)
        problem = done.problem
    except (TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    return RoundResult(
        planned=planned,
        injected=tuple(_kind(fault) for fault in done.faults) if done else (),
        num_drivers=1,
        rows_redone=rig.num_redone(),
        late_units=rig.num_late_units(),
        seconds=time.monotonic() - began,
        checked=rig.check(expected),
        problem=problem,
        moved=done,
    )


def _start(rig: Rig, plan: MovePlan) -> Driver:
    (rig.folder / "d0").mkdir()
    (rig.folder / "d0" / PLAN).write_text(json.dumps(dataclasses.asdict(plan)), encoding="utf-8")
    return rig.start(name="d0")


def _wait(driver: Driver) -> None:
    """Wait for the end of a driver; raise if it failed."""
    try:
        wait_until(lambda: False, driver)
        if driver.process.poll():
            raise OSError(f"a driver failed: {driver.last_words()}")
    finally:
        driver.kill_tree()


def _plan(planned: Planned, rig: Rig, rng: random.Random) -> MovePlan:
    is_tail, is_fake = planned.place == "tail", not planned.place.startswith(_NATIVE)
    forms_tp_groups, faults = planned.place == "teams", []
    for kind, at in planned.faults:
        victim, _, how = kind.partition(" ")
        # few rows move by themselves, and few TP groups form
        num_before = 0 if forms_tp_groups else at // 10 if is_tail else at
        # fake engines have no KV
        step, is_after = rng.choice(_STEPS[3:] if is_fake else _STEPS), rng.random() < 0.5
        if forms_tp_groups:
            step = rng.choice(_TP_GROUP_STEPS)
            if how == "hangs":
                step, is_after = rng.choice(_NOTICED)
        faults.append(
            MoveFault(
                num_before=num_before,
                step=step,
                is_after=is_after,
                victim=victim,
                hangs=how == "hangs",
            )
        )
    return MovePlan(
        seed=rng.getrandbits(32),
        every_s=None if is_tail else _EVERY_S,
        forms_tp_groups=forms_tp_groups,
        faults=tuple(faults),
        hang_dir=str(rig.folder) if is_fake else None,
    )


def _kind(fault: MoveFault) -> str:
    return f"{fault.victim} {'hangs' if fault.hangs else 'killed'}"


def _stage(folder: Path, place: str, is_alone: bool) -> Mapping[str, Any]:
    limits = {
        "stuck_after_s": _STUCK_AFTER_S,
        "max_row_crashes": 9,
        # of an engine that hangs
        "duplicate_last_rows": place == "tail",
    }
    if place.startswith(_NATIVE):
        # the last rows of engines are to be long where idle ones take part in their steps
        lengths = (100, 900) if place == "teams" else (200, 250)
        num_replicas = 3 if place == "teams" else 2
        return {
            "model": str(CHECKPOINT_PATH),
            "pool": {"replicas": 1 if is_alone else num_replicas, **limits},
            # greedy: a draw on a border falls by the last digit, which depends on the company
            "sampling": {"min_tokens": lengths[0], "max_tokens": lengths[1]},
            "engine": {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 64 << 20},
            "backend": {"kind": "native"},
        }
    options = {
        "step_s": 0.0 if is_alone else 0.01,
        # rows move by themselves where each makes a step longer
        "row_s": 0.0 if is_alone else 0.001 if place == "tail" else 0.0002,
        "max_num_seqs": 64,
        "lengths": "hash",
        "finished_log": str(folder / "finished"),
        "hang_dir": str(folder),
    }
    return {
        "pool": {"replicas": 1 if is_alone else 3, **limits},
        "sampling": {"max_tokens": 300},
        "backend": {"kind": "fake", "options": options},
    }
