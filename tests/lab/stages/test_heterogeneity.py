"""The curve of measured factors."""

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch_lab.stages.heterogeneity import FLAT, MixCurve, MixPoint, variation
from tests.lab.stages.pools import curve_to


def test_factors_lie_between_those_of_their_neighbours_and_end_with_the_last():
    found = curve_to(2.0).at([0.0, 0.25, 1.0, 9.0])
    np.testing.assert_allclose(found, [1.0, 1.25, 2.0, 2.0])


def test_a_flat_curve_has_the_factor_one():
    np.testing.assert_array_equal(FLAT.at([0.0, 2.0]), [1.0, 1.0])


def test_measured_seconds_are_related_to_those_of_one_length():
    curve = MixCurve.of_seconds([0.0, 1.0], [4.0, 5.0])
    assert (1.0, 1.25) == tuple(point.factor for point in curve.points)


@pytest.mark.parametrize("variations", [[], [0.5], [0.0, 1.0, 1.0], [0.0, 2.0, 1.0]])
def test_variations_that_do_not_ascend_from_zero_are_refused(variations):
    points = tuple(MixPoint(variation=v, factor=1.0) for v in variations)
    with pytest.raises(ConfigError, match="ascend from 0"):
        MixCurve(points=points)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf")])
def test_a_factor_that_is_no_positive_number_is_refused(factor):
    with pytest.raises(ConfigError, match="above 0"):
        MixCurve(points=(MixPoint(variation=0.0, factor=factor),))


def test_variation_of_sums_is_that_of_the_values():
    values = np.array([3.0, 5.0, 100.0])
    sums = (np.array([3.0]), np.array([values.sum()]), np.array([(values**2).sum()]))
    assert variation(*sums)[0] == pytest.approx(values.std() / values.mean())
