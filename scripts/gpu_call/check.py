"""Checks the kernels: each op against torch, the far end of a large KV pool, captured steps."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from gpu_call.models import random_weights, shapes, spec_of
from gpu_call.stage import Stage, run_stage
from gpu_call.timing import graphs_on
from raybatch.bench.checkpoints import Shape
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.graph_sizes import GraphShape
from raybatch.engine.forward.ops_choice import check_ops, probe_step
from raybatch.engine.forward.step_graphs import StepGraphs
from raybatch.engine.memory.kv_cache import allocate_kv_cache
from raybatch.engine.weights.layout import ModelWeights
from raybatch.kernels.byte_numbers import FP8, INT8
from raybatch.kernels.dispatch import ops_for
from raybatch.models.config import ModelSpec

_BLOCK = {"cuda": 64, "cpu": 16}
# elements of a layer's KV pool: more than 32-bit offsets reach
_FAR_ELEMENTS = {"cuda": (1 << 31) + (1 << 24), "cpu": 1 << 18}
# sizes of captured steps: decodes, decodes over shared prefixes, and chunks
_CAPTURED = {"cuda": ((8, 64), (8, 64), (64, 512)), "cpu": ((2,), (8,), (16,))}
# dtypes of KV and of weights; None is the dtype of the model
_BYTES = {"8-bit KV": (INT8, None), "fp8 KV": (FP8, None), "8-bit weights": (None, torch.int8)}


def main(stage: Stage) -> None:
    models = shapes(is_gpu=stage.is_gpu)
    stage.put(ops={}, pool={}, captured={})
    # the interpreter takes ten seconds for each of these checks
    captured, far, kinds = models, models, _BYTES
    if not stage.is_gpu:
        captured, far, kinds = _only(models, "30B-A3B"), _only(models, "8B"), {}
    for name, shape in models.items():
        stage.attempt(f"{name}: ops", partial(_ops, stage, name, shape))
    for name, shape in captured.items():
        stage.attempt(f"{name}: captured steps", partial(_captured, stage, name, shape))
    for name, shape in far.items():
        stage.attempt(f"{name}: far pool", partial(_far_pool, stage, name, shape))
    for kind in kinds:
        for name, shape in models.items():
            stage.attempt(f"{name}: ops, {kind}", partial(_ops, stage, name, shape, kind))
    ops = stage.found["ops"]
    worst = max((each["error"] for found in ops.values() for each in found), default=0.0)
    count = sum(each["agrees"] for found in ops.values() for each in found)
    total = sum(map(len, ops.values()))
    stage.figure(
        f"{count} of {total} comparisons of ops with torch agree, largest error {worst:.2g}"
    )
    for what in ("captured", "pool"):
        stage.figure(f"{what}: {', '.join(f'{k} {v}' for k, v in stage.found[what].items())}")


def _only(models: Mapping[str, Shape], name: str) -> Mapping[str, Shape]:
    return {name: models[name]}


def _model(stage: Stage, shape: Shape, kind: str = "") -> tuple[ModelSpec, ModelWeights]:
    spec = spec_of(shape, num_layers=1)
    byte_dtype = _BYTES[kind][1] if kind else None
    return spec, random_weights(spec, torch.device(stage.device), torch.bfloat16, byte_dtype)


def _ops(stage: Stage, name: str, shape: Shape, kind: str = "") -> None:
    spec, weights = _model(stage, shape, kind)
    kv_dtype = (_BYTES[kind][0] if kind else None) or torch.bfloat16
    checks = check_ops(
        ops_for(torch.device("cuda")),
        spec,
        weights,
        block_size=_BLOCK[stage.device],
        kv_dtype=kv_dtype,
    )
    label = f"{name}, {kind}" if kind else name
    stage.found["ops"][label] = [
        {"op": each.name, "error": each.error, "agrees": each.agrees, "failure": each.failure}
        for each in checks
    ]
    for each in checks:
        if not each.agrees:
            stage.wrong(f"{label}: {each.name} {each.failure or f'differs by {each.error:.2g}'}")
    stage.put()


def _captured(stage: Stage, name: str, shape: Shape) -> None:
    """Capture each kind of step of one layer, and compare the results with torch's eager ops."""
    spec, weights = _model(stage, shape)
    device, block_size = torch.device(stage.device), _BLOCK[stage.device]
    decode, shared, mixed = _CAPTURED[stage.device]
    cache = allocate_kv_cache(
        spec, num_blocks=65, block_size=block_size, dtype=torch.bfloat16, device=device
    )
    graphs = StepGraphs(
        Decoder(spec, weights, ops=ops_for(torch.device("cuda"))),
        cache,
        shape=GraphShape(
            decode=decode,
            shared=shared,
            mixed=mixed,
            max_row_blocks=8,
            max_entries=1 << 12,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
        ),
        graphs=graphs_on(device),
    )
    graphs.check(Decoder(spec, weights))
    stage.found["captured"][name] = f"{graphs.counts.num_captured} steps equal torch"
    stage.put()


@torch.inference_mode()
def _far_pool(stage: Stage, name: str, shape: Shape) -> None:
    """Run the same step over the first and the last blocks of a pool; results must be equal."""
    spec, weights = _model(stage, shape)
    device, block_size = torch.device(stage.device), _BLOCK[stage.device]
    batch, num_used = probe_step(block_size, device)
    of_block = spec.num_kv_heads * block_size * spec.head_dim
    num_blocks = _FAR_ELEMENTS[stage.device] // of_block + num_used
    cache = allocate_kv_cache(
        spec, num_blocks=num_blocks, block_size=block_size, dtype=torch.bfloat16, device=device
    )
    decoder = Decoder(spec, weights, ops=ops_for(torch.device("cuda")))
    first = num_blocks - num_used
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for pool in (cache.k, cache.v):
        pool[:, :num_used].normal_(generator=generator)
        pool[:, first:] = pool[:, :num_used]
    for step in (batch, _moved(batch, first, block_size)):
        made.append(decoder.forward(step, cache))
    stored = all(torch.equal(pool[:, first:], pool[:, :num_used]) for pool in (cache.k, cache.v))
    is_equal = torch.equal(*made) and bool(made[0].isfinite().all())
    text = f"{cache.k[0].numel() / 2**31:.3g} x 2^31 elements"
    stage.found["pool"][name] = f"{text}: {'equal' if is_equal and stored else 'DIFFER'}"
    if not (is_equal and stored):
        what = "outputs" if stored else "stored keys and values"
        stage.wrong(f"{name}: {what} of the last blocks of a pool of {text} differ from the first")
    stage.put()


def _moved(batch: ForwardBatch, num_blocks: int, block_size: int) -> ForwardBatch:
    """Return the step with all its blocks moved by `num_blocks`."""
    plan = batch.attention
    assert plan.decode is not None, "the step has decodes"
    segments = tuple(replace(part, block_ids=part.block_ids + num_blocks) for part in plan.segments)
    decode = replace(plan.decode, block_ids=plan.decode.block_ids + num_blocks)
    return replace(
        batch,
        slot_mapping=batch.slot_mapping + num_blocks * block_size,
        attention=replace(plan, decode=decode, segments=segments),
    )


if __name__ == "__main__":
    run_stage("check", main)
