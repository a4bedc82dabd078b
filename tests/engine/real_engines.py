"""Engines over a tiny real model, which is loaded once for each form of its runner."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token, pick_kv_dtype
from raybatch.engine.sampling.sampler import Sampler
from raybatch.models.config import read_model_spec
from raybatch.records.types import Completion, Request, Sampling

# what changes the runner of an engine, and not its scheduler alone
_RUNNER_OPTIONS = (
    "block_size_tokens",
    "compile_kernels",
    "dtype",
    "kv_cache_bytes",
    "kv_cache_dtype",
    "kv_offload",
    "host_kv_bytes",
    "host_kv_dtype",
)


class NoStops:
    """A stop checker for requests without stop strings."""

    def add(self, *_) -> None:
        pass

    def remove(self, *_) -> None:
        pass


class Engines:
    """Engines of one checkpoint; those with the same runner must not run at the same time.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runners: dict[tuple[object, ...], ModelRunner] = {}

    def config(self, *, num_blocks: int = 400, num_host_blocks: int = 0, **options) -> EngineConfig:
        """Return options in which memory is counted in blocks."""
        config = EngineConfig(
            **{"device": "cpu", "dtype": "float32", "host_kv_bytes": num_host_blocks or None}
            | options
        )
        dtype = pick_kv_dtype(config.kv_cache_dtype, getattr(torch, config.dtype))
        token_bytes = kv_bytes_per_token(read_model_spec(self._path), dtype)
        block_bytes = config.block_size_tokens * token_bytes
        return replace(
            config,
            kv_cache_bytes=num_blocks * block_bytes,
            host_kv_bytes=num_host_blocks * block_bytes or None,
        )

    def make(self, config: EngineConfig) -> Engine:
        """Return an idle engine, whose pool holds what others left there."""
        key = tuple(getattr(config, name) for name in _RUNNER_OPTIONS)
        if key not in self._runners:
            self._runners[key] = ModelRunner.load(str(self._path), config)
        runner = self._runners[key]
        slots = min(config.max_num_seqs, config.token_budget)
        sampler = Sampler(runner.spec.vocab_size, slots, runner.spec.eos_token_ids)
        return Engine(runner, sampler, NoStops(), config)


def requests_of(prompts, *, plan=None, **sampling) -> list[Request]:
    """Return a request for each prompt; `plan` has a group and a prefix length for each."""
    options = Sampling(**{"max_tokens": 4} | sampling)
    groups = plan or [(None, 0)] * len(prompts)
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=options,
            seed=i,
            group_id=group_id,
            prefix_len=prefix_len,
        )
        for i, (prompt, (group_id, prefix_len)) in enumerate(zip(prompts, groups, strict=True))
    ]


def run(
    engine: Engine, requests: list[Request], *, num_late: int = 0
) -> dict[tuple[int, int], Completion]:
    """Run an engine until it is empty and its books are checked.

    Args:
        engine: idle.
        requests: in the order in which they come.
        num_late: of the requests, the last ones, of which one comes after every second step.
    """
    late = requests[len(requests) - num_late :]
    engine.add(requests[: len(requests) - num_late])
    done, num_steps = {}, 0
    while engine.num_unfinished() or late:
        for completion in engine.step():
            done[completion.request_id, completion.sample_idx] = completion
        num_steps += 1
        if late and num_steps % 2 == 0:
            engine.add([late.pop(0)])
    engine.check()
    return done


def tokens_of(done: dict[tuple[int, int], Completion]) -> dict[tuple[int, int], list[int]]:
    """Return the tokens by request and sample, after none has failed."""
    errors = {key: completion.error for key, completion in done.items() if completion.error}
    assert not errors, errors
    return {key: completion.token_ids.tolist() for key, completion in sorted(done.items())}
