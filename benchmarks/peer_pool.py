"""Peer: raybatch's pool of engine actors on a local Ray, loaded and warm; with or without a plan.

Measures one replica and two replicas on the same requests, without the start and the files of a
job. One process measures one run, because a pool cannot drop the KV of an earlier run.
"""

import asyncio
import time
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import ray
from peer_loop import Answer, PeerConfig, serve
from peer_raybatch import PACKAGES, engine_config, plan_config
from planning import Plan, plan_requests
from workloads_e2e import TokenRequest

from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.columns import decode_completions, request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, PoolConfig
from raybatch.records.types import Completion, Sampling

# rows that a feeder hands over at once if there are few
ROWS_PER_BATCH = 16
START_TIMEOUT_S = 300.0


class PoolEngine:
    """Starts a pool, waits until all replicas are ready, and runs requests on it."""

    def __init__(self, config: PeerConfig) -> None:
        replicas = int(config.options["replicas"])
        self._config = config
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        self._handle = PoolHandle(
            PoolSpec(
                model=config.model,
                backend=BackendConfig(kind="native"),
                engine=engine_config(config),
                pool=PoolConfig(replicas=replicas),
            )
        )
        self._handle.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while (num_ready := self._handle.stats().num_ready) < replicas:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"only {num_ready} of {replicas} replicas were ready after {START_TIMEOUT_S} s"
                )
            time.sleep(0.1)

    def reset(self) -> None:
        """Do nothing: the warm-up has other tokens, and each process measures only one run."""

    def warm_up(self, requests: Sequence[TokenRequest]) -> Answer:
        return self.generate(requests)

    def generate(self, requests: Sequence[TokenRequest]) -> Answer:
        before = self._handle.state().finished_by_pid
        plan = self._plan(requests)
        rows = plan.rows if plan else list(range(len(requests)))
        in_turn = asyncio.run(self._generate(requests, rows, plan))
        completions = [c for _, c in sorted(zip(rows, in_turn, strict=True), key=itemgetter(0))]
        after = self._handle.state().finished_by_pid
        failed = [c.error for c in completions if c.error]
        if failed:
            raise RuntimeError(f"{len(failed)} rows failed: {failed[0]}")
        return Answer(
            token_ids=[completion.token_ids.tolist() for completion in completions],
            counters={
                "cached_tokens": sum(c.num_cached_tokens for c in completions),
                "fewest_rows_of_a_replica": min(after[pid] - before.get(pid, 0) for pid in after),
            },
        )

    def _plan(self, requests: Sequence[TokenRequest]) -> Plan | None:
        config = plan_config(self._config.variant)
        if config is None:
            return None
        return plan_requests(requests, self._config.settings.block_size, config)

    async def _generate(
        self, requests: Sequence[TokenRequest], rows: Sequence[int], plan: Plan | None
    ) -> list[Completion]:
        """Hand over the requests `rows` in turn; return their completions in the same order."""
        lengths = sorted({request.output_len for request in requests})
        samplings = tuple(Sampling(max_tokens=n, ignore_eos=True) for n in lengths)
        tables = []
        for start in range(0, len(rows), ROWS_PER_BATCH):
            batch = rows[start : start + ROWS_PER_BATCH]
            tables.append(
                request_table(
                    [str(row) for row in batch],
                    [np.asarray(requests[row].prompt_ids, np.int32) for row in batch],
                    sampling=[lengths.index(requests[row].output_len) for row in batch],
                    group_ids=[plan.group_ids[row] for row in batch] if plan else None,
                    prefix_lens=[plan.prefix_lens[row] for row in batch] if plan else None,
                )
            )
        results = await asyncio.gather(*(self._handle.generate(t, samplings) for t in tables))
        return [completion for result in results for completion in decode_completions(result)]


if __name__ == "__main__":
    serve(PoolEngine, PACKAGES)
