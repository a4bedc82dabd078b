"""Simulated processes take turns, crash, stall and continue."""

import random

import pytest

from faultlab.oracle import Oracle
from faultlab.virtual_store import Files, VirtualStore
from faultlab.world import FaultRates, World

CALM = FaultRates(crash=0.0, stall=0.0, error=0.0, delay=0.0)


def make_files(rates=CALM, *, is_exclusive=True):
    world = World(random.Random(0), rates)
    return Files(world, Oracle([], is_exclusive=is_exclusive), is_exclusive=is_exclusive)


def start(files, run, *, is_faulty=True):
    return files.world.start(
        "p", lambda process: run(VirtualStore(files, process)), is_faulty=is_faulty
    )


def run_all(files):
    files.world.run()
    files.world.close()


def test_processes_interleave_at_every_operation():
    files = make_files()
    order = []

    def say(name):
        def run(store):
            for _ in range(8):
                store.size("a")
                order.append(name)

        return run

    start(files, say("x"))
    start(files, say("y"))
    run_all(files)
    assert order not in (["x"] * 8 + ["y"] * 8, ["y"] * 8 + ["x"] * 8)


def test_of_two_creates_one_wins():
    files = make_files()
    won = []
    for _ in range(2):
        start(files, lambda store: won.append(store.create("runs/a", b"")))
    run_all(files)
    assert [False, True] == sorted(won)


def test_a_crash_ends_a_process_without_its_cleaning_up():
    files = make_files(FaultRates(crash=1.0, stall=0.0, error=0.0, delay=0.0))

    def run(store):
        try:
            store.create("runs/a", b"")
        except Exception:
            files.put("runs/cleaned", b"")

    process = start(files, run)
    run_all(files)
    assert process.is_over
    assert "runs/cleaned" not in files.by_name


def test_an_error_can_come_after_the_effect():
    files = make_files(FaultRates(crash=0.0, stall=0.0, error=1.0, delay=0.0))
    for number in range(20):
        start(files, lambda store, number=number: store.create(f"runs/{number}", b""))
    run_all(files)
    assert 0 < len(files.by_name) < 20


def test_a_stalled_process_goes_on_when_it_is_woken():
    files = make_files(FaultRates(crash=0.0, stall=1.0, error=0.0, delay=0.0))
    process = start(files, lambda store: store.create("runs/a", b""))
    files.world.run()
    assert not process.is_over
    files.world.wake_all()
    run_all(files)
    assert process.is_over
    assert ["runs/a"] == list(files.by_name)


@pytest.mark.parametrize("fault", ["crash", "stall"])
def test_a_parent_does_not_wait_for_a_child_taken_for_dead(fault):
    rates = FaultRates(**{"crash": 0.0, "stall": 0.0, "error": 0.0, "delay": 0.0, fault: 1.0})
    files = make_files(rates)

    def run(process):
        child = VirtualStore
        files.world.start(
            "child", lambda own: child(files, own).size("a"), is_faulty=True, parent=process
        )
        files.world.wait(process)

    parent = files.world.start("parent", run, is_faulty=False)
    run_all(files)
    assert parent.is_over


def test_a_crashed_parent_does_not_go_on_when_its_child_ends():
    files = make_files()
    gone_on = []

    def run(process):
        files.world.start(
            "child", lambda own: VirtualStore(files, own).size("a"), is_faulty=False, parent=process
        )
        files.world.crash(process)
        gone_on.append(process)

    files.world.start("parent", run, is_faulty=True)
    run_all(files)
    assert [] == gone_on


def test_the_failure_of_a_process_is_kept_and_ends_no_other():
    files = make_files()
    failing = start(files, lambda store: store.read("runs/none"))
    other = start(files, lambda store: store.size("runs/none"))
    run_all(files)
    assert isinstance(failing.failure, FileNotFoundError)
    assert (True, None) == (other.is_over, other.failure)


def test_a_create_that_is_not_exclusive_can_replace():
    won_twice = 0
    for seed in range(20):
        world = World(random.Random(seed), CALM)
        files = Files(world, Oracle([], is_exclusive=False), is_exclusive=False)
        won = []
        for _ in range(2):
            start(files, lambda store, won=won: won.append(store.create("runs/a", b"")))
        run_all(files)
        won_twice += won == [True, True]
    assert won_twice > 0
