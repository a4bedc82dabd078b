"""Compiles the kernels of both models' engines, in many processes and before any engine starts.

Steps of every captured size run on meta tensors, and kernel launches are recorded instead of made.
The compiled kernels go into Triton's cache, where the processes of the next stages find them. Needs
no GPU.
"""

import multiprocessing
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gpu_call.cache import relocate
from gpu_call.kernels import Bench, Work, run_all
from gpu_call.models import TOY, random_weights, shapes, spec_of
from gpu_call.stage import Stage, num_processors, run_stage
from gpu_call.timing import RepeatedCalls
from raybatch.bench.checkpoints import Shape
from raybatch.bench.machine import Limits
from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import NUM_DECODES, probe_step, steps_of_forms
from raybatch.engine.forward.step_graphs import (
    StepGraphs,
    checked_step,
    graph_shape,
    max_decode_rows,
)
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.kernels.byte_numbers import FP8, INT8, row_width
from raybatch.kernels.dispatch import ops_for
from raybatch.models.config import ModelSpec
from tests.kernels.triton.compile_kernels import Recorder, run_draws

_META = torch.device("meta")
_BLOCK, _NUM_BLOCKS = 64, 64
# options of the engines that the later stages start
ENGINE = EngineConfig(max_batched_tokens=8192, max_num_seqs=256, kv_offload=False)
CHECKED_ENGINE = EngineConfig(max_batched_tokens=64, max_num_seqs=8, kv_offload=False)
# without a GPU, compiling this number of kernels shows that the stage works
_FEW = 3
_LONG_S = 1e4
_MOST_PROCESSES = 32


def main(stage: Stage) -> None:
    began = time.monotonic()
    num_found = relocate(cache_folder())
    major, minor = _capability(stage)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    launches = noted_launches(is_gpu=stage.is_gpu, target=target)
    noted_s = time.monotonic() - began
    by_kernel = Counter(kernel.__name__ for kernel, _ in launches)
    chosen = launches if stage.is_gpu else launches[:_FEW]
    stage.put(forms=by_kernel, noted_s=noted_s, num_carried=num_found, target=str(target), made=[])
    num_processes = max(1, min(_MOST_PROCESSES, num_processors() - 2)) if stage.is_gpu else 2
    # forked, because launches hold functions, and arguments of a spawned process are pickled
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        num_processes, context, initializer=_begin, initargs=(chosen, target)
    ) as pool:
        # a process that dies raises here
        for made in (each.result() for each in as_completed(_begun(pool, len(chosen)))):
            stage.found["made"].append(made)
            if made["error"]:
                stage.found["failed"].append(f"{made['kernel']}: {made['error']}")
            stage.put()
    made = stage.found["made"]
    hits = sum(each["was_there"] for each in made)
    seconds = time.monotonic() - began
    stage.figure(
        f"{len(made)} of {len(launches)} forms, {hits} of them in the cache; {seconds:.0f} s "
        f"by {num_processes} processes, {sum(each['seconds'] for each in made):.0f} s of work"
    )
    most = ", ".join(f"{name} {count}" for name, count in by_kernel.most_common(5))
    stage.figure(f"most forms: {most}")


def _begun(pool: ProcessPoolExecutor, number: int) -> list[Future[dict[str, Any]]]:
    return [pool.submit(_compile, idx) for idx in range(number)]


# state of a forked process: the launches that it compiles, and the target
_given: dict[str, Any] = {}


def _begin(launches: list[tuple[Any, Any]], target: GPUTarget) -> None:
    _given.update(launches=launches, target=target)


def _compile(idx: int) -> dict[str, Any]:
    kernel, (options, signature, constants, attributes) = _given["launches"][idx]
    seen: list[bool] = []
    triton.knobs.compilation.listener = lambda **facts: seen.append(facts["cache_hit"])
    began, error = time.monotonic(), ""
    try:
        source = ASTSource(kernel, signature, constants, attributes)
        triton.compile(source, target=_given["target"], options=options.__dict__)
    # any exception of the compiler is a result
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:400]
    return {
        "kernel": kernel.__name__,
        "seconds": time.monotonic() - began,
        "was_there": any(seen),
        "error": error,
    }


def noted_launches(*, is_gpu: bool, target: GPUTarget) -> list[tuple[Any, Any]]:
    """Return each different launch: a kernel, and the arguments of its compilation."""
    recorder = Recorder(target)
    plain_run = JITFunction.run
    JITFunction.run = lambda kernel, *args, **kwargs: recorder.launch(kernel, *args, **kwargs)
    try:
        for step in _steps(is_gpu=is_gpu):
            step()
    finally:
        JITFunction.run = plain_run
    return list(recorder.launches.values())


def _steps(*, is_gpu: bool) -> Iterator[Any]:
    yield run_draws
    models = shapes(is_gpu=is_gpu)
    for shape in models.values():
        yield from _steps_of(shape, torch.bfloat16, ENGINE if is_gpu else CHECKED_ENGINE)
    if is_gpu:
        yield _timed_kernels
        yield from _steps_of(TOY, torch.float32, CHECKED_ENGINE)
        for kv_dtype, byte_dtype in ((INT8, None), (FP8, None), (None, torch.int8)):
            for shape in models.values():
                yield _check(shape, torch.bfloat16, kv_dtype, byte_dtype)


def _steps_of(shape: Shape, dtype: torch.dtype, config: EngineConfig) -> Iterator[Any]:
    """Return the start of an engine: checks of ops, forms, and captures."""
    yield _check(shape, dtype)
    # one ordinary layer, and the last layer, which drops rows without logits
    spec = spec_of(shape, num_layers=2)
    decoder = Decoder(spec, random_weights(spec, _META, dtype), ops=ops_for(torch.device("cuda")))
    cache, captured = _cache(spec, dtype), graph_shape(config, spec)
    yield partial(StepGraphs, decoder, cache, shape=captured, graphs=RepeatedCalls())
    checked = (checked_step(size, cache.k, spec.vocab_size) for size in captured.sizes().all())
    forms = steps_of_forms(
        spec, block_size=_BLOCK, max_tokens=config.token_budget, max_rows=max_decode_rows(config)
    )
    for batch in chain(forms, checked):
        if batch is not None:
            yield partial(decoder.forward, _on_meta(batch), cache)


def _on_meta(batch: ForwardBatch) -> ForwardBatch:
    names = ("token_ids", "positions", "slot_mapping", "logits_idx")
    return replace(batch, **{name: getattr(batch, name).to(_META) for name in names})


def _check(
    shape: Shape,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    byte_dtype: torch.dtype | None = None,
) -> Any:
    """Return a function that runs the step of `check_ops`, and the modules that it runs alone."""
    spec = spec_of(shape, num_layers=1)

    def run() -> None:
        weights = random_weights(spec, _META, dtype, byte_dtype)
        decoder = Decoder(spec, weights, ops=ops_for(torch.device("cuda")))
        batch, num_blocks = probe_step(_BLOCK, _META)
        decoder.forward(batch, _cache(spec, kv_dtype or dtype, num_blocks))
        few = torch.empty(NUM_DECODES, spec.model_dim, dtype=dtype, device=_META)
        decoder.ffn_(0, few)
        decoder.logits(few)

    return run


class NotedBench(Bench):
    """Launches once all kernels that the stage `kernels` times."""

    def measured(self, work: Work) -> dict[str, float]:
        work.runs[0]()
        return {"us": 1.0, "floor_us": 1.0, "share": 1.0}

    def error(self, made: torch.Tensor, expected: torch.Tensor) -> float:
        return 0.0


def _timed_kernels() -> None:
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(
            name="noted", device="cuda", end=time.monotonic() + _LONG_S, work=Path(folder)
        )
        # nothing is timed
        limits = Limits(dtype="bfloat16", operations_per_s=1.0, bytes_per_s=1.0)
        run_all(NotedBench(stage, _META, limits))


def _cache(spec: ModelSpec, dtype: torch.dtype, num_blocks: int = _NUM_BLOCKS) -> KVCache:
    width = row_width(spec.head_dim, dtype)
    shape = spec.num_layers, num_blocks, spec.num_kv_heads, _BLOCK, width
    return KVCache(
        k=torch.empty(shape, dtype=dtype, device=_META),
        v=torch.empty(shape, dtype=dtype, device=_META),
    )


def _capability(stage: Stage) -> tuple[int, int]:
    """Return the GPU's compute capability without starting its driver; an H100's without a GPU."""
    if not stage.is_gpu or shutil.which("nvidia-smi") is None:
        return 9, 0
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        major, _, minor = done.stdout.split()[0].partition(".")
        return int(major), int(minor)
    # a driver that does not answer must not keep the other stages from their kernels
    except (subprocess.SubprocessError, ValueError, IndexError):
        return 9, 0


def cache_folder() -> Path:
    return Path(triton.knobs.cache.dir)


if __name__ == "__main__":
    run_stage("forms", main)
