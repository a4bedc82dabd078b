"""Compiles for an H100 what the ops launch, without a GPU: `python -m <this module> float16`.

In place of a type, `engines` compiles all that engines of two models launch, which needs `scripts/`
in the path. With `once` behind a type, each kernel in the first of its forms alone, and a decode
over bytes.

The ops run with the shapes of real models on CPU tensors; a launch is noted instead of made, with
the very arguments that decide what Triton compiles. One line of JSON per compiled kernel.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from raybatch.engine.forward.graph_sizes import GraphShape
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import FP8, INT8, row_width
from raybatch.kernels.linear import Linear
from raybatch.kernels.sampling import Limits
from raybatch.kernels.small_ops import rotation_table
from raybatch.kernels.triton import attention, jit, linear, moe, small_ops

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
    """Stands in for launches; keeps one of each kind, with what a compiler needs if it `packs`."""

    def __init__(self, target=TARGET, *, packs=True):
        self.backend = make_backend(target)
        self.launches, self._binds, self._packs = {}, {}, packs

    def launch(self, kernel, *args, grid, warmup, **kwargs):
        if kernel not in self._binds:
            self._binds[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, self.backend
            )
        bound, specialization, options = self._binds[kernel](*args, **kwargs)
        key = kernel.__name__, str(specialization), str(options)
        if key in self.launches:
            return
        packed = None
        if self._packs:
            packed = kernel._pack_args(self.backend, kwargs, bound, specialization, options)
        self.launches.setdefault(key, (kernel, packed))


def run_small_ops(dtype):
    hidden = torch.zeros(48, 4096, dtype=dtype)
    small_ops.rms_norm(hidden, hidden[0], 1e-6)
    linear.gated(hidden)


def run_linears(num_tokens, dtype):
    x, hidden = (
        torch.zeros(num_tokens, 1024, dtype=dtype),
        torch.zeros(num_tokens, 768, dtype=dtype),
    )
    for kind in (torch.int8, torch.float8_e4m3fn):
        weight = torch.empty(1024, 768, dtype=kind)
        layer = Linear(weight, 1024, hidden.new_zeros(1024), torch.zeros(1024))
        linear.add_linear_(x, hidden, layer)


def run_moe(num_tokens, dtype, kind=None, experts=None):
    x, router = torch.zeros(num_tokens, 1024, dtype=dtype), torch.zeros(128, 1024, dtype=dtype)
    num = len(range(128)[experts or slice(None)])
    gate_up = torch.empty(num, 1536, 1024, dtype=kind or dtype)
    down = torch.empty(num, 1024, 768, dtype=kind or dtype)
    options = {"top_k": 8, "norm_topk_prob": True, "experts": experts}
    if kind is not None:
        options["gate_up_scales"] = torch.zeros(num, 1536)
        options["down_scales"] = torch.zeros(num, 1024)
    moe.moe_ffn(x, router, gate_up, down, **options)


def run_attention(
    dtype, *, heads, head_dim, window, num_members, chunk_len, block_size=64, kv_dtype=None
):
    """Run a step of some members of a group with 32 blocks each, and of a chunk with a context."""
    num_heads, num_kv_heads = heads
    total = num_members + chunk_len
    kv_dtype = kv_dtype or dtype
    width = row_width(head_dim, kv_dtype)
    pool = torch.zeros(64, num_kv_heads, block_size, width, dtype=kv_dtype)
    qkv = torch.zeros(total, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    members, blocks = torch.arange(num_members), torch.arange(32)
    decode = DecodePart(
        block_ids=blocks.repeat_interleave(num_members),
        owners=members.repeat(32),
        num_valid=torch.full((32 * num_members,), block_size),
        is_contiguous=False,
        first_positions=blocks.repeat_interleave(num_members) * block_size,
    )
    rows = torch.arange(num_members, total)
    segments = [
        PrefixSegment(query_idx=idx, block_ids=blocks, num_tokens=32 * block_size, chunk=chunk)
        for idx, chunk in ((members, None), (rows, 0))
    ]
    plan = AttentionPlan(
        num_decode=num_members,
        decode=decode,
        prefill=PrefillPart(starts=(num_members,), lens=(chunk_len,)),
        segments=tuple(segments),
    )
    positions = torch.full((total,), 40 * block_size)
    prepared = attention.prepare_attention(
        plan, positions=positions, slot_mapping=positions, pool=pool, windows=(window,)
    )
    finish_and_attend(qkv, num_heads, pool, prepared, window)


def finish_and_attend(qkv, num_heads, pool, prepared, window):
    num_tokens, all_heads, head_dim = qkv.shape
    turns = rotation_table(torch.zeros(num_tokens), torch.zeros(head_dim // 2), 1.0)
    norms = qkv.new_zeros((all_heads + num_heads) // 2, head_dim)
    rest = 1e-6, turns, pool, pool, prepared
    heads = attention.finish_heads(qkv, num_heads, norms, *rest)
    attention.attend(*heads, pool, pool, prepared, window)


def run_captured_decodes(dtype, num_rows, *, max_row_blocks=256, block_size=64):
    """Run what a graph captures of attention: launches for the longest rows there may be."""
    pool = torch.zeros(8, 8, block_size, 128, dtype=dtype)
    rows = torch.zeros(num_rows, dtype=torch.int64)
    shape = GraphShape(
        decode=(num_rows,),
        max_row_blocks=max_row_blocks,
        max_entries=num_rows * max_row_blocks,
        block_size=block_size,
        num_kv_heads=8,
    )
    size = shape.sizes().decode[0]
    index = torch.zeros(size.num_index, dtype=torch.int32)
    qkv = torch.zeros(num_rows, 32 + 2 * 8, 128, dtype=dtype)
    for window in (None, 128):
        prepared = attention.prepare_fixed(size, index, positions=rows, slot_mapping=rows)
        finish_and_attend(qkv, 32, pool, prepared, window)


def run_draws():
    logits = torch.zeros(4, 151_936)
    numbers = torch.ones(4, 1, dtype=torch.float64)
    ranks = torch.zeros(4, 1, dtype=torch.int64)
    limits = Limits(numbers, ranks, numbers, numbers, numbers)
    small_ops.find_ranks(logits, logits[:, :1], logits[:, :1], ranks, ranks[:, 0] > 0, limits)


def run_all(dtype):
    run_small_ops(dtype)
    run_draws()
    run_moe(num_tokens=4, dtype=dtype)
    run_moe(num_tokens=2048, dtype=dtype)
    for num_tokens in (4, 2048):
        run_linears(num_tokens, dtype)
        run_moe(num_tokens, dtype, torch.float8_e4m3fn)
    for first in range(3):
        run_moe(4, dtype, experts=slice(first, None, 4))
    shapes = {
        # a few long sequences of a model with grouped queries, and a small step without groups
        "grouped": {"heads": (32, 8), "head_dim": 128, "num_members": 24, "chunk_len": 300},
        "few": {
            "heads": (32, 8),
            "head_dim": 128,
            "num_members": 2,
            "chunk_len": 2,
            "block_size": 16,
        },
        "many": {"heads": (16, 16), "head_dim": 64, "num_members": 70, "chunk_len": 300},
        "wide": {"heads": (8, 4), "head_dim": 256, "num_members": 4, "chunk_len": 300},
    }
    for name, shape in shapes.items():
        run_attention(dtype, window=None, **shape)
        if name == "grouped":
            run_attention(dtype, window=128, **shape)
            for kv_dtype in (INT8, FP8):
                run_attention(dtype, window=None, kv_dtype=kv_dtype, **shape)
    for num_rows in (1, 64):
        run_captured_decodes(dtype, num_rows)


def in_machine_code(cubin):
    """Return the H100 resources that the binary uses, by the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [tool.path, *options, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, options in (
                (triton.knobs.nvidia.cuobjdump, ["--dump-resource-usage"]),
                (triton.knobs.nvidia.nvdisasm, ["-c"]),
            )
        )
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return {
        "registers": int(registers),
        # bytes of spilled registers
        "stack_bytes": int(stack),
        "wgmma": len(re.findall("HGMMA", code)),
        "mma": len(re.findall("HMMA|QGMMA", code)),
        # loads of one byte, which take a hundred times the instructions that a row needs
        "byte_loads": len(re.findall(r"LDG\S*\.[US]8\b", code)),
        "short_loads": len(re.findall(r"LDG\S*\.[US]16\b", code)),
        "loads": len(re.findall(r"LDG|LDGSTS", code)),
    }


def told_of(kernel, packed):
    """Compile a launch; return what the compiler and the binary tell of it."""
    options, signature, constants, attributes = packed
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options=options.__dict__)
    numbers = {kernel.arg_names[place]: value for (place,), value in constants.items()}
    # tiles in shared memory with a dimension for those that are read ahead
    rings = re.findall(
        r"local_alloc\b.*memdesc<(\d+)x\d+x\d+x(?:bf16|f16|f32|i8|f8\w+),", made.asm["ttgir"]
    )
    return {
        "kernel": kernel.__name__,
        "cubin_bytes": len(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
        **in_machine_code(made.asm["cubin"]),
        "pointers": sorted({kind for kind in signature.values() if kind.startswith("*")}),
        "buffers": min(map(int, rings), default=None),
        "is_tile_in_block": numbers.get("BLOCK_SIZE", 0) % numbers.get("TILE_KEYS", 1) == 0,
    }


def is_over_bytes(kernel, packed):
    _, signature, _, _ = packed
    return kernel.__name__ == "decode_kernel" and signature["k_pool_ptr"] in ("*i8", "*u8")


def main():
    if sys.argv[1] == "engines":
        # as scripts/gpu_call.sh has them
        from gpu_call.forms import noted_launches

        for kernel, packed in noted_launches(is_gpu=True, target=TARGET):
            sys.stdout.write(json.dumps(told_of(kernel, packed)) + "\n")
        return
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **kwargs: recorder.launch(kernel, *args, **kwargs)
    run_all(getattr(torch, sys.argv[1]))
    launched = {kernel.__name__ for kernel, _ in recorder.launches.values()}
    assert launched == set(kernel_names()), set(kernel_names()) ^ launched
    chosen = list(recorder.launches.values())
    if "once" in sys.argv[2:]:
        # and decodes over bytes
        kinds = {
            (kernel.__name__, is_over_bytes(kernel, packed)): (kernel, packed)
            for kernel, packed in reversed(chosen)
        }
        chosen = list(kinds.values())
    for kernel, packed in chosen:
        sys.stdout.write(json.dumps(told_of(kernel, packed)) + "\n")


if __name__ == "__main__":
    main()
