"""Groups that share weights switch between copies of weights and rounds, and no token changes."""

import logging
import os
import signal
import time
from dataclasses import replace

import pytest

from raybatch.records.types import Sampling
from raybatch_extensions.sharing import modes
from raybatch_extensions.sharing.modes import choose_mode
from raybatch_extensions.sharing.pool import Sharing
from tests.actors.pools import generate, table_of, tokens_of, wait_until
from tests.extensions.sharing.share_pools import (
    Repeated,
    pools_of,
    prompts_of,
    tokens_of_one,
    unique,
)
from tests.tiers import some

NUM_TOKENS, NUM_ROWS = 230, 12
STUCK_AFTER_S = 8.0
SAMPLING = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
ENGINE = {"kv_cache_bytes": 1 << 21, "speculative_tokens": None}

pytestmark = pytest.mark.usefixtures("shared_cache", "warm_processes")


@pytest.fixture(scope="module")
def expected(share_model):
    return tokens_of_one(share_model, prompts_of(NUM_ROWS), SAMPLING, **ENGINE)


@pytest.fixture
def threshold(monkeypatch):
    """The threshold of all groups, in a list that a test may change."""
    box = [0.0]
    monkeypatch.setattr(
        modes, "choose_mode", lambda snapshot: choose_mode(replace(snapshot, threshold_rows=box[0]))
    )
    return box


@pytest.fixture
def pool(share_model):
    """Makes a pool of one group that ends with its test."""
    with pools_of(share_model, **ENGINE) as make:
        yield lambda size: make(
            pool={"replicas": size, "share_group": size, "stuck_after_s": STUCK_AFTER_S}
        )


def rounds(handle):
    return [replica.num_exchanges for replica in handle.stats().replicas]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_group_goes_to_rounds_and_back_while_rows_run(pool, expected, threshold, size):
    handle = pool(size)
    job = Repeated(handle, prompts_of(NUM_ROWS), SAMPLING)
    wait_until(lambda: handle.stats().rows_done >= 1)
    threshold[0] = 1e9
    wait_until(lambda: min(rounds(handle), default=0) > 5)
    threshold[0] = 0.0
    assert [expected] == unique(job.end())
    reported = handle.stats().replicas
    assert len(reported) == size
    assert sum(replica.exchange_bytes for replica in reported) > 0
    assert handle.stats().restarts == 0


@pytest.mark.slow
def test_a_rank_without_rows_serves_in_rounds(pool, expected, threshold):
    handle = pool(2)
    threshold[0] = 1e9
    # a row may end before two looks have agreed
    for _ in range(20):
        results = generate(handle, table_of(prompts_of(NUM_ROWS)[:1]), (SAMPLING,))
        assert expected[:1] == tokens_of(results)
        reported = handle.stats().replicas
        if sum(replica.num_served_rows for replica in reported):
            break
    assert sum(replica.num_dummy_exchanges for replica in reported) > 0
    assert sum(replica.num_served_rows for replica in reported) > 0


@pytest.mark.slow
def test_rounds_that_are_lost_lead_back_to_copies_everywhere(pool, expected, threshold, caplog):
    handle = pool(2)
    threshold[0] = 1e9
    with caplog.at_level(logging.INFO, logger="raybatch.extensions.sharing.pool"):
        job = Repeated(handle, prompts_of(NUM_ROWS), SAMPLING)
        wait_until(lambda: min(rounds(handle), default=0) > 5)
        # the others wait for one that is stopped longer than they may
        pid = handle.state().pids[1]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STUCK_AFTER_S / 4 + 1)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: sum(r.num_lost_exchanges for r in handle.stats().replicas) > 0)
        assert [expected] == unique(job.end())
    assert "go back to weight fetch" in caplog.text
    assert handle.stats().restarts == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_killed_in_rounds_ends_its_group_and_no_row_is_lost(
    pool, expected, threshold, victim
):
    handle = pool(2)
    threshold[0] = 1e9
    job = Repeated(handle, prompts_of(NUM_ROWS), SAMPLING)
    wait_until(lambda: min(rounds(handle), default=0) > 5)
    os.kill(handle.state().pids[victim], signal.SIGKILL)
    wait_until(lambda: handle.stats().restarts == 2)
    assert [expected] == unique(job.end())


@pytest.mark.parametrize("step", some(["_to_exchange", "_to_fetch"]))
def test_a_member_killed_in_a_switch_ends_its_group(pool, expected, threshold, monkeypatch, step):
    handle, killed = pool(2), []
    plain = getattr(Sharing, step)

    async def with_a_death(self, members, *args, **options):
        if not killed:
            killed.append(members[1].pid)
            os.kill(members[1].pid, signal.SIGKILL)
        return await plain(self, members, *args, **options)

    monkeypatch.setattr(Sharing, step, with_a_death)
    threshold[0] = 1e9
    job = Repeated(handle, prompts_of(NUM_ROWS), SAMPLING)
    if step == "_to_fetch":
        wait_until(lambda: min(rounds(handle), default=0) > 5)
        threshold[0] = 0.0
    wait_until(lambda: handle.stats().restarts == 2)
    assert [expected] == unique(job.end())
    assert killed
