"""Programs of a launch in any order, as on a GPU: results must be equal."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from raybatch.kernels.linear import Linear
from raybatch.kernels.triton import linear, moe, small_ops
from tests.kernels.triton.support import Step, spread_over


@pytest.fixture
def ordered(device, monkeypatch):
    """A function that runs another with the programs of each launch in a seeded random order."""
    if device.type == "cuda":
        pytest.skip("a GPU chooses its own order")
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

    def run(seed, function):
        orders = random.Random(seed)
        places = {}

        def set_grid_dim(*sizes):
            set_dim(*sizes)
            programs = list(itertools.product(*map(range, sizes)))
            shuffled = orders.sample(programs, len(programs)) if seed else programs[::-1]
            places.clear()
            places.update(zip(programs, shuffled, strict=True))

        monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
        monkeypatch.setattr(builder, "set_grid_idx", lambda *place: set_idx(*places[place]))
        made = function()
        monkeypatch.setattr(builder, "set_grid_dim", set_dim)
        monkeypatch.setattr(builder, "set_grid_idx", set_idx)
        return made

    return run


def attended(window, device):
    sequences = [(13, 1, 0), (8, 1, 0), (21, 1, 1), (50, 1), (0, 7), (13, 9, 0), (0, 20)]
    return Step(sequences, num_decode=4, prefixes=(2, 3), window=window, device=device).run()


def mixed_experts(device):
    torch.manual_seed(0)
    x, router = torch.randn(37, 16, device=device), torch.randn(6, 16, device=device)
    gate_up, down = (torch.randn(6, *shape, device=device) for shape in ((40, 16), (16, 20)))
    return moe.moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True)


def small(device):
    torch.manual_seed(0)
    x, hidden = torch.randn(2, 40, 24, device=device)
    scales = torch.rand(24, device=device) / 100
    weight = torch.randint(-127, 128, (24, 24), dtype=torch.int8, device=device)
    linear.add_linear_(
        x, small_ops.rms_norm(hidden, scales, 1e-6), Linear(weight, 24, None, scales)
    )
    return linear.gated(x)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda device: attended(None, device), id="attention"),
        pytest.param(lambda device: attended(6, device), id="windows"),
        pytest.param(mixed_experts, id="experts"),
        pytest.param(small, id="small"),
    ],
)
def test_the_order_of_programs_changes_no_bit(run, ordered, device, monkeypatch):
    spread_over(4, monkeypatch)
    expected = run(device)
    for seed in (0, 1):
        assert torch.equal(expected, ordered(seed, lambda: run(device)))


@triton.jit
def running_kernel(x_ptr):
    place = tl.program_id(0)
    tl.store(x_ptr + place + 1, tl.load(x_ptr + place) + 1)


def test_an_order_that_matters_is_found(ordered, device):
    def run():
        x = torch.zeros(9, device=device)
        InterpretedFunction(running_kernel.fn)[(8,)](x)
        return x

    assert not torch.equal(run(), ordered(1, run))
