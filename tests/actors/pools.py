"""Small pools of fake engines, and helpers of their tests."""

import asyncio
import threading
import time

import numpy as np
import ray

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import decode_completions, request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.fake import fake_tokens
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Sampling

SAMPLING = Sampling(max_tokens=4)
POISON = 999
LONG = Sampling(max_tokens=100_000)


def handle_of(*, pool=None, is_local=False, **options):
    return PoolHandle(
        PoolSpec(
            model="none",
            backend=BackendConfig(kind="fake", options=options),
            engine=EngineConfig(max_batched_tokens=64),
            pool=PoolConfig(**({"replicas": 2} | (pool or {}))),
        ),
        is_local=is_local,
    )


def prompts_of(num_rows, **special):
    prompts = [np.array([i % 97, i % 11, 1], np.int32) for i in range(num_rows)]
    for row in special.get("poison", ()):
        prompts[row] = np.array([POISON], np.int32)
    return prompts


def table_of(prompts):
    seeds = np.arange(len(prompts), dtype=np.uint64)
    return request_table([str(i) for i in range(len(prompts))], prompts, seeds=seeds)


def expected_tokens(prompts):
    return [fake_tokens(p, i, SAMPLING).tolist() for i, p in enumerate(prompts)]


def tokens_of(results):
    return [c.token_ids.tolist() for c in decode_completions(results)]


def generate(handle, table, samplings, client="default"):
    """Run all rows of a table from a thread without an event loop."""
    return asyncio.run(handle.generate(table, samplings, client=client))


def wait_until(is_there, timeout_s=240.0):
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition that the test waits for did not become true")
        time.sleep(0.02)


def is_computing(handle):
    """Return whether any engine reports a row."""
    replicas = handle.stats().replicas
    return any(replica.num_running or replica.num_waiting for replica in replicas)


def cancel_a_call(handle, num_rows):
    """Start a call of rows that never end, and cancel it once engines run them."""

    async def run():
        task = asyncio.create_task(handle.generate(table_of(prompts_of(num_rows)), (LONG,)))
        while not is_computing(handle):
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


class Background:
    """One call of `generate` in a thread."""

    def __init__(self, handle, prompts, client="default", sampling=SAMPLING):
        self.results = None
        self.error = None
        self._args = (handle, table_of(prompts), (sampling,), client)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.results = generate(*self._args)
        except Exception as error:
            self.error = error

    def join(self, timeout_s=240.0):
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("the call did not end")
        if self.error is not None:
            raise self.error
        return self.results


def make_feeder(handle):
    """Return an actor that calls the pool; defined here so that it is pickled by value."""

    @ray.remote(num_cpus=0.1)
    class Feeder:
        def __init__(self, handle):
            self._handle = handle

        def run(self, table, sampling):
            return asyncio.run(self._handle.generate(table, (sampling,))).num_rows

        def run_named(self, table, sampling, name):
            return asyncio.run(self._handle.generate(table, (sampling,), name=name))

    return Feeder.remote(handle)
