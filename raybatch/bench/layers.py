"""Layers of a model on a device: ops beside their references, times beside the least possible."""

from dataclasses import dataclass, replace
from pathlib import Path

from raybatch.bench.machine import Limits
from raybatch.config import EngineConfig
from raybatch.engine.forward.ops_choice import OpCheck, check_ops, pick_ops
from raybatch.engine.loading.loaded_model import LoadedModel, load_model
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import profile_layer
from raybatch.kernels.dispatch import ops_for
from raybatch.policy.layer_plan import Workload

_KINDS = {
    "decode over 512": Workload(cached_tokens=511),
    "decode over 4,096": Workload(cached_tokens=4095),
    "prefill of 512": Workload(tokens_per_sequence=512),
}
_MAX_KV_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """One module of a layer at one size; `share` is its least possible time over its time."""

    module: str
    tokens: int
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """What was found of one model's layers."""

    ops: tuple[OpCheck, ...]
    times: tuple[LayerTime, ...]
    # modules with the sizes for which there was no time or memory
    not_timed: tuple[str, ...] = ()


def measure_layers(
    folder: Path, engine: EngineConfig, limits: Limits, *, budget_s: float
) -> LayerFigures:
    """Compare the ops of a model with their references, and time its modules.

    Raises ConfigError: the model or an option cannot be run.
    """
    model = load_model(str(folder), engine)
    block_size = engine.block_size_tokens
    if model.device.type == "cuda":
        form = ops_for(model.device)
    else:
        form = pick_ops(model.spec, model.weights, block_size=block_size, may_compile=True)
    ops = check_ops(
        form, model.spec, model.weights, block_size=block_size, kv_dtype=model.resolved.kv_dtype
    )
    times, not_timed = _times(model, engine, limits, budget_s)
    return LayerFigures(ops=tuple(ops), times=times, not_timed=not_timed)


def _times(
    model: LoadedModel, engine: EngineConfig, limits: Limits, budget_s: float
) -> tuple[tuple[LayerTime, ...], tuple[str, ...]]:
    """Time attention with its linears, and the feed-forward block; also return what was not."""
    is_gpu = model.device.type == "cuda"
    sizes = (1, 16, 64, 256, 1024) if is_gpu else (1, 16, 64)
    options = replace(
        profile_options(engine),
        workloads=tuple(_KINDS.values()),
        attention_tokens=sizes,
        ffn_tokens=(*sizes, 4096) if is_gpu else sizes,
        budget_s=budget_s,
        max_kv_bytes=_MAX_KV_BYTES[model.device.type],
    )
    profile = profile_layer(model.spec, model.weights, options)
    layer = profile.model.layer
    names = {
        (n, layer.attention_work(n, kind)): name for name, kind in _KINDS.items() for n in sizes
    }
    attention = (
        (f"attention, {names[point.tokens, point.work]}", point) for point in profile.attention
    )
    blocks = "experts" if layer.num_experts > 1 else "feed-forward"
    asked = {f"attention, {name}": sizes for name in _KINDS} | {blocks: options.ffn_tokens}
    order = list(asked)
    times = tuple(
        LayerTime(
            module=module,
            tokens=point.tokens,
            seconds=point.seconds,
            share=limits.least_s(point.work) / point.seconds,
        )
        for module, point in sorted(
            [*attention, *((blocks, point) for point in profile.ffn)],
            key=lambda timed: (order.index(timed[0]), timed[1].tokens),
        )
    )
    done = {(each.module, each.tokens) for each in times}
    missing = {module: [n for n in ns if (module, n) not in done] for module, ns in asked.items()}
    not_timed = (f"{m} of {', '.join(map(str, ns))} tokens" for m, ns in missing.items() if ns)
    return times, tuple(not_timed)
