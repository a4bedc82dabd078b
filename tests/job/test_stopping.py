"""SIGTERM stops a run in order where there is something to keep, and else at once."""

import os
import signal
import threading

import pytest

from raybatch.job.watching import StopSignal


class Run:
    """A run that can be stopped."""

    def __init__(self, *, is_at_work=True):
        self.stopped = threading.Event()
        self.signal = StopSignal(self.stopped.set, lambda: is_at_work)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_stops_the_run_and_lets_it_go_on_to_its_end():
    run = Run()
    with run.signal:
        terminate()
        assert run.stopped.wait(30)
    assert run.signal.has_arrived


def test_the_second_signal_ends_the_run():
    run = Run()
    with run.signal:
        terminate()
        assert run.stopped.wait(30)
        with pytest.raises(KeyboardInterrupt):
            terminate()


def test_a_signal_before_any_row_is_at_work_ends_the_run():
    run = Run(is_at_work=False)
    with pytest.raises(KeyboardInterrupt), run.signal:
        terminate()
    assert run.signal.has_arrived
    assert not run.stopped.is_set()


def test_a_run_without_a_signal_is_not_stopped():
    run = Run()
    with run.signal:
        pass
    assert (False, False) == (run.stopped.is_set(), run.signal.has_arrived)


def test_what_handled_the_signal_before_handles_it_again():
    before = signal.getsignal(signal.SIGTERM)
    with Run().signal:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_in_another_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def run():
        with Run().signal:
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [before] == seen
