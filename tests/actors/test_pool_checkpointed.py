"""A long generation outlives its engine: the next one continues from its tokens so far."""

import asyncio
import os
import signal

import numpy as np
import pytest

from raybatch.backends.fake import fake_tokens
from raybatch.records.types import Sampling
from tests.actors.pools import handle_of, prompts_of, table_of, tokens_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

LONG = Sampling(max_tokens=1500)
NUM_ROWS = 4


class KillingWatch:
    """Kills the engine as soon as it reports tokens."""

    def __init__(self, handle):
        self.crashes = np.zeros(NUM_ROWS, np.int16)
        self.checkpointed = None
        self.num_reported = 0
        self.crashed_rows = set()
        self._handle = handle

    async def note_crashes(self, crashes):
        self.crashed_rows |= {one.row for one in crashes}

    def note_checkpointed(self, checkpointed):
        if not self.num_reported:
            self.num_reported = len(checkpointed.column("token_ids").flatten())
            state = self._handle.state()
            os.kill(state.pids[0], signal.SIGKILL)


@pytest.fixture
def handle():
    pool = {"replicas": 1, "keep_tokens_every_s": 0.1, "feeder_timeout_s": 1.5}
    made = handle_of(pool=pool, step_s=0.002, max_num_seqs=NUM_ROWS)
    yield made
    made.shutdown()


def test_the_next_engine_generates_only_what_is_missing(handle):
    watch, prompts = KillingWatch(handle), prompts_of(NUM_ROWS)
    results = asyncio.run(handle.generate(table_of(prompts), (LONG,), watch=watch))
    assert [fake_tokens(p, i, LONG).tolist() for i, p in enumerate(prompts)] == tokens_of(results)
    (replica,) = handle.stats().replicas
    assert watch.num_reported > 0
    assert replica.generated_tokens <= NUM_ROWS * LONG.max_tokens - watch.num_reported
    assert set(range(NUM_ROWS)) == watch.crashed_rows
