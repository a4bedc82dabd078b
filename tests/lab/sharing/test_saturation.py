"""The batch from which a decode pass grows with its rows."""

import numpy as np
import pytest

from raybatch_extensions.sharing.decode_times import DecodeCurve
from raybatch_lab.sharing.memory_plan import saturation_rows
from tests.extensions.sharing.test_decode_times import SIZES, curve_of


@pytest.mark.parametrize("knee", [16, 48, 100, 256])
def test_the_knee_of_a_flat_curve_and_a_line_is_their_corner(knee):
    curve = curve_of(lambda b: 0.02 * max(1, b / knee), sizes=sorted({*SIZES, knee}))
    assert saturation_rows(curve) == knee


@pytest.mark.parametrize("knee", [3, 20, 100, 300])
def test_the_knee_of_a_line_is_where_half_of_it_is_fixed(knee):
    assert saturation_rows(curve_of(lambda b: 0.02 + 0.02 * b / knee)) == pytest.approx(knee)


def test_a_curve_that_is_flat_has_no_knee_and_one_through_zero_has_the_first_size():
    assert saturation_rows(curve_of(lambda b: 0.02)) is None
    assert saturation_rows(curve_of(lambda b: 0.02 + 1e-6 * b)) is None
    assert saturation_rows(curve_of(lambda b: 0.001 * b)) == 1


@pytest.mark.parametrize("knee", [24, 64, 192])
@pytest.mark.parametrize("seed", range(5))
def test_the_knee_is_found_under_noise(knee, seed):
    rng = np.random.default_rng(seed)
    points = [
        (b, 0.02 * max(1.0, b / knee) * rng.uniform(0.95, 1.05)) for b in SIZES for _ in range(3)
    ]
    found = saturation_rows(DecodeCurve.fit(points))
    # to the next size that was measured
    assert knee / 1.6 <= found <= 1.6 * knee
