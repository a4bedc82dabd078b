"""Steps of all kinds in an index that is larger than they are, as a graph of several steps has."""

from dataclasses import astuple, replace

import numpy as np
import pytest
import torch

from raybatch.kernels.small_ops import rotation_table
from raybatch.kernels.step_index import StepIndex, StepSize
from raybatch.kernels.triton import attention as kernels
from tests.engine.fixed_ops import FIXED
from tests.kernels.triton.support import Step, assert_close

STEPS = {
    "decode": {"sequences": [(7, 1), (30, 1)], "num_decode": 2},
    "prefill": {"sequences": [(5, 4), (0, 3), (6, 5)]},
    "shared": {"sequences": [(13, 1, 0), (8, 1, 0), (9, 1, 0)], "num_decode": 3, "prefixes": (2,)},
    "mixed": {
        "sequences": [(13, 1, 0), (21, 1, 1), (5, 1), (0, 4), (13, 3, 0)],
        "num_decode": 3,
        "prefixes": (2, 3),
    },
}


def index_of(step):
    return StepIndex(step.plan(), num_rows=len(step.positions), num_kv_heads=2, block_size=4)


def size_of_all():
    """The smallest size that covers all steps, and some more of everything."""
    sizes = [astuple(index_of(Step(**options)).size) for options in STEPS.values()]
    largest = (max(numbers) + 1 for numbers in zip(*sizes, strict=True))
    return StepSize(**dict(zip(StepSize.__slots__, largest, strict=True)))


def padded(rows, size, filled):
    return torch.cat((rows, torch.full((size - len(rows),), filled, dtype=rows.dtype)))


@pytest.mark.parametrize(
    ("ops", "window"),
    [
        pytest.param(kernels, 6, id="kernels-6"),
        pytest.param(kernels, None, id="kernels", marks=pytest.mark.slow),
        pytest.param(FIXED, 6, id="torch-6"),
        pytest.param(FIXED, None, id="torch"),
    ],
)
def test_steps_of_all_kinds_take_turns_in_one_index(ops, window, device):
    size = size_of_all()
    # entries of earlier steps and garbage stay where nothing is written
    on_host = np.full(size.num_index, 2, np.int32)
    for name in (*STEPS, "decode"):
        step = Step(window=window, device=device, **STEPS[name])
        expected = step.run()
        num_written = index_of(step).write(size, on_host)
        assert num_written < size.num_index
        pools = [step.tensors[pool].clone() for pool in ("k_pool", "v_pool")]
        # the scrap block, which is no sequence's
        pools = [torch.cat((pool, pool.new_zeros(1, *pool.shape[1:]))).to(device) for pool in pools]
        scrap = (len(pools[0]) - 1) * 4
        num_rows = len(step.positions)
        qkv = torch.cat((step.tensors["qkv"], torch.ones(size.rows - num_rows, 8, 16)))
        prepared = ops.prepare_fixed(
            size,
            torch.from_numpy(on_host.copy()).to(device),
            positions=padded(step.positions, size.rows, 0).to(device),
            slot_mapping=padded(step.slots, size.rows, scrap).to(device),
        )
        turns = rotation_table(torch.zeros(size.rows), torch.zeros(8), 1.0).to(device)
        heads = ops.finish_heads(qkv.to(device), 4, None, 0.0, turns, *pools, prepared)
        made = ops.attend(*heads, *pools, prepared, window)
        assert_close(made[:num_rows], expected.cpu())
        assert not made[num_rows:].any()


def test_a_size_covers_what_is_no_larger_in_any_way():
    step = Step(**STEPS["mixed"])
    size = index_of(step).size
    assert size.covers(size)
    for name in StepSize.__slots__:
        smaller = replace(size, **{name: getattr(size, name) - 1})
        assert not smaller.covers(size)
        assert size.covers(smaller)
