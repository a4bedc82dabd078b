"""Forecasts the gain of KV in host memory on an H100 from published rates; runs nothing.

A step is the steady state of a long job: rows that decode, and as many prompt tokens as keep the
number of rows. Figures of NVIDIA's data sheets: H100 SXM5, 3.35 TB/s of HBM3 and 989 TFLOP/s of
dense bfloat16; PCIe gen 5 x16, 64 GB/s each way; NVLink-C2C of a GH200, 450 GB/s each way. The
shares of these rates that kernels and links reach are assumptions (below). Nothing is measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import models
import numpy as np

from raybatch.bench.checkpoints import Shape
from raybatch.policy.cost.layers import (
    KV_SLOTS,
    KVBuffer,
    LayerShape,
    ModelShape,
    ModuleCosts,
    RowsAhead,
    RowShape,
    StepCounts,
    step_seconds,
)
from raybatch.policy.cost.roofline import Roofline, link
from raybatch_extensions.sharing.decode_times import COMPUTE_SHARE, MEMORY_SHARE

# share of its published rate that a link reaches
LINK_SHARE = 0.86
FLOPS, HBM_BYTES_S = 989e12, 3.35e12
LINKS = {"PCIe gen 5": 64e9, "NVLink-C2C": 450e9}
# seconds of a module's launches in a layer that no graph hides, of a copy, and of the host per step
_MODULE_S, _COPY_S, _STEP_S = 2e-5, 1e-5, 1e-3
PROMPT_TOKENS, OUTPUT_TOKENS, HOST_ROWS = 512, 128, 1024
DEVICE_ROWS = (8, 32, 128)
# least speed-up with which KV in host memory pays
_LEAST_GAIN = 1.05
_FREE = Roofline(fixed_s=0.0, operation_s=0.0, byte_s=0.0)
# published sizes of models; shared experts and latent attention are left out
PUBLISHED = {
    "Mixtral 8x7B": Shape(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        num_experts=8,
        experts_per_token=2,
        vocab_size=32_000,
    ),
    "Qwen3-30B-A3B": Shape(
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_size=768,
        num_experts=128,
        experts_per_token=8,
    ),
    "DeepSeekMoE 16B": Shape(
        hidden_size=2048,
        num_layers=28,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        ffn_size=1408,
        num_experts=64,
        experts_per_token=6,
        vocab_size=102_400,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Output tokens per second with KV on the device, and with KV in host memory."""

    model: str
    link: str
    device_rows: int
    on_device: float
    on_host: float


def model_shape(shape: Shape) -> ModelShape:
    """Return a checkpoint's sizes in bfloat16 in the form of the cost model."""
    layer = LayerShape(
        model_dim=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_dim=shape.ffn_size,
        num_experts=max(1, shape.num_experts),
        top_k=max(1, shape.experts_per_token),
        element_bytes=2,
    )
    table_bytes = 2 * shape.vocab_size * shape.hidden_size
    return ModelShape(
        layer=layer,
        num_layers=shape.num_layers,
        other_bytes=2 * table_bytes,
        head_bytes=table_bytes,
    )


def costs_of(link_bytes_s: float) -> ModuleCosts:
    module = Roofline(
        fixed_s=_MODULE_S,
        operation_s=1 / (COMPUTE_SHARE * FLOPS),
        byte_s=1 / (MEMORY_SHARE * HBM_BYTES_S),
    )
    copies = link(LINK_SHARE * link_bytes_s, fixed_s=_COPY_S)
    return ModuleCosts(attention=module, ffn=module, to_device=copies, to_host=copies)


def tokens_per_s(
    model: ModelShape, costs: ModuleCosts, rows: int, buffer: KVBuffer | None = None
) -> float:
    """Return output tokens per second if `rows` rows decode together."""
    shape = RowShape(prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS)
    counts = StepCounts.of(
        RowsAhead(shape=shape),
        np.array([float(rows)]),
        np.array([rows * PROMPT_TOKENS / OUTPUT_TOKENS]),
    )
    free = ModuleCosts(attention=_FREE, ffn=_FREE, to_device=_FREE, to_host=_FREE)
    # without the fixed costs of steps on a CPU host
    layers_s = step_seconds(model, costs, counts, buffer) - step_seconds(model, free, counts)
    return rows / float(layers_s[0] + _STEP_S)


def buffer_of(model: ModelShape, device_rows: int) -> KVBuffer:
    """Return the KV buffers that fit the KV memory for `device_rows` rows."""
    tokens = device_rows * (PROMPT_TOKENS + OUTPUT_TOKENS) * model.num_layers // KV_SLOTS
    return KVBuffer(num_tokens=tokens, num_buffers=KV_SLOTS)


def forecasts(shapes: dict[str, Shape]) -> Iterator[Forecast]:
    for name, shape in shapes.items():
        model = model_shape(shape)
        for link_name, bytes_s in LINKS.items():
            costs = costs_of(bytes_s)
            for rows in DEVICE_ROWS:
                yield Forecast(
                    model=name,
                    link=link_name,
                    device_rows=rows,
                    on_device=tokens_per_s(model, costs, rows),
                    on_host=tokens_per_s(model, costs, HOST_ROWS, buffer_of(model, rows)),
                )


def pays_until(model: ModelShape, costs: ModuleCosts) -> int:
    """Return the most rows of device KV with which KV in host memory still pays; 0 if none."""
    for rows in range(HOST_ROWS - 1, 0, -1):
        on_host = tokens_per_s(model, costs, HOST_ROWS, buffer_of(model, rows))
        if on_host >= _LEAST_GAIN * tokens_per_s(model, costs, rows):
            return rows
    return 0


def show() -> list[dict[str, Any]]:
    """Print the table, and return up to how many rows KV in host memory pays."""
    shapes = {"moe-100m": models.SHAPES["moe-100m"], **PUBLISHED}
    print(
        f"forecast for an H100 in bfloat16, rows of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, KV "
        f"of {HOST_ROWS:,} rows in host memory; {COMPUTE_SHARE:.0%} of {FLOPS / 1e12:.0f} TFLOP/s, "
        f"{MEMORY_SHARE:.0%} of {HBM_BYTES_S / 1e12:.2f} TB/s, {LINK_SHARE:.0%} of a link"
    )
    print("| model | link | rows of KV on the device | tokens/s on it | in host memory | ratio |")
    print("|---|---|---|---|---|---|")
    for cell in forecasts(shapes):
        print(
            f"| {cell.model} | {cell.link} | {cell.device_rows} | {cell.on_device:,.0f} | "
            f"{cell.on_host:,.0f} | {cell.on_host / cell.on_device:.2f} |"
        )
    limits = []
    for name, shape in shapes.items():
        for link_name, bytes_s in LINKS.items():
            rows = pays_until(model_shape(shape), costs_of(bytes_s))
            limits.append({"model": name, "link": link_name, "pays_until_rows": rows})
            print(f"{name}, {link_name}: pays with KV for up to {rows} rows on the device")
    return limits
