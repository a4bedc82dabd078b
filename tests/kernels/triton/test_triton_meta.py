"""Whole forward passes of the kernels on tensors without data, where a read by the host fails.

Launches are counted instead of made: every operation of torch that is no view, and every kernel.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder, LastRows
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.weights.layout import (
    AttentionWeights,
    FfnShard,
    FfnWeights,
    LayerWeights,
    ModelWeights,
)
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart
from raybatch.kernels.byte_numbers import FP8, INT8, row_width
from raybatch.kernels.dispatch import REFERENCE, ops_for, with_varlen
from raybatch.kernels.linear import Linear
from raybatch.kernels.step_index import StepIndex, StepSize
from raybatch.models.config import ModelSpec, MoeSpec, RopeSpec
from tests.kernels.triton.support import DTYPES, VARLEN_REASON, Step
from tests.tiers import singles

META = torch.device("meta")
BLOCK = 16
MAX_LAUNCHES = {"dense": 20, "sparse": 25}
DENSE = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=1000,
    model_dim=512,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_dim=1024,
    rms_eps=1e-6,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
    has_qk_norm=True,
    is_tied=False,
    rope=RopeSpec(),
    windows=(None, None),
    moe=None,
    eos_token_ids=(),
    max_model_len=4096,
    dtype="bfloat16",
)
EXPERTS = MoeSpec(num_experts=16, top_k=4, ffn_dim=128, norm_topk_prob=True, is_sparse=(True, True))
SPECS = {
    "dense": DENSE,
    "biases": replace(DENSE, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True),
    "windows": replace(DENSE, windows=(None, 20)),
    "sparse": replace(DENSE, moe=EXPERTS, has_qk_norm=False),
}
# a long step has more rows than a tile, and than the program of a segment
STEPS = {
    "decode": {"sequences": [(70, 1), (5, 1), (300, 1)], "num_decode": 3},
    "prefill": {"sequences": [(0, 300), (32, 70), (5, 1500)]},
    "shared": {"sequences": [(70, 1, 0)] * 200, "num_decode": 200, "prefixes": (4,)},
    "mixed": {
        "sequences": [(70, 1, 0), (90, 1, 0), (13, 1), (64, 40, 0), (16, 300)],
        "num_decode": 3,
        "prefixes": (4,),
    },
}


def layers_of(spec, num_layers):
    windows = spec.windows * num_layers
    moe = spec.moe and replace(spec.moe, is_sparse=spec.moe.is_sparse[:1] * num_layers)
    return replace(spec, num_layers=num_layers, windows=windows[:num_layers], moe=moe)


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype, device=META)


def weights_of(spec, dtype, byte_dtype):
    dim = spec.model_dim

    def linear(num_outputs, num_inputs, has_bias):
        bias = empty(num_outputs, dtype=dtype) if has_bias else None
        scales = None if byte_dtype is None else empty(num_outputs, dtype=torch.float32)
        weight = empty(num_outputs, num_inputs, dtype=byte_dtype or dtype)
        return Linear(weight, num_outputs, bias, scales)

    heads = spec.num_heads + 2 * spec.num_kv_heads
    attention = AttentionWeights(
        norm=empty(dim, dtype=dtype),
        qkv=linear(heads * spec.head_dim, dim, spec.has_qkv_bias),
        o=linear(dim, spec.num_heads * spec.head_dim, spec.has_o_bias),
        qk_norm=empty(heads - spec.num_kv_heads, spec.head_dim, dtype=dtype)
        if spec.has_qk_norm
        else None,
    )
    router = None
    if spec.moe is None:
        shard = FfnShard(
            gate_up=linear(2 * spec.ffn_dim, dim, spec.has_mlp_bias),
            down=linear(dim, spec.ffn_dim, spec.has_mlp_bias),
        )
    else:
        shapes = {
            "experts_gate_up": (spec.moe.num_experts, 2 * spec.moe.ffn_dim, dim),
            "experts_down": (spec.moe.num_experts, dim, spec.moe.ffn_dim),
        }
        tensors = {name: empty(*shape, dtype=byte_dtype or dtype) for name, shape in shapes.items()}
        if byte_dtype is not None:
            for name, shape in shapes.items():
                tensors[f"{name}_scales"] = empty(*shape[:2], dtype=torch.float32)
        router = empty(spec.moe.num_experts, dim, dtype=dtype)
        shard = FfnShard(**tensors)
    ffn = FfnWeights(norm=empty(dim, dtype=dtype), router=router, shard=shard)
    layer = LayerWeights(attention=attention, ffn=ffn)
    table = empty(spec.vocab_size, dim, dtype=dtype)
    return ModelWeights(
        embed=table,
        layers=(layer,) * spec.num_layers,
        norm=empty(dim, dtype=dtype),
        head=Linear(table, spec.vocab_size),
    )


class Launches(TorchDispatchMode):
    """Counts the launches on a device."""

    def __init__(self):
        super().__init__()
        self.names = Counter()
        self.num_uploads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        tensors = [t for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        if is_view and isinstance(made, torch.Tensor):
            # or a copy, for a tensor on another device
            is_view = torch._C._is_alias_of(made, args[0])
        is_on_device = any(tensor.device == META for tensor in tensors)
        # tests fill empty tensors with NaN
        is_poison = name == "fill_" and args[1] != args[1]
        if is_on_device and not (is_view or is_poison or "empty" in name):
            self.names[name] += 1
            self.num_uploads += name in ("to", "_to_copy", "copy_") and args[0].device.type == "cpu"
        return made


@pytest.fixture
def launches(monkeypatch):
    counted = Launches()

    def launch(kernel, *args, grid, warmup, **options):
        assert all(size > 0 for size in grid)
        counted.names[kernel.__name__] += 1

    for kind in (InterpretedFunction, JITFunction):
        monkeypatch.setattr(kind, "run", launch)
    return counted


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype
    byte_dtype: torch.dtype | None
    step: Step

    def batch(self, keeps_all):
        rows = len(self.step.positions)
        last = torch.cumsum(torch.tensor([new for _, new, _ in self.step.sequences]), 0) - 1
        plan = None
        if not keeps_all and len(last) < rows:
            # every row with logits reads a block
            owners = torch.arange(len(last))
            part = DecodePart(
                block_ids=owners,
                owners=owners,
                num_valid=torch.ones_like(owners),
                is_contiguous=True,
                first_positions=owners * 0,
            )
            plan = AttentionPlan(num_decode=len(last), decode=part, prefill=None, segments=())
        return ForwardBatch(
            token_ids=torch.empty(rows, dtype=torch.int64, device=META),
            positions=self.step.positions.to(META),
            slot_mapping=self.step.slots.to(META),
            logits_idx=last.to(META),
            attention=self.step.plan(),
            logits_attention=plan,
        )

    def ready(self, num_layers, ops=None, *, is_fixed=False, keeps_all=True):
        """Return a function that runs a step and returns its logits."""
        spec = layers_of(self.spec, num_layers)
        decoder = Decoder(
            spec,
            weights_of(spec, self.dtype, self.byte_dtype),
            ops=ops or ops_for(torch.device("cuda")),
        )
        width = row_width(spec.head_dim, self.kv_dtype)
        shape = num_layers, 64, spec.num_kv_heads, BLOCK, width
        cache = KVCache(k=empty(*shape, dtype=self.kv_dtype), v=empty(*shape, dtype=self.kv_dtype))
        batch = self.batch(keeps_all)
        if not is_fixed:
            return partial(decoder.forward, batch, cache)
        index = StepIndex(
            batch.attention,
            num_rows=len(batch.token_ids),
            num_kv_heads=spec.num_kv_heads,
            block_size=BLOCK,
            joins_segments=decoder.ops.joins_segments,
        )
        made = index.size
        # larger than the step in every dimension
        size = StepSize(**{name: 2 * getattr(made, name) for name in made.__slots__})
        rows = [torch.empty(size.rows, dtype=torch.int64, device=META) for _ in range(3)]
        idx = torch.empty(3, dtype=torch.int64, device=META)
        widths = spec.model_dim, spec.num_heads * spec.head_dim
        last = LastRows(*(empty(size.rows, width, dtype=self.dtype) for width in widths))
        on_device = torch.empty(size.num_index, dtype=torch.int32, device=META)
        run = partial(decoder.forward_fixed, *rows, size, on_device, cache, last)
        return lambda: run() or decoder.finish(last, idx)


CASES = singles(
    list(SPECS), list(STEPS), DTYPES, ["same", INT8, FP8], [None, torch.int8, torch.float8_e4m3fn]
)


def case_of(spec, step, dtype, kv_dtype=None, byte_dtype=None):
    heads = (4, 2)
    made = Step(block_size=BLOCK, heads=heads, **STEPS[step])
    kv = dtype if kv_dtype in (None, "same") else kv_dtype
    return Case(SPECS[spec], dtype, kv, byte_dtype, made)


@pytest.mark.meta
@pytest.mark.parametrize(("spec", "step", "dtype", "kv_dtype", "byte_dtype"), CASES, ids=str)
@pytest.mark.parametrize("is_fixed", [False, True], ids=["eager", "fixed"])
def test_no_forward_pass_reads_a_value_back(
    spec, step, dtype, kv_dtype, byte_dtype, is_fixed, launches
):
    case = case_of(spec, step, dtype, kv_dtype, byte_dtype)
    run = case.ready(2, is_fixed=is_fixed, keeps_all=False)
    with launches:
        made = run()
    assert (made.dtype, made.shape[1]) == (torch.float32, SPECS[spec].vocab_size)
    # the index of the step, and that of rows with logits
    assert launches.num_uploads == (0 if is_fixed else 1)


@pytest.mark.meta
@pytest.mark.parametrize("byte_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("is_fixed", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("spec", list(SPECS))
def test_a_layer_needs_few_launches(spec, step, is_fixed, byte_dtype, launches):
    case = case_of(spec, step, torch.bfloat16, byte_dtype=byte_dtype)
    counts = []
    for num_layers in (1, 3):
        launches.names.clear()
        run = case.ready(num_layers, is_fixed=is_fixed)
        with launches:
            run()
        counts.append(launches.names.copy())
    of_layer = (counts[1].total() - counts[0].total()) / 2
    assert of_layer <= MAX_LAUNCHES["sparse" if SPECS[spec].moe else "dense"]


@pytest.mark.meta
@pytest.mark.parametrize("step", list(STEPS))
def test_grouped_products_of_torch_need_few_launches_too(step, launches):
    kernels = ops_for(torch.device("cuda"))
    ops = replace(kernels, moe_ffn=partial(kernels.moe_ffn, min_grouped_rows=0))
    run = case_of("sparse", step, torch.bfloat16).ready(1, ops)
    with launches:
        run()
    assert launches.names["grouped_mm"] + launches.names["_grouped_mm"] == 2
    assert "gate_up_kernel" not in launches.names
    # with embedding, index, head and rotation
    assert launches.names.total() <= MAX_LAUNCHES["sparse"] + 15


@pytest.mark.skipif(with_varlen(ops_for(torch.device("cuda"))) is None, reason=VARLEN_REASON)
@pytest.mark.meta
@pytest.mark.parametrize("is_fixed", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize("spec", ["dense", "windows"])
@pytest.mark.parametrize("step", list(STEPS))
def test_chunks_by_torch_need_few_launches_and_no_read(step, spec, is_fixed, launches):
    case = case_of(spec, step, torch.bfloat16, INT8)
    ops = with_varlen(ops_for(torch.device("cuda")))
    counts = []
    for num_layers in (1, 3):
        launches.names.clear()
        run = case.ready(num_layers, ops, is_fixed=is_fixed)
        with launches:
            run()
        counts.append(launches.names.copy())
    of_layers = counts[1] - counts[0]
    assert of_layers.total() / 2 <= MAX_LAUNCHES["dense"]
    assert of_layers["_varlen_attn_out"] == 2 * (step in ("prefill", "mixed"))
    # for shared prefixes only: in the long step, those of prompts that continue
    assert of_layers["ragged_kernel"] == 2 * (step != "decode")
    # launches outside layers, embedding and head included
    assert counts[0].total() - of_layers.total() / 2 <= 35


@pytest.mark.meta
def test_a_read_by_the_host_is_found(launches):
    case = case_of("sparse", "decode", torch.bfloat16)
    ops = replace(ops_for(torch.device("cuda")), moe_ffn=REFERENCE.moe_ffn)
    run = case.ready(1, ops)
    with pytest.raises(RuntimeError, match="meta tensor"), launches:
        run()
