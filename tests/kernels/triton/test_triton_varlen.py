"""Chunks of prompts by torch's `varlen_attn`, and the context of their rows by the kernels.

On a CPU the function is torch's own, and the op behind it is that of `flash_attention`.
"""

import math
from dataclasses import replace
from inspect import signature

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.engine.forward import library_ops
from raybatch.engine.forward.step_graphs import checked_step
from raybatch.kernels import attention as reference
from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart, PrefixSegment
from raybatch.kernels.byte_numbers import FP8, INT8
from raybatch.kernels.dispatch import ops_for, with_varlen
from raybatch.kernels.step_index import MAX_JOINED_TOKENS, StepIndex, StepSize, parts_of
from tests.engine.forward.graph_cases import capture, fill_randomly, shape
from tests.engine.tiny_models import build
from tests.kernels.triton.interpreted import DEVICE
from tests.kernels.triton.support import VARLEN_REASON, Step, assert_close
from tests.kernels.triton.test_triton_graphs import recorded_launches  # noqa: F401
from tests.kernels.triton.test_triton_meta import SPECS

varlen = pytest.importorskip(
    "raybatch.kernels.triton.varlen", reason=VARLEN_REASON, exc_type=ImportError
)
flash_attention = pytest.importorskip("tests.kernels.triton.flash_attention")
varlen_attn_out = varlen.varlen_attn_out

STEPS = {
    "begin": {"sequences": [(0, 4), (0, 1), (0, 9)]},
    "go on": {"sequences": [(5, 4), (0, 3), (30, 5)]},
    "mixed": {
        "sequences": [(13, 1, 0), (21, 1, 1), (5, 1), (0, 4), (13, 3, 0), (7, 2)],
        "num_decode": 3,
        "prefixes": (2, 3),
    },
}
# a GPU has the op only for half types
DTYPE = torch.float16


@pytest.fixture(scope="module", autouse=True)
def flash():
    if DEVICE.type == "cuda":
        yield
        return
    with flash_attention.on_cpu():
        yield


@pytest.fixture
def ops():
    return with_varlen(ops_for(torch.device("cuda")))


def index_of(plan, num_rows, **options):
    return StepIndex(plan, num_rows=num_rows, num_kv_heads=2, block_size=4, **options)


def test_torch_has_the_function_as_it_is_called():
    names = list(signature(varlen_attn_out).parameters)
    assert names[:8] == ["out", "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"return_aux", "window_size", "enable_gqa", "seqused_k"} <= set(names)
    of_op = [argument.name for argument in flash_attention.SIGNATURE.arguments]
    assert of_op[8:11] == ["dropout_p", "is_causal", "return_debug_mask"]


@pytest.mark.parametrize(
    ("name", "window", "kv_dtype"),
    [
        ("begin", None, None),
        ("begin", 1, None),
        ("go on", 3, None),
        ("mixed", None, INT8),
        ("mixed", 6, FP8),
    ],
    ids=str,
)
def test_steps_have_the_values_of_the_reference(name, window, kv_dtype, ops, device):
    step = Step(window=window, dtype=DTYPE, kv_dtype=kv_dtype, device=device, **STEPS[name])
    # KV bytes are quantised before rounding to the dtype of the kernels
    factor = 1 if kv_dtype is None else 8
    assert_close(step.run(ops), step.run(reference), factor)


PREFIXES = (1, 3)


@st.composite
def steps_of_any_kind(draw):
    def cached():
        prefix = draw(st.sampled_from([None, 0, 1]))
        return draw(st.integers(0, 9)) + (0 if prefix is None else 4 * PREFIXES[prefix]), prefix

    decodes = [(*cached(), 1) for _ in range(draw(st.integers(0, 2)))]
    chunks = [(*cached(), draw(st.integers(1, 6))) for _ in range(draw(st.integers(1, 3)))]
    sequences = [(count, new, prefix) for count, prefix, new in decodes + chunks]
    used = {prefix for *_, prefix in sequences} - {None}
    # drop prefixes that no sequence reads
    renamed = {prefix: i for i, prefix in enumerate(sorted(used))}
    return {
        "sequences": [(count, new, renamed.get(prefix)) for count, new, prefix in sequences],
        "num_decode": len(decodes),
        "prefixes": tuple(PREFIXES[prefix] for prefix in sorted(used)),
    }


@settings(max_examples=12, deadline=None)
@given(options=steps_of_any_kind(), window=st.sampled_from([None, 5]))
def test_any_step_has_the_values_of_the_reference(options, window):
    step = Step(window=window, dtype=DTYPE, device=DEVICE, **options)
    made = step.run(with_varlen(ops_for(torch.device("cuda"))))
    assert_close(made, step.run(reference))


def test_keys_of_another_chunk_would_be_found(ops, device, monkeypatch):
    made = varlen.pieces_of

    def wrong(size, parts):
        pieces = made(size, parts)
        return pieces._replace(key_starts=(pieces.key_starts - 1).clamp(min=0))

    monkeypatch.setattr(varlen, "pieces_of", wrong)
    step = Step(dtype=DTYPE, device=device, **STEPS["begin"])
    with pytest.raises(AssertionError, match="not close"):
        assert_close(step.run(with_varlen(ops_for(torch.device("cuda")))), step.run(reference))


def attention_of(q, k, v, window):
    """Causal attention of one chunk over itself, with its log-sum-exp, in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) / math.sqrt(q.shape[2])
    distance = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
    is_seen = (distance >= 0) & (distance < (window or len(q)))
    scores.masked_fill_(~is_seen.unsqueeze(1), -math.inf)
    return torch.einsum("qhk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


@settings(max_examples=60, deadline=None)
@given(
    num_decode=st.integers(0, 3),
    lens=st.lists(st.sampled_from([1, 2, 7, 127, 128, 129, 300]), min_size=1, max_size=5),
    window=st.sampled_from([None, 1, 2, 100, 1000]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    padding=st.integers(0, 3),
)
def test_pieces_are_attention_of_chunks_whatever_their_lengths(
    num_decode, lens, window, heads, padding
):
    starts = np.cumsum([num_decode, *lens])
    part = PrefillPart(starts=tuple(starts[:-1].tolist()), lens=tuple(lens))
    plan = AttentionPlan(num_decode=num_decode, decode=None, prefill=part, segments=())
    index = index_of(plan, starts[-1], joins_segments=False)
    size = replace(
        index.size,
        rows=index.size.rows + padding,
        chunk_items=index.size.chunk_items + padding,
        chunk_queries=128,
        segment_items=1,
    )
    out = np.full(size.num_index, 7, np.int32)
    index.write(size, out)
    pieces = varlen.pieces_of(size, parts_of(size, torch.from_numpy(out).to(DEVICE)))
    q, k, v = (torch.randn(size.rows, count, 8) for count in (heads[0], heads[1], heads[1]))
    q, k, v = (x.to(DEVICE, DTYPE) for x in (q, k, v))
    output, lse = torch.full_like(q, 5), torch.full(q.shape[:2], 6.0, device=DEVICE)
    varlen.attend_pieces_into(output, lse, q, k, v, pieces, size, window)
    for start, length in zip(part.starts, lens, strict=True):
        rows = slice(start, start + length)
        wanted = attention_of(*(x[rows].cpu() for x in (q, k, v)), window)
        torch.testing.assert_close(output[rows].cpu().double(), wanted[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[rows].cpu().double(), wanted[1], rtol=1e-3, atol=1e-3)
    # rows outside chunks are unchanged
    others = [*range(num_decode), *range(starts[-1], size.rows)]
    assert (output[others] == 5).all()
    assert (lse[others] == 6).all()


def test_what_a_chunk_alone_reads_is_one_run_where_it_is_not_joined():
    run = PrefixSegment(
        query_idx=torch.arange(200),
        block_ids=torch.arange(MAX_JOINED_TOKENS // 4),
        num_tokens=MAX_JOINED_TOKENS,
        chunk=0,
    )
    other = replace(run, query_idx=torch.arange(300), num_tokens=64, chunk=None)
    part = PrefillPart(starts=(0, 200), lens=(200, 100))
    plan = AttentionPlan(num_decode=0, decode=None, prefill=part, segments=(run, other))
    joined, apart = index_of(plan, 300), index_of(plan, 300, joins_segments=False)
    assert (joined.size.places, joined.size.chunk_blocks) == (300, MAX_JOINED_TOKENS // 4)
    # one place for each row and run, and a whole run for each item
    assert (apart.size.places, apart.size.chunk_blocks) == (500, 0)
    assert apart.size.segment_items == joined.size.segment_items + 2
    items = parts_of(apart.size, apart.array()).runs.reshape(-1, 7)
    assert [MAX_JOINED_TOKENS] * 2 == items[-2:, 4].tolist()
    assert apart.size.chunk_items == joined.size.chunk_items == 3


def test_a_graph_repeats_steps_with_chunks(
    tmp_path,
    monkeypatch,
    recorded_launches,  # noqa: F811
    device,
    ops,
):
    if device.type == "cuda":
        pytest.skip("float32 is no type of FlashAttention on a GPU")
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    build("mistral-window", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    steps = shape((5,), mixed=(10,), max_row_blocks=2)
    captured = capture(tmp_path / "model", device, ops=ops, steps=steps)
    captured.graphs.check(captured.plain)
    fill_randomly(captured.cache)
    sizes = steps.sizes()
    # prompts that begin, then with one that continues and a prefix that decodes share
    for size in (sizes.mixed[0], sizes.mixed_shared[0]):
        batch = checked_step(
            size, captured.cache.k, captured.plain.vocab_size, joins_segments=False
        )
        # also for the first chunk
        batch = replace(batch, logits_idx=torch.arange(len(batch.token_ids))[-5:])
        expected = captured.plain.forward(batch, captured.cache)
        made = captured.graphs.run(batch)
        torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kv_dtype", [DTYPE, INT8], ids=str)
def test_it_agrees_on_the_steps_that_are_timed(kv_dtype, ops, device, monkeypatch):
    monkeypatch.setattr(library_ops, "_CHUNK_TOKENS", 6)
    monkeypatch.setattr(library_ops, "_CACHED_TOKENS", 8)
    monkeypatch.setattr(library_ops, "can_vary", lambda *_: True)
    seconds = iter([2.0, 1.0] * 4)
    chosen = library_ops.with_varlen_attention(
        ops_for(torch.device("cuda")),
        replace(SPECS["windows"], num_heads=4, num_kv_heads=2, head_dim=16),
        dtype=DTYPE,
        kv_dtype=kv_dtype,
        block_size=4,
        device=device,
        seconds_of=lambda _: next(seconds),
    )
    assert not chosen.joins_segments
    assert chosen.attend.keywords == ops.attend.keywords


def test_sizes_without_chunks_have_no_pieces(ops):
    size = StepSize(rows=2, decode_rows=2, entries=2, row_blocks=1)
    rows = torch.zeros(2, dtype=torch.int64)
    index = torch.zeros(size.num_index, dtype=torch.int32)
    assert ops.prepare_fixed(size, index, positions=rows, slot_mapping=rows).pieces is None
