"""Resident layers, and the extra time of a pass with streamed ones."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import ModuleCosts, pass_seconds
from raybatch.policy.cost.roofline import Roofline, link
from raybatch.policy.memory_budget import WeightSizes, plan_weight_placement, weight_placements

EVEN = WeightSizes(other_bytes=10, ffn_bytes=(100,) * 6)


def plan(budget, buffers=2, sizes=EVEN):
    return plan_weight_placement(sizes, device_weight_bytes=budget, weight_buffers=buffers)


def test_without_a_budget_all_layers_stay():
    found = plan(None)
    assert ((True,) * 6, 0, 610, 0) == (
        found.is_resident,
        found.num_buffers,
        found.device_bytes,
        found.pass_bytes,
    )


@pytest.mark.parametrize(
    ("budget", "buffers", "streamed"),
    [
        (610, 2, ()),
        # with two buffers, two fewer resident layers free no memory
        (609, 2, (1, 3, 5)),
        (510, 2, (1, 3, 5)),
        (509, 2, (1, 2, 4, 5)),
        (409, 2, (1, 2, 3, 4, 5)),
        (210, 2, (0, 1, 2, 3, 4, 5)),
        (110, 1, (0, 1, 2, 3, 4, 5)),
        (410, 3, (1, 2, 3, 4, 5)),
    ],
)
def test_the_most_layers_that_fit_stay_spread_over_the_model(budget, buffers, streamed):
    found = plan(budget, buffers)
    assert streamed == found.streamed
    assert 100 * len(streamed) == found.pass_bytes
    assert found.device_bytes <= budget


def test_a_budget_below_the_buffers_is_refused_with_what_to_do():
    with pytest.raises(
        ConfigError,
        match=r"engine\.device_weight_bytes is 209, but must be at least 210: .* 10 bytes, and 2 "
        r"buffers .*\(engine\.weight_buffers\) up to 200 bytes; raise it, .* all 610 bytes",
    ):
        plan(209)


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=9),
    st.integers(0, 50),
    st.integers(1, 4),
    st.integers(0, 1000),
)
def test_a_plan_holds_its_budget_and_no_plan_has_more_layers(layers, other, buffers, budget):
    sizes = WeightSizes(other_bytes=other, ffn_bytes=tuple(layers))
    try:
        found = plan(budget, buffers, sizes)
    except ConfigError:
        # the whole model is one of the plans
        assert budget < sizes.total_bytes
        return
    assert found.device_bytes <= budget
    assert (budget >= sizes.total_bytes) == (not found.streamed)
    assert found.num_buffers == min(buffers, len(found.streamed))
    assert all(layers[idx] <= found.buffer_bytes for idx in found.streamed)
    staying = sum(size for size, kept in zip(layers, found.is_resident, strict=True) if kept)
    assert found.device_bytes == other + staying + found.num_buffers * found.buffer_bytes
    assert found.pass_bytes == sum(layers) - staying


def time_of(placement, layer_s, *, overlap=True, link_s=0.0):
    # a copy of a layer takes one second
    free, copies = Roofline(fixed_s=0, operation_s=0, byte_s=0), link(100.0)
    costs = ModuleCosts(
        attention=free, ffn=free, to_device=copies, to_host=copies, copies_overlap=overlap
    )
    layers_s = np.array([len(placement.is_resident) * layer_s])
    return float(pass_seconds(placement, layers_s, costs, link_s)[0])


@pytest.mark.parametrize(
    ("budget", "buffers", "layer_s", "overlap", "expected"),
    [
        (None, 2, 2.0, True, 12.0),
        # all six are streamed: hidden by longer computations, or the reverse
        (210, 2, 2.0, True, 12.0),
        (210, 2, 0.5, True, 6.0),
        (210, 2, 0.0, True, 6.0),
        # nothing is copied ahead into a single buffer, or by the core that computes
        (110, 1, 2.0, True, 18.0),
        (210, 2, 2.0, False, 18.0),
        # three are streamed, each after a resident layer
        (510, 2, 0.5, True, 3.0),
        (510, 2, 0.25, True, 3.0),
    ],
)
def test_a_pass_takes_the_longer_of_copies_and_computations(
    budget, buffers, layer_s, overlap, expected
):
    assert pytest.approx(expected) == time_of(plan(budget, buffers), layer_s, overlap=overlap)


def test_copies_of_kv_share_the_link():
    streamed = plan(510)
    assert pytest.approx(12.0) == time_of(streamed, 2.0, link_s=8.0)
    assert pytest.approx(13.0) == time_of(streamed, 2.0, link_s=10.0)
    assert pytest.approx(12.0) == time_of(plan(None), 2.0, link_s=20.0)


def played(placement, layer_s, num_passes=40):
    """Seconds of a steady pass, simulated layer by layer over `num_passes` passes."""
    computed = copied = 0.0
    ends, after_pass = [], []
    for _ in range(num_passes):
        for stays in placement.is_resident:
            if not stays:
                free = ends[-placement.num_buffers] if len(ends) >= placement.num_buffers else 0
                copied = max(copied, free) + 1.0
                computed = max(computed, copied)
            computed += layer_s
            if not stays:
                ends.append(computed)
        after_pass.append(computed)
    half = num_passes // 2
    return (after_pass[-1] - after_pass[half - 1]) / half


@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 4), st.floats(0, 3))
def test_a_pass_has_the_time_of_a_simulation(num_layers, num_resident, buffers, layer_s):
    sizes = WeightSizes(other_bytes=0, ffn_bytes=(100,) * num_layers)
    placement = weight_placements(sizes, buffers)[num_layers - min(num_resident, num_layers)]
    found, expected = time_of(placement, layer_s), played(placement, layer_s)
    # streamed layers that do not divide all layers do not come at equal distances
    is_even = not placement.streamed or num_layers % len(placement.streamed) == 0
    assert found <= expected * (1 + 1e-9)
    assert found >= expected * (1 - (1e-9 if is_even else 0.2))
