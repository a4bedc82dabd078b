"""Compiles for an H100 what the ops launch, without a GPU: `python -m <this module> float16`.

With `once` behind it, each kernel in the first of its forms alone.

The ops run with the shapes of real models on CPU tensors; a launch is noted instead of made, with
the very arguments that decide what Triton compiles. One line of JSON per compiled kernel.
"""

import importlib
import json
import pkgutil
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from raybatch.kernels.attention_plan import (
    AttentionPlan,
    ContextPart,
    DecodePart,
    FixedDecode,
    PrefillPart,
)
from raybatch.kernels.small_ops import rotation_table
from raybatch.kernels.triton import attention, jit, moe, small_ops

TARGET = GPUTarget("cuda", 90, 32)


def kernel_names():
    """Return the names of all kernels of the package; what they call starts otherwise."""
    modules = [
        importlib.import_module(f"{jit.__name__}.{module.name}")
        for module in pkgutil.iter_modules(jit.__path__)
    ]
    return sorted(
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    )


class Recorder:
    """Stands in for launches; keeps one of each kind."""

    def __init__(self):
        self.backend = make_backend(TARGET)
        self.launches = {}

    def launch(self, kernel, *args, grid, warmup, **kwargs):
        bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, options = bind(*args, **kwargs)
        key = kernel.__name__, str(specialization), str(options)
        packed = kernel._pack_args(self.backend, kwargs, bound, specialization, options)
        self.launches.setdefault(key, (kernel, packed))


def run_small_ops(dtype):
    hidden = torch.zeros(48, 4096, dtype=dtype)
    small_ops.rms_norm(hidden, hidden[0], 1e-6)
    projected = torch.zeros(48, 48, 128, dtype=dtype)
    small_ops.rms_norm(projected[:, :40], projected[0, :40], 1e-6)
    small_ops.rotate_(projected[:, :40], rotation_table(torch.arange(48), torch.rand(64), 1.0))


def run_moe(num_tokens, dtype):
    x, router = torch.zeros(num_tokens, 1024, dtype=dtype), torch.zeros(128, 1024, dtype=dtype)
    gate_up = torch.empty(128, 1536, 1024, dtype=dtype)
    down = torch.empty(128, 1024, 768, dtype=dtype)
    moe.moe_ffn(x, router, gate_up, down, top_k=8, norm_topk_prob=True)


def run_attention(dtype, *, heads, head_dim, window, num_members, chunk_len, block_size=16):
    """Run a step of some members of a group with 32 blocks each, and of a chunk with a context."""
    num_heads, num_kv_heads = heads
    total = num_members + chunk_len
    pool = torch.zeros(64, num_kv_heads, block_size, head_dim, dtype=dtype)
    qkv = torch.zeros(total, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    members, blocks = torch.arange(num_members), torch.arange(32)
    decode = DecodePart(
        block_ids=blocks.repeat_interleave(num_members),
        owners=members.repeat(32),
        num_valid=torch.full((32 * num_members,), block_size),
        is_contiguous=False,
        first_positions=blocks.repeat_interleave(num_members) * block_size,
    )
    rows = torch.arange(num_members, total)
    contexts = [
        ContextPart(query_idx=query_idx, block_ids=blocks, num_tokens=32 * block_size)
        for query_idx in (members, rows)
    ]
    plan = AttentionPlan(
        num_decode=num_members,
        decode=decode,
        prefill=PrefillPart(starts=(num_members,), lens=(chunk_len,)),
        contexts=tuple(contexts),
    )
    positions = torch.full((total,), 40 * block_size)
    prepared = attention.prepare_attention(
        plan, positions=positions, slot_mapping=positions, pool=pool, windows=(window,)
    )
    attention.store_kv(k, v, pool, pool, prepared)
    attention.attend(q, k, v, pool, pool, prepared, window)


def run_captured_decodes(dtype, num_rows, *, max_row_blocks=256, block_size=64):
    """Run what a graph captures of attention: launches for the longest rows there may be."""
    pool = torch.zeros(8, 8, block_size, 128, dtype=dtype)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    entries = torch.zeros(num_rows * max_row_blocks, dtype=torch.int64)
    part = FixedDecode(
        positions=rows,
        slot_mapping=rows,
        starts=torch.arange(num_rows + 1),
        block_ids=entries,
        num_valid=entries,
        first_positions=entries,
        max_row_blocks=max_row_blocks,
    )
    qkv = torch.zeros(num_rows, 32 + 2 * 8, 128, dtype=dtype)
    q, k, v = qkv.split((32, 8, 8), dim=1)
    for window in (None, 128):
        prepared = attention.prepare_fixed(part, pool=pool, windows=(window,))
        attention.store_kv(k, v, pool, pool, prepared)
        attention.attend(q, k, v, pool, pool, prepared, window)


def run_all(dtype):
    run_small_ops(dtype)
    run_moe(num_tokens=4, dtype=dtype)
    run_moe(num_tokens=2048, dtype=dtype)
    shapes = {
        # a few long sequences of a model with grouped queries, and a small step without groups
        "grouped": {"heads": (32, 8), "head_dim": 128, "num_members": 24, "chunk_len": 300},
        "few": {"heads": (32, 8), "head_dim": 128, "num_members": 2, "chunk_len": 2},
        "many": {"heads": (16, 16), "head_dim": 64, "num_members": 70, "chunk_len": 300},
        "wide": {"heads": (8, 4), "head_dim": 256, "num_members": 4, "chunk_len": 300},
    }
    for name, shape in shapes.items():
        run_attention(dtype, window=None, **shape)
        if name == "grouped":
            run_attention(dtype, window=128, **shape)
    for num_rows in (1, 64):
        run_captured_decodes(dtype, num_rows)


def main():
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **kwargs: recorder.launch(kernel, *args, **kwargs)
    run_all(getattr(torch, sys.argv[1]))
    launched = {kernel.__name__ for kernel, _ in recorder.launches.values()}
    assert launched == set(kernel_names()), set(kernel_names()) ^ launched
    chosen = list(recorder.launches.values())
    if "once" in sys.argv[2:]:
        chosen = list({launch[0].__name__: launch for launch in reversed(chosen)}.values())
    for kernel, (options, signature, constants, attributes) in chosen:
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=TARGET, options=options.__dict__)
        line = {
            "kernel": kernel.__name__,
            "cubin_bytes": len(made.asm["cubin"]),
            "shared_bytes": made.metadata.shared,
            "has_tensor_core_products": "mma" in made.asm["ptx"],
            "pointers": sorted({kind for kind in signature.values() if kind.startswith("*")}),
        }
        sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
