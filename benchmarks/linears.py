"""Compares compiled dense linears with torch's, for shapes of models and numbers of rows.

python benchmarks/linears.py
RAYBATCH_KERNEL_VECTORS=avx2 python benchmarks/linears.py --out result.json

One thread, float32. Both take turns, and the least time of each counts. If a ratio is above 1,
torch is faster.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import conditions
import torch
from torch.nn import functional

from raybatch.config.environment import kernel_vectors
from raybatch.kernels.linear import Linear
from raybatch.kernels.native.compiler import host_vectors
from raybatch.kernels.native.linears import PANEL_WIDTH, compiled_linears

# [out, in]
SHAPES = ((768, 256), (1536, 512), (1024, 1024), (4096, 1024), (1024, 4096), (6144, 2048))
HEAD = (32_000, 512)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def measure(shape: tuple[int, int], rows: tuple[int, ...], budget_s: float) -> list[dict[str, Any]]:
    """Return ratio and rates of one shape for each number of rows."""
    ops = compiled_linears()
    if ops is None:
        raise SystemExit("no C compiler here, so torch computes all linears")
    num_outputs, num_inputs = shape
    weight = torch.randn(shape) / num_inputs**0.5
    panels = Linear(weight.view(-1, PANEL_WIDTH, num_inputs).mT.contiguous(), num_outputs)
    found = []
    for num_rows in rows:
        x = torch.randn(num_rows, num_inputs)
        compiled, torchs = _least(
            [lambda x=x: ops.linear(x, panels), lambda x=x: functional.linear(x, weight)], budget_s
        )
        work = 2e-9 * num_rows * num_outputs * num_inputs
        found.append(
            {
                "rows": num_rows,
                "ratio": round(compiled / torchs, 3),
                "compiled_gflops": round(work / compiled, 1),
                "torch_gflops": round(work / torchs, 1),
            }
        )
    return found


def _least(runs: list[Callable[[], object]], budget_s: float) -> list[float]:
    least, start, num_done = [float("inf")] * len(runs), perf_counter(), 0
    while num_done < 5 or perf_counter() - start < budget_s:
        for i, run in enumerate(runs):
            begin = perf_counter()
            run()
            least[i] = min(least[i], perf_counter() - begin)
        num_done += 1
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget-s", type=float, default=0.3, help="per shape and row count")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vectors = kernel_vectors() or host_vectors()[0]
    print(f"compiled for {vectors}; compiled time over torch's (GFLOP/s of compiled)")
    shapes = []
    for shape in (*SHAPES, HEAD):
        cells = measure(shape, ROWS, args.budget_s)
        shapes.append({"outputs": shape[0], "inputs": shape[1], "cells": cells})
        ratios = (f"{c['rows']}: {c['ratio']:.2f} ({c['compiled_gflops']:.0f})" for c in cells)
        print(f"{shape[0]} x {shape[1]} | {'  '.join(ratios)}", flush=True)
    conditions.write_result(args.out, "linears.py", vectors=vectors, shapes=shapes)


if __name__ == "__main__":
    main()
