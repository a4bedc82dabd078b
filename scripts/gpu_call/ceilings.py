"""Measures the limits of the device: products of random matrices, and copies."""

from dataclasses import asdict, fields
from functools import partial

import torch

from gpu_call.models import DENSE, VOCAB_SIZE
from gpu_call.stage import Stage, run_stage
from gpu_call.timing import cold_s
from raybatch.bench.machine import Limits, measure_limits
from raybatch.policy.cost.roofline import Work

_GPU_ROWS = (16, 64, 256, 1024, 2048, 8192)


def main(stage: Stage) -> None:
    device = torch.device(stage.device)
    dtype = _dtype(stage)
    limits = measure_limits(device, dtype)
    stage.put(**asdict(limits), products=[])
    stage.figure(
        f"{limits.operations_per_s / 1e12:.3g} TFLOP/s of random numbers, "
        f"{limits.bytes_per_s / 1e9:,.0f} GB/s, the better of copies and reads"
    )
    for name, (outputs, inputs) in _layers().items():
        if not stage.is_gpu:
            outputs, inputs = outputs // 16, inputs // 16
        for rows in _GPU_ROWS if stage.is_gpu else (16, 64):
            shape = rows, inputs, outputs
            seconds = stage.attempt(
                f"{name}, {rows} rows", partial(_product_s, device, dtype, shape), needs_s=0.5
            )
            if seconds is None:
                continue
            item = dtype.itemsize
            moved = item * (rows * inputs + inputs * outputs + rows * outputs)
            work = Work(operations=2 * rows * inputs * outputs, moved_bytes=moved)
            floor_s = limits.least_s(work)
            stage.found["products"].append(
                {"name": name, "rows": rows, "seconds": seconds, "share": floor_s / seconds}
            )
            stage.put()
    for rows in sorted({each["rows"] for each in stage.found["products"]}):
        of_rows = [each for each in stage.found["products"] if each["rows"] == rows]
        if rows in (256, 2048, 64 if not stage.is_gpu else 0):
            shares = ", ".join(f"{each['name']} {each['share']:.0%}" for each in of_rows)
            stage.figure(f"products of {rows} rows: {shares} of the floor")


def measured_limits(stage: Stage) -> Limits:
    """Return the limits that this stage has measured; measure them if it has not."""
    found = stage.of("ceilings")
    if "operations_per_s" not in found:
        return measure_limits(torch.device(stage.device), _dtype(stage))
    return Limits(**{each.name: found[each.name] for each in fields(Limits)})


def _dtype(stage: Stage) -> torch.dtype:
    return torch.bfloat16 if stage.is_gpu else torch.float32


def _layers() -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the linear layers of Qwen3-8B."""
    heads = (DENSE.num_heads + 2 * DENSE.num_kv_heads) * DENSE.head_dim
    dim = DENSE.hidden_size
    return {
        "qkv": (heads, dim),
        "o": (dim, DENSE.num_heads * DENSE.head_dim),
        "gate_up": (2 * DENSE.ffn_size, dim),
        "down": (dim, DENSE.ffn_size),
        "head": (VOCAB_SIZE, dim),
    }


@torch.inference_mode()
def _product_s(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    rows, inputs, outputs = shape
    # together, the copies of the weights are larger than any cache
    copies = max(1, min(8, (256 << 20) // (inputs * outputs * dtype.itemsize)))
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    weights = [torch.randn(outputs, inputs, dtype=dtype, device=device) for _ in range(copies)]
    return cold_s(device, [partial(torch.nn.functional.linear, x, weight) for weight in weights])


if __name__ == "__main__":
    run_stage("ceilings", main)
