"""What two ranks of vLLM on a CPU lack, and what a process with such ranks tells a test."""

import time

import psutil
import torch

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig


def all_gatherv(self, input_, dim=0, sizes=None):
    """Gather tensors whose first dimensions differ between ranks."""
    if isinstance(input_, (list, tuple)):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    padded = torch.zeros((max(sizes), *input_.shape[1:]), dtype=input_.dtype)
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(self, input_, dim=0, sizes=None):
    """Add tensors of all ranks, and keep the rows of this one."""
    total = input_.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].contiguous()


def tell(folder):
    """Run two ranks until one of them dies, and return what became of their rows."""
    from tests.backends.test_vllm_ranks import ENGINE, GROUPS, request, rows, run

    config = BackendConfig(kind="vllm", options={"engine_kwargs": {"data_parallel_size": 2}})
    backend = create_backend(folder, config, EngineConfig(**ENGINE))
    capacity = backend.capacity()
    reported = {"max_num_seqs": capacity.max_num_seqs, "kv_tokens": capacity.kv_tokens}

    backend.submit(rows())
    ended = {c.request_id: c for c in backend.poll()}
    # the keys of samples count from 1
    sent = {int(key) - 1: each.rank for key, each in backend._engine._requests.items()}
    reported["ranks"] = [sent.get(i) for i in range(4 * len(GROUPS))]
    ended |= run(backend)
    reported["tokens"] = {i: c.token_ids.tolist() for i, c in ended.items()}
    stats = backend.stats()
    reported["counted"] = [stats.generated_tokens, stats.num_running, stats.num_waiting]
    reported["cached"] = [ended[i].num_cached_tokens for i in sorted(ended)]

    backend.submit(rows()[:1])
    while not backend.checkpoint(3):
        backend.poll()
    stats = backend.stats()
    reported["under_way"] = [stats.num_running, stats.num_waiting]
    backend.restore(backend.export([0]))
    reported["moved"] = run(backend)[0].token_ids.tolist()

    backend.submit([request(50, GROUPS[0], logprobs=21)])
    reported["refused"] = run(backend)[50].error

    backend.submit([request(60, GROUPS[0], max_tokens=300)])
    backend.poll()
    processes = [p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]
    reported["processes"] = [p.pid for p in processes]
    for process in processes:
        process.suspend()
    # what they have sent before is read first
    reported["steps_while_stopped"] = -_steps_after(backend, 1.0) + _steps_after(backend, 0.5)
    for process in processes:
        process.resume()
    next(p for p in processes if "DP1" in p.name()).kill()
    reported["after_a_death"] = _failure(backend)
    return reported


def _steps_after(backend, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        backend.poll()
    return backend.stats().num_steps


def _failure(backend):
    """Return the name of what polling raises within half a minute, "" for nothing."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            backend.poll()
        except Exception as error:
            return type(error).__name__
    return ""
