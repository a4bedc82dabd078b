"""Times captured steps of a whole model against the floor, and the host's part; profiles two."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_call.ceilings import measured_limits
from gpu_call.models import random_weights, shapes, spec_of
from gpu_call.stage import Stage, run_stage
from gpu_call.steps_of_rows import Groups, decode_step, grouped_step, mixed_step, num_blocks
from gpu_call.timing import graphs_on
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.graph_sizes import GraphShape
from raybatch.engine.forward.step_graphs import StepGraphs
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.weights.layout import tensors_of
from raybatch.kernels.dispatch import ops_for
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.roofline import Work

_NUM_RUNS = {"cuda": 12, "cpu": 1}
_TOP = 25


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step, and the lengths of its decodes and prompts."""

    batch: ForwardBatch
    lens: Sequence[int]
    prompts: Sequence[int] = ()
    # fewest KV positions that the decodes read; a group reads its shared prefix once
    num_read: int

    def operations(self, spec: ModelSpec) -> float:
        """Return the least operations; after its keys, the last layer needs only logits rows."""
        rows, logits = len(self.batch.token_ids), len(self.batch.logits_idx)
        pairs = sum(self.lens) + sum(n * (n + 1) / 2 for n in self.prompts)
        # in the last layer, each prompt needs only its last query
        last_pairs = sum(self.lens) + sum(self.prompts)
        of_pair = 4 * spec.num_heads * spec.head_dim
        q_numbers = spec.model_dim * spec.num_heads * spec.head_dim
        kv_numbers = 2 * spec.model_dim * spec.num_kv_heads * spec.head_dim
        # q and o, then gate, up and down
        numbers = 2 * q_numbers + 3 * spec.model_dim * spec.ffn_dim
        others = spec.num_layers - 1
        return (
            others * (of_pair * pairs + 2 * rows * (numbers + kv_numbers))
            + of_pair * last_pairs
            + 2 * rows * kv_numbers
            + 2 * logits * (numbers + spec.vocab_size * spec.model_dim)
        )


def main(stage: Stage) -> None:
    device = torch.device(stage.device)
    spec = spec_of(shapes(is_gpu=stage.is_gpu)["8B"])
    block_size = 64 if stage.is_gpu else 16
    cases = _cases(stage, block_size)
    weights = random_weights(spec, device, torch.bfloat16)
    needed = max(num_blocks(case.batch, block_size) for case in cases.values())
    cache = allocate_kv_cache(
        spec, num_blocks=needed + 1, block_size=block_size, dtype=torch.bfloat16, device=device
    )
    for pool in (cache.k, cache.v):
        pool.normal_()
    began = time.monotonic()
    graphs = StepGraphs(
        Decoder(spec, weights, ops=ops_for(torch.device("cuda"))),
        cache,
        shape=_shape(stage, spec, block_size),
        graphs=graphs_on(device),
    )
    stage.put(capture_s=time.monotonic() - began, steps={})
    layer_bytes = sum(x.nbytes for x in tensors_of(weights.layers))
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * torch.bfloat16.itemsize
    limits = measured_limits(stage)
    for name, case in cases.items():
        found = stage.attempt(name, partial(_timed, stage, graphs, case), needs_s=3)
        if found is None:
            continue
        read = (case.num_read + sum(case.prompts)) * kv_bytes + layer_bytes
        floor_s = limits.least_s(
            Work(operations=case.operations(spec), moved_bytes=read + weights.head.weight.nbytes)
        )
        share = 1e3 * floor_s / found["step_ms"]
        stage.found["steps"][name] = {**found, "floor_ms": 1e3 * floor_s, "share": share}
        stage.figure(
            f"{name}: {found['step_ms']:.3g} ms, {share:.0%} of the floor; host "
            f"{found['host_ms']:.2g} ms"
        )
    _beside_engine(stage)
    stage.attempt("profile", partial(_profile, stage, graphs, cases), needs_s=8)


def _cases(stage: Stage, block_size: int) -> dict[str, Case]:
    decodes, length, prompt = (256, 544, 480) if stage.is_gpu else (2, 20, 6)
    few = decodes // 4 or 1
    found = {
        f"decode {decodes}x{length}": Case(
            batch=decode_step([length] * decodes, block_size),
            lens=[length] * decodes,
            num_read=length * decodes,
        )
    }
    for tokens in (2048, 8192) if stage.is_gpu else (8,):
        prompts = _prompts(tokens - few, prompt)
        found[f"mixed {tokens}"] = Case(
            batch=mixed_step([length] * few, prompts, block_size),
            lens=[length] * few,
            prompts=prompts,
            num_read=length * few,
        )
    groups = (
        Groups(num_rows=256, rows_per_group=16, shared_tokens=1024, own_tokens=96)
        if stage.is_gpu
        else Groups(num_rows=2, rows_per_group=2, shared_tokens=16, own_tokens=4)
    )
    name = f"{groups.num_rows} in groups of {groups.rows_per_group} over {groups.shared_tokens}"
    numbers = {"lens": groups.lens, "num_read": groups.num_read}
    found[f"decode {name}"] = Case(batch=grouped_step(groups, block_size), **numbers)
    tokens = 2048 if stage.is_gpu else 8
    prompts = _prompts(tokens - groups.num_rows, prompt)
    batch = mixed_step(groups, prompts, block_size)
    found[f"mixed {tokens} with {name}"] = Case(batch=batch, prompts=prompts, **numbers)
    return found


def _prompts(num_tokens: int, length: int) -> list[int]:
    """Return lengths of prompts that fill a step; the last may be shorter."""
    whole, left = divmod(num_tokens, length)
    return [length] * whole + [left] * (left > 0)


def _shape(stage: Stage, spec: ModelSpec, block_size: int) -> GraphShape:
    is_gpu = stage.is_gpu
    return GraphShape(
        decode=(256,) if is_gpu else (2,),
        shared=(256,) if is_gpu else (8,),
        mixed=(2048, 8192) if is_gpu else (8,),
        max_row_blocks=(8192 if is_gpu else 64) // block_size,
        max_entries=1 << 20 if is_gpu else 1 << 8,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
    )


def _timed(stage: Stage, graphs: StepGraphs, case: Case) -> dict[str, float]:
    """Return the milliseconds of a step on the device, and of its launch on the host."""
    if graphs.run(case.batch) is None:
        raise RuntimeError(f"no graph fits the step: {dict(graphs.counts.eager_steps)}")
    num_runs = _NUM_RUNS[stage.device]
    # warm up: each index buffer is allocated at its first use
    for _ in range(num_runs):
        graphs.run(case.batch)
    _wait(stage)
    began = time.perf_counter()
    for _ in range(num_runs):
        graphs.run(case.batch)
    _wait(stage)
    whole_s, host_s = time.perf_counter() - began, []
    for _ in range(num_runs):
        # without this, the host would wait for a buffer that the device still reads
        _wait(stage)
        began = time.perf_counter()
        graphs.run(case.batch)
        host_s.append(time.perf_counter() - began)
    return {"step_ms": 1e3 * whole_s / num_runs, "host_ms": 1e3 * statistics.median(host_s)}


def _beside_engine(stage: Stage) -> None:
    """Report the share of an engine's decode step outside the graph: host work and sampling."""
    host = stage.of("engine").get("host_steps")
    steps = [each for name, each in stage.found["steps"].items() if name.startswith("decode")]
    if host and steps:
        outside = max(0.0, 1 - steps[0]["step_ms"] / host["step_ms"])
        stage.put(share_outside=outside)
        stage.figure(
            f"an engine's step takes {host['step_ms']:.3g} ms, {outside:.0%} outside of the graph"
        )


def _profile(stage: Stage, graphs: StepGraphs, cases: dict[str, Case]) -> None:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * stage.is_gpu
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in list(cases)[:2]:
        with profile(activities=activities) as profiler:
            graphs.run(cases[name].batch)
            _wait(stage)
        tables[name] = _top(profiler, is_gpu=stage.is_gpu)
        # the trace of the mixed step, which has all kernels, overwrites the first
        profiler.export_chrome_trace(str(stage.work / "trace.json.gz"))
    stage.put(profile=tables)


def _top(profiler: profile, *, is_gpu: bool) -> list[dict[str, Any]]:
    field = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda each: -getattr(each, field))
    return [
        {"name": each.key[:120], "us": getattr(each, field), "count": each.count}
        for each in events[:_TOP]
    ]


def _wait(stage: Stage) -> None:
    if stage.is_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_stage("steps", main)
