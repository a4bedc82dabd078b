"""The pool without Ray: engines are threads or child processes, and rows end as on Ray."""

import os
import pickle
import signal
import sys

import psutil
import pytest

from raybatch.actors.executors import local_pools
from raybatch.actors.pool import end_local_engines
from raybatch.errors import ReplicaError
from raybatch.records.types import Sampling
from tests.actors.pools import (
    POISON,
    SAMPLING,
    Background,
    cancel_a_call,
    expected_tokens,
    generate,
    handle_of,
    is_computing,
    prompts_of,
    table_of,
    tokens_of,
    wait_until,
)
from tests.jobs import Hold

# fake engines that may crash have their own processes
IN_PROCESS = {"crash_on": POISON}


@pytest.fixture
def own():
    """Makes a pool without Ray that ends with its test."""
    handles = []

    def make(**options):
        handles.append(handle_of(is_local=True, **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.shutdown()


@pytest.fixture
def shared(own):
    """The pool without options."""
    return own()


@pytest.mark.parametrize("options", [{}, IN_PROCESS], ids=["threads", "processes"])
def test_every_row_comes_out_once_with_its_answer(own, options):
    handle, prompts = own(**options), prompts_of(500)
    results = generate(handle, table_of(prompts), (SAMPLING,))
    assert list(range(500)) == results["row"].to_pylist()
    assert expected_tokens(prompts) == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())


@pytest.fixture(params=["os.waitid", "no os.waitid"])
def _with_or_without_waitid(request, monkeypatch):
    """Without `os.waitid`, as on macOS, the process of an engine is watched in another way."""
    if request.param == "no os.waitid":
        monkeypatch.delattr("os.waitid")


@pytest.mark.usefixtures("_with_or_without_waitid")
def test_a_killed_engine_loses_no_row_and_redoes_no_finished_row(own, tmp_path):
    num_rows, hold = 200, Hold(tmp_path, 40)
    handle = own(max_num_seqs=8, **hold.options, **IN_PROCESS)
    prompts = prompts_of(num_rows)
    job = Background(handle, prompts)
    # both engines are held while their rows run
    wait_until(lambda: handle.stats().rows_done >= 2 * 40)
    os.kill(handle.state().pids[0], signal.SIGKILL)
    hold.release()
    results = job.join()
    assert expected_tokens(prompts) == tokens_of(results)
    # its death repeats at most the rows that it holds
    assert 0 < sum(results["attempts"].to_pylist()) - num_rows <= 2 * (8 + 64)


@pytest.mark.usefixtures("_with_or_without_waitid")
def test_a_process_that_cannot_start_fails_the_pool_and_leaves_nothing(own, monkeypatch, tmp_path):
    program, child = tmp_path / "program", tmp_path / "child"
    program.write_text(f"#!/bin/sh\nsleep 600 >/dev/null 2>&1 &\necho $! > {child}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    handle = own(**IN_PROCESS, pool={"replicas": 1, "max_start_failures": 1})
    with pytest.raises(ReplicaError, match="engine process ended with exit code 1"):
        generate(handle, table_of(prompts_of(3)), (SAMPLING,))
    wait_until(lambda: not psutil.pid_exists(int(child.read_text())), 20)


def test_engines_of_a_pool_that_ends_are_gone(own):
    handle = own(**IN_PROCESS)
    handle.start()
    wait_until(lambda: len(handle.state().pids) == 2)
    pids = handle.state().pids
    handle.shutdown()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_an_engine_that_hangs_does_not_outlive_a_command(own, monkeypatch):
    monkeypatch.setattr("raybatch.actors.replicas.replica_set._STOP_GRACE_S", 0.5)
    handle = own(**IN_PROCESS)
    handle.start()
    wait_until(lambda: len(handle.state().pids) == 2)
    pids = handle.state().pids
    os.kill(pids[0], signal.SIGSTOP)
    end_local_engines()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_engines_stop_the_rows_of_a_cancelled_call(own):
    handle = own(step_s=0.002, max_num_seqs=4)
    cancel_a_call(handle, 500)
    wait_until(lambda: not is_computing(handle), 60)
    # rows in transit to an engine are dropped on arrival
    wait_until(lambda: not handle.state().num_held_rows, 60)
    state = handle.state()
    assert (state.num_batches, state.num_waiting_rows) == (0, 0)


def test_pools_with_equal_options_are_one(own):
    first, second = own(), own()
    generate(first, table_of(prompts_of(5)), (SAMPLING,))
    assert second.stats().rows_done == 5


def test_an_empty_table_gives_an_empty_table(shared):
    assert generate(shared, table_of([]), (SAMPLING,)).num_rows == 0


def test_a_pool_predicts_how_long_later_rows_become(own):
    handle = own(lengths="hash")
    sampling = Sampling(max_tokens=50)
    assert generate(handle, table_of(prompts_of(400)), (sampling,)).num_rows == 400
    before = handle.stats().length_coverage
    num_before = before[0].num_rows if before else 0
    generate(handle, table_of(prompts_of(300)), (sampling,))
    tenth, half, _ = handle.stats().length_coverage
    assert tenth.num_rows == half.num_rows == num_before + 300
    assert tenth.num_below <= half.num_below <= half.num_at_most <= half.num_rows


def test_every_sample_of_a_row_comes_out(shared):
    results = generate(shared, table_of(prompts_of(3)), (Sampling(max_tokens=2, n=2),))
    assert results["row"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert results["sample_idx"].to_pylist() == [0, 1, 0, 1, 0, 1]


def test_an_engine_error_is_one_error_row(own):
    prompts = prompts_of(20, poison=[7])
    handle = own(error_on=POISON, pool={"replicas": 1})
    errors = generate(handle, table_of(prompts), (SAMPLING,))["error"].to_pylist()
    assert [row for row, error in enumerate(errors) if error] == [7]
    assert dict(handle.stats().errors) == {"ValueError": 1}


def test_counters_are_kept_per_client(shared):
    jobs = [
        Background(shared, prompts_of(30), client="a"),
        Background(shared, prompts_of(50), client="b"),
    ]
    for job in jobs:
        job.join()
    stats = {client: shared.stats(client) for client in ("a", "b", "c")}
    assert {c: s.rows_done for c, s in stats.items()} == {"a": 30, "b": 50, "c": 0}
    assert stats["b"].generated_tokens == 50 * 4
    assert stats["b"].max_tokens_left == 0


def test_nothing_stays_in_the_coordinator(shared):
    generate(shared, table_of(prompts_of(200)), (SAMPLING,))
    state = shared.state()
    assert (state.num_batches, state.num_waiting_rows, state.num_held_rows, state.num_results) == (
        0,
        0,
        0,
        0,
    )


def test_an_idle_pool_releases_its_engines_and_starts_them_on_demand(own):
    handle = own(pool={"replicas": 1, "idle_release_s": 0.5})
    generate(handle, table_of(prompts_of(10)), (SAMPLING,))
    wait_until(lambda: not handle.state().pids)
    assert generate(handle, table_of(prompts_of(10)), (SAMPLING,)).num_rows == 10


def test_the_error_of_a_row_says_what_its_last_engine_said(own):
    handle = own(raise_on=POISON, pool={"replicas": 1, "max_row_crashes": 1})
    results = generate(handle, table_of(prompts_of(4, poison=[2])), (SAMPLING,))
    (error,) = [error for error in results["error"].to_pylist() if error]
    assert error.startswith("ReplicaCrash: the engine died")
    assert "; the last time: RuntimeError: the fake backend fails, since" in error


def test_a_broken_engine_is_replaced(own):
    handle = own(raise_on=POISON, pool={"replicas": 1, "max_row_crashes": 1})
    generate(handle, table_of(prompts_of(1, poison=[0])), (SAMPLING,))
    results = generate(handle, table_of(prompts_of(3)), (SAMPLING,))
    assert results["error"].to_pylist() == ["", "", ""]
    assert handle.stats().restarts == 1


def test_options_that_an_engine_refuses_end_the_pool_at_its_first_start(own, tmp_path):
    handle = own(refuse_start=True, marks_dir=str(tmp_path), pool={"replicas": 1})
    with pytest.raises(ReplicaError, match="ConfigError: the fake backend refuses"):
        generate(handle, table_of(prompts_of(3)), (SAMPLING,))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_pool_gets_another_try_at_the_next_execution(own, tmp_path):
    handle = own(
        marks_dir=str(tmp_path), num_failing_starts=1, pool={"replicas": 1, "max_start_failures": 1}
    )
    with pytest.raises(ReplicaError):
        generate(handle, table_of(prompts_of(3)), (SAMPLING,))
    handle.start()
    results = generate(handle, table_of(prompts_of(3)), (SAMPLING,))
    assert results["error"].to_pylist() == ["", "", ""]


def test_a_hung_start_raises(own):
    handle = own(
        start_s=60.0, pool={"replicas": 1, "start_timeout_s": 0.5, "max_start_failures": 1}
    )
    with pytest.raises(ReplicaError, match="start_timeout_s"):
        generate(handle, table_of(prompts_of(3)), (SAMPLING,))


def test_a_start_that_fails_once_is_tried_again(own, tmp_path):
    handle = own(marks_dir=str(tmp_path), num_failing_starts=1, pool={"replicas": 1})
    results = generate(handle, table_of(prompts_of(3)), (SAMPLING,))
    assert results["error"].to_pylist() == ["", "", ""]


def test_a_pool_works_on_after_a_cancelled_call(own):
    handle = own(step_s=0.02, max_num_seqs=4, pool={"replicas": 1})
    cancel_a_call(handle, 20)
    prompts = prompts_of(20)
    results = generate(handle, table_of(prompts), (SAMPLING,))
    assert expected_tokens(prompts) == tokens_of(results)
    assert handle.stats().restarts == 0


def test_neighbouring_poison_rows_become_error_rows(own, caplog):
    poison = [20, 21, 22]
    prompts = prompts_of(40, poison=poison)
    handle = own(crash_on=POISON, pool={"max_row_crashes": 1})
    results = generate(handle, table_of(prompts), (SAMPLING,))
    errors = results["error"].to_pylist()
    assert [row for row, error in enumerate(errors) if error] == poison
    assert "the engine process ended with exit code 1" in caplog.text
    expected = expected_tokens(prompts)
    for row in poison:
        expected[row] = []
    assert expected == tokens_of(results)


def test_an_engine_that_dies_on_every_row_fails_the_pool(own):
    handle = own(crashes=True, pool={"replicas": 1})
    with pytest.raises(ReplicaError, match=r"never finished a row.*last crash"):
        generate(handle, table_of(prompts_of(400)), (SAMPLING,))
    assert handle.stats().restarts <= 3


def test_a_shut_down_pool_notifies_waiting_callers(own):
    handle = own(step_s=0.2, max_num_seqs=1, pool={"replicas": 1})
    job = Background(handle, prompts_of(500))
    wait_until(lambda: handle.state().num_batches == 1)
    handle.shutdown()
    with pytest.raises(ReplicaError, match="shut down"):
        job.join()


def test_engines_of_a_pool_that_differs_in_their_number_alone_make_room(own):
    first, second = own(pool={"replicas": 1}), own(pool={"replicas": 2})
    other = own(step_s=0.001, pool={"replicas": 1})
    for handle in (first, other, second):
        generate(handle, table_of(prompts_of(5)), (SAMPLING,))
    assert (0, 1) == (len(first.state().pids), len(other.state().pids))
    assert generate(first, table_of(prompts_of(5)), (SAMPLING,)).num_rows == 5


def test_a_handle_does_not_travel_to_another_process(own):
    with pytest.raises(TypeError, match="works only in the process"):
        pickle.dumps(own())


def test_engines_import_nothing_from_the_working_folder(own, monkeypatch, tmp_path):
    (tmp_path / "random.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    handle, prompts = own(**IN_PROCESS), prompts_of(2)
    results = generate(handle, table_of(prompts), (SAMPLING,))
    assert expected_tokens(prompts) == tokens_of(results)


def test_engines_of_another_size_end_where_they_do_nothing(own):
    pools = [own(pool={"replicas": n}, **IN_PROCESS) for n in (1, 2)]
    for turn in (0, 1, 0):
        generate(pools[turn], table_of(prompts_of(4)), (SAMPLING,))
        wait_until(lambda turn=turn: not pools[1 - turn].state().pids)


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0, 1", 2), ("0,-1,1", 1), ("GPU-8a,MIG-7b/1", 2)],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch, tmp_path, visible, num_gpus):
    for name in ("0000:01", "0000:02"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(local_pools, "_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_pools.gpus_of_host() == num_gpus
