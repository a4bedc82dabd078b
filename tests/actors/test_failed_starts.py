"""What a user reads of engines that cannot start, in a pool without Ray."""

import logging

import pytest

from raybatch.actors.pool import PoolHandle
from raybatch.errors import ReplicaError
from tests.actors.pools import SAMPLING, generate, handle_of, prompts_of, table_of, wait_until

REFUSED = "ConfigError: the fake backend refuses to start, since refuse_start is set"


@pytest.fixture
def refused(caplog, tmp_path):
    """Ask a pool whose engines fail; returns the error, the number of starts and the log."""

    def ask(**options):
        handle = PoolHandle(handle_of(marks_dir=str(tmp_path), **options).spec, is_local=True)
        caplog.set_level(logging.INFO, "raybatch")
        try:
            with pytest.raises(ReplicaError) as found:
                generate(handle, table_of(prompts_of(3)), (SAMPLING,))
        finally:
            handle.shutdown()
        return str(found.value), len(list(tmp_path.iterdir())), caplog.text

    return ask


def test_a_start_that_fails_for_good_is_tried_once_and_told_in_one_line(refused):
    message, num_starts, log = refused(refuse_start=True, pool={"replicas": 1})
    assert message == f"replica 0 failed: {REFUSED}"
    assert (num_starts, log) == (1, "")


def test_engines_that_fail_alike_are_told_of_once(refused):
    message, num_starts, log = refused(refuse_start=True, pool={"replicas": 3})
    assert f"failed: {REFUSED}" in message
    assert (num_starts, log) == (3, "")


def test_a_start_that_may_pass_is_tried_again_and_its_trace_is_told_once(refused):
    message, num_starts, log = refused(
        num_failing_starts=9, pool={"replicas": 1, "max_start_failures": 2}
    )
    assert message.startswith("replica 0 failed: RuntimeError: the fake backend fails to start")
    assert num_starts == 2
    assert (log.count("restarting replica 0: RuntimeError"), log.count("Traceback")) == (1, 1)


def test_a_rank_that_is_given_up_is_told_of_where_another_works(caplog, tmp_path):
    options = {"marks_dir": str(tmp_path), "num_failing_starts": 1}
    spec = handle_of(**options, pool={"replicas": 2, "max_start_failures": 1}).spec
    handle = PoolHandle(spec, is_local=True)
    try:
        results = generate(handle, table_of(prompts_of(3)), (SAMPLING,))
        wait_until(lambda: "giving up on replica" in caplog.text)
    finally:
        handle.shutdown()
    assert results["error"].to_pylist() == ["", "", ""]
