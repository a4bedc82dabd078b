"""Captured decode steps: the logits of the plain forward pass, whatever step came before."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from raybatch.engine.forward.graph_sizes import step_sizes
from raybatch.engine.forward.step_graphs import GraphMismatchError, StepBuffers
from raybatch.kernels.attention_plan import PrefillPart, PrefixSegment
from raybatch.kernels.dispatch import REFERENCE
from tests import tolerances
from tests.engine.fixed_ops import FIXED
from tests.engine.forward.graph_cases import (
    BLOCK,
    NUM_BLOCKS,
    capture,
    fill_randomly,
    random_step,
    saved,
    shape,
)
from tests.engine.forward.recorded_graphs import CaptureError
from tests.engine.tiny_models import TOLERANCE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
VARIANTS = ["llama-biases-tied", "qwen2-window-in-upper-layers", "qwen3-moe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with saved(VARIANTS, tmp_path_factory.mktemp("models")) as folder:
        yield folder


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(scope="module", params=VARIANTS)
def captured(request, folder, device):
    return capture(folder / request.param, device)


@pytest.fixture(scope="module")
def dense(folder):
    return capture(folder / "llama-biases-tied")


def test_a_replay_gives_the_logits_of_the_plain_forward_pass_for_any_step(captured):
    fill_randomly(captured.cache)
    for seed in range(24):
        batch = random_step(1 + seed % 8, seed, captured.device)
        expected = captured.plain.forward(batch, captured.cache)
        keys = captured.cache.k.clone()
        made = captured.graphs.run(batch)
        tolerances.assert_close(made, expected, TOLERANCE)
        assert torch.equal(expected.argmax(dim=-1), made.argmax(dim=-1))
        # the last block is for padding
        made_keys, keys = captured.cache.k[:, :NUM_BLOCKS], keys[:, :NUM_BLOCKS]
        tolerances.assert_close(made_keys, keys, TOLERANCE)
    counts = captured.graphs.counts
    assert (4, {}) == (counts.num_captured, counts.eager_steps)
    assert counts.num_steps >= 24


def test_padding_writes_into_the_scrap_block_alone(captured):
    for seed, num_rows in enumerate((1, 3, 5, 6, 7)):
        fill_randomly(captured.cache, seed)
        batch = random_step(num_rows, seed, captured.device)
        before = captured.cache.k.clone(), captured.cache.v.clone()
        captured.graphs.run(batch)
        for pool, old in zip((captured.cache.k, captured.cache.v), before, strict=True):
            is_changed = (pool != old).any(dim=-1).any(dim=2).any(dim=0).flatten()
            slots = is_changed.nonzero().flatten()
            own = slots[slots < NUM_BLOCKS * BLOCK]
            assert torch.equal(batch.slot_mapping.sort().values, own)
            scrap = slots[slots >= NUM_BLOCKS * BLOCK] - NUM_BLOCKS * BLOCK
            assert scrap.tolist() in ([], [0])


def test_what_padding_computes_does_not_reach_a_row(dense):
    fill_randomly(dense.cache)
    alone = random_step(3, 5)
    expected = dense.graphs.run(alone).clone()
    for pool in (dense.cache.k, dense.cache.v):
        pool[:, NUM_BLOCKS] = 1e30
    assert torch.equal(expected, dense.graphs.run(alone))


def test_a_step_leaves_nothing_for_the_next_one(dense):
    """Rows and entries of a larger step lie behind those of a smaller one, which has no padding."""
    smaller, larger = random_step(4, 6, shares_blocks=False), random_step(8, 12)
    used = smaller.attention.decode.block_ids
    assert len(used) < len(larger.attention.decode.block_ids)
    fill_randomly(dense.cache)
    expected = dense.graphs.run(smaller).clone()
    dense.graphs.run(larger)
    fill_randomly(dense.cache)
    is_foreign = torch.ones(NUM_BLOCKS + 1, dtype=torch.bool)
    is_foreign[used] = is_foreign[NUM_BLOCKS] = False
    for pool in (dense.cache.k, dense.cache.v):
        pool[:, is_foreign] = float("nan")
    assert torch.equal(expected, dense.graphs.run(smaller))


def test_steps_without_a_graph_are_counted_by_why(folder):
    steps = shape((1, 4), max_entries=20)
    captured = capture(folder / "llama-biases-tied", steps=steps)
    fill_randomly(captured.cache)
    batch = random_step(3, 1)
    plan = batch.attention
    rows = torch.arange(2)
    context = PrefixSegment(query_idx=rows, block_ids=rows, num_tokens=2 * BLOCK)
    prefill = PrefillPart(starts=(2,), lens=(1,))
    wide = random_step(4, 3)
    assert len(wide.attention.decode.block_ids) > 12
    for found in (
        replace(batch, attention=replace(plan, segments=(context,))),
        replace(batch, attention=replace(random_step(2, 1).attention, prefill=prefill)),
        replace(batch, attention=replace(plan, num_decode=0, decode=None, prefill=prefill)),
        random_step(5, 2),
    ):
        assert captured.graphs.run(found) is None
    narrow = capture(
        folder / "llama-biases-tied", steps=shape((1, 4), max_row_blocks=7, max_entries=12)
    )
    assert narrow.graphs.run(wide) is None
    assert {"blocks": 1} == narrow.graphs.counts.eager_steps
    assert captured.graphs.counts.eager_steps == {"rows": 4}
    assert 0 == captured.graphs.counts.num_steps


def test_experts_that_are_cut_by_counts_cannot_be_captured(folder):
    with pytest.raises(CaptureError, match=r"tolist|bincount"):
        capture(folder / "qwen3-moe", ops=replace(FIXED, moe_ffn=REFERENCE.moe_ffn))


def test_a_graph_equals_the_plain_pass_before_it_is_used(captured):
    for pool in (captured.cache.k, captured.cache.v):
        pool.zero_()
    captured.graphs.check(captured.plain)
    # what was written for the comparison is gone
    for pool in (captured.cache.k, captured.cache.v):
        assert not pool[:, :NUM_BLOCKS].any()


def test_the_check_works_in_a_pool_of_one_block(folder):
    captured = capture(folder / "llama-biases-tied", num_blocks=1)
    captured.graphs.check(captured.plain)


def attends_to_one_block(size, index, **rest):
    return FIXED.prepare_fixed(size, torch.where(index > 3, 3, index), **rest)


def forgets_the_position(size, index, *, positions, slot_mapping):
    return FIXED.prepare_fixed(size, index, positions=positions, slot_mapping=slot_mapping * 0)


@pytest.mark.parametrize("wrong", [attends_to_one_block, forgets_the_position])
def test_a_graph_that_computes_something_else_is_refused(wrong, folder):
    captured = capture(folder / "llama-biases-tied", ops=replace(FIXED, prepare_fixed=wrong))
    with pytest.raises(GraphMismatchError, match=r"differs from the eager pass"):
        captured.graphs.check(captured.plain)


def test_sizes_grow_so_that_little_is_padding():
    assert (1, 2, 4, 8, 16, 24, 32, 40) == step_sizes(40, 8)
    assert (1, 2, 3) == step_sizes(3, 8)
    for to_a_doubling, most in ((8, 51), (4, 33)):
        sizes = step_sizes(2048, to_a_doubling)
        assert (1, 2048) == (sizes[0], sizes[-1])
        assert len(sizes) <= most
        for smaller, larger in pairwise(sizes):
            if smaller >= 64:
                assert larger - (smaller + 1) <= (smaller + 1) / to_a_doubling


def test_buffers_take_as_many_bytes_as_are_counted(dense):
    sizes = shape((1, 8), mixed=(16,), max_row_blocks=5).sizes().all()
    spec, dtype = dense.plain.spec, torch.bfloat16
    buffers = StepBuffers(
        sizes, scrap_block=9, block_size=BLOCK, spec=spec, dtype=dtype, device=torch.device("cpu")
    )
    made = (buffers.logits, buffers.numbers, *buffers.last)
    assert StepBuffers.bytes_of(sizes, spec, dtype) == sum(x.nbytes for x in made)
    assert [size.num_index for size in sizes] == [len(buffers.inputs(s)[3]) for s in sizes]
