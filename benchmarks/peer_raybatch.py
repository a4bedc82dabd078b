"""Peer: raybatch's native engine in this process, or a whole job on Ray; with or without a plan.

Variants: "engine", "job" and "pipeline" (Ray Data reads, maps and writes), alone and with the
suffix "-plan" or "-plan-multi".
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import meters
from peer_loop import Answer, PeerConfig, outputs, read_config, say_runs, serve, take_stdout
from workloads_e2e import TokenRequest

if TYPE_CHECKING:
    from planning import Plan

    from raybatch.backends.base import Backend
    from raybatch.config import BackendConfig, EngineConfig, PlanConfig
    from raybatch.records.types import Request
    from raybatch.stages.feeder import StageFeeder

PACKAGES = ("raybatch", "ray", "torch", "transformers", "numpy", "pyarrow")


def engine_config(config: PeerConfig) -> "EngineConfig":
    """Return the engine's options, with KV memory for the number of tokens of the other peers."""
    from raybatch.config import EngineConfig

    settings = config.settings
    return EngineConfig(
        dtype="float32",
        device="cpu",
        kv_cache_bytes=settings.kv_tokens * kv_bytes_per_token(Path(config.model)),
        block_size_tokens=settings.block_size,
        max_batched_tokens=settings.max_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        num_threads=settings.num_threads,
    )


def kv_bytes_per_token(model: Path) -> int:
    """Return the float32 bytes of keys and values of one position."""
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, layers = fields["num_key_value_heads"], fields["num_hidden_layers"]
    return int(2 * 4 * layers * heads * fields["head_dim"])


def plan_config(variant: str) -> "PlanConfig | None":
    """Return the plan's options of a variant such as "engine-plan"; None for one without a plan."""
    from raybatch.config import PlanConfig

    if variant.endswith("-plan"):
        return PlanConfig()
    return PlanConfig(sharing="multi_level") if variant.endswith("-plan-multi") else None


class NativeEngine:
    """The native backend, driven as a replica drives it; a fresh one for every run."""

    def __init__(self, config: PeerConfig) -> None:
        self._config = config
        self._backend = self._load()

    def reset(self) -> None:
        self._backend.close()
        self._backend = self._load()

    def warm_up(self, requests: Sequence[TokenRequest]) -> Answer:
        return self.generate(requests)

    def generate(self, requests: Sequence[TokenRequest]) -> Answer:
        plan = self._plan(requests)
        before = self._backend.stats()
        self._backend.submit(native_requests(requests, plan))
        token_ids: list[list[int]] = [[] for _ in requests]
        cached_tokens = 0
        while self._backend.num_unfinished():
            for completion in self._backend.poll():
                if completion.error:
                    raise RuntimeError(f"row {completion.request_id}: {completion.error}")
                token_ids[completion.request_id] = completion.token_ids.tolist()
                cached_tokens += completion.num_cached_tokens
        stats = self._backend.stats()
        return Answer(
            token_ids=token_ids,
            counters={
                "cached_tokens": cached_tokens,
                "preemptions": stats.num_preemptions - before.num_preemptions,
                "recomputed_tokens": stats.num_recomputed_tokens - before.num_recomputed_tokens,
                "steps": stats.num_steps - before.num_steps,
                "kv_tokens": self._backend.capacity().kv_tokens,
                **({"plan_s": plan.plan_s} if plan else {}),
            },
        )

    def _plan(self, requests: Sequence[TokenRequest]) -> "Plan | None":
        config = plan_config(self._config.variant)
        if config is None:
            return None
        from planning import plan_requests

        return plan_requests(requests, self._config.settings.block_size, config)

    def _load(self) -> "Backend":
        from raybatch.backends.registry import create_backend
        from raybatch.config import BackendConfig

        return create_backend(
            self._config.model, BackendConfig(kind="native"), engine_config(self._config)
        )


def native_requests(requests: Sequence[TokenRequest], plan: "Plan | None") -> "list[Request]":
    """Return the requests for the engine: in the given order, or grouped in planned order."""
    import numpy as np

    from raybatch.records.types import Request, Sampling

    samplings = {
        length: Sampling(max_tokens=length, ignore_eos=True)
        for length in {request.output_len for request in requests}
    }
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.asarray(requests[i].prompt_ids, np.int32),
            sampling=samplings[requests[i].output_len],
            group_id=plan.group_ids[i] if plan else None,
            prefix_len=plan.prefix_lens[i] if plan else 0,
        )
        for i in (plan.rows if plan else range(len(requests)))
    ]


def run_job(
    config: PeerConfig, engine: "EngineConfig", backend: "BackendConfig | None" = None
) -> list[dict[str, float]]:
    """Run the job of the config's options in one driver, as often as they require.

    Returns for each run its seconds, and the seconds that its engines worked.
    """
    import ray

    from raybatch import Job, LLMStage, PoolConfig, Sampling

    began = time.perf_counter()
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    runs = []
    for output in outputs(config):
        stage = LLMStage(
            config.model,
            tokenized_prompt="tokenized_prompt",
            sampling=Sampling(ignore_eos=True),
            overrides={"max_tokens": "output_len"},
            engine=engine,
            backend=backend or "native",
            pool=PoolConfig(replicas=config.options["replicas"]),
        )
        source, plan = config.options["input"], plan_config(config.variant)
        if config.variant.startswith("pipeline"):
            with EngineWindow(stage) as window:
                rows = ray.data.read_parquet(source)
                stage.apply(rows, plan=plan is not None).write_parquet(output)
            window_s = window.seconds
        else:
            window_s = Job(source, output, stage, plan=plan or "off").run().engines_s
        ended = time.perf_counter()
        runs.append({"wall_s": ended - began, "window_s": window_s})
        began = ended
    ray.shutdown()
    return runs


class EngineWindow(meters.Sampler):
    """Context manager that measures the time from the first row of a pool to its last answer."""

    def __init__(self, stage: "type[StageFeeder]") -> None:
        super().__init__(interval_s=0.1)
        self.seconds = 0.0
        self._stage = stage
        stage.pool.connect()
        # a stage that runs again still has the rows of earlier runs
        self._num_done = stage.stats().rows_done
        self._began_s: float | None = None

    def sample(self) -> None:
        stats, now_s = self._stage.stats(), time.perf_counter()
        if self._began_s is None and stats.num_ready and stats.rows_received > self._num_done:
            self._began_s = now_s
        if self._began_s is not None and stats.rows_done > self._num_done:
            self._num_done, self.seconds = stats.rows_done, now_s - self._began_s


def main() -> None:
    """Serve an engine, or run one job and answer with its seconds and versions."""
    config = read_config(sys.argv[1])
    if config.variant.startswith("engine"):
        serve(NativeEngine, PACKAGES)
        return
    answers = take_stdout()
    say_runs(answers, run_job(config, engine_config(config)), PACKAGES)


if __name__ == "__main__":
    main()
