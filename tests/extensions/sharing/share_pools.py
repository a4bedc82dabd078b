"""Pools of a small model whose replicas share weights, and what their tests have in common."""

import threading
from contextlib import contextmanager

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from tests.actors import pools
from tests.actors.pools import Background, generate, table_of, tokens_of

ENGINE = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4}


def prompts_of(num_rows):
    """Return prompts of three tokens, which all small models know."""
    return [prompt % 40 for prompt in pools.prompts_of(num_rows)]


def spec_of(folder, *, pool, kind="native", **engine):
    """Return what a pool is made of; its replicas share weights where it has groups."""
    own = {"weights": "replicated" if pool.get("share_group") is None else "shared"}
    if kind == "native":
        own["compile_kernels"] = False
    return PoolSpec(
        model=str(folder),
        backend=BackendConfig(kind=kind),
        engine=EngineConfig(**ENGINE | own | engine),
        pool=PoolConfig(**pool),
    )


@contextmanager
def pools_of(folder, *, is_local=True, **engine):
    """Give a function that makes pools of this model, which end with the block."""
    handles = []

    def make(*, is_local=is_local, pool, **more):
        spec = spec_of(folder, pool=pool, **engine | more)
        handles.append(PoolHandle(spec, is_local=is_local))
        return handles[-1]

    try:
        yield make
    finally:
        for handle in handles:
            handle.shutdown()


def tokens_of_one(folder, prompts, sampling, **engine):
    """Return the tokens of the rows from one replica, which has all weights."""
    with pools_of(folder, **engine) as make:
        return tokens_of(generate(make(pool={"replicas": 1}), table_of(prompts), (sampling,)))


def has_restarted(handle, pids):
    """Whether as many others as these processes are there."""
    others = set(handle.state().pids) - set(pids)
    return len(others) == len(pids)


class Repeated(Background):
    """The same call again and again until `end`, so that no test depends on how long one takes."""

    def __init__(self, handle, prompts, sampling):
        self._is_over = threading.Event()
        self._tokens = []
        super().__init__(handle, prompts, sampling=sampling)

    def _run(self):
        while self.error is None and not self._is_over.is_set():
            super()._run()
            if self.error is None:
                self._tokens.append(tokens_of(self.results))

    def end(self):
        """Return the tokens of each call, the last of which has begun before this one."""
        self._is_over.set()
        self.join()
        return self._tokens


def unique(answers):
    """Return the answers without those that are as the first."""
    return answers[:1] + [answer for answer in answers[1:] if answer != answers[0]]
