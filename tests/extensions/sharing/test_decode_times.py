"""Curves of decode passes: from which batch on copies hide, and what they add."""

from itertools import pairwise

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch_extensions.sharing.decode_times import DecodeCurve, GpuRates

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def curve_of(seconds, sizes=SIZES):
    return DecodeCurve(rows=tuple(map(float, sizes)), seconds=tuple(map(seconds, sizes)))


def test_a_fit_is_the_curve_itself_where_that_is_convex():
    curve = curve_of(lambda b: 0.004 + 0.02 * max(1, b / 64))
    fitted = DecodeCurve.fit(list(zip(curve.rows, curve.seconds, strict=True)))
    assert fitted.rows == curve.rows
    assert fitted.seconds == pytest.approx(curve.seconds, rel=1e-6)


def test_a_fit_never_falls_and_is_convex():
    rng = np.random.default_rng(1)
    fitted = DecodeCurve.fit([(b, rng.uniform(0.5, 1.5) * (1 + b / 50)) for b in SIZES])
    steps = list(zip(pairwise(fitted.rows), pairwise(fitted.seconds), strict=True))
    slopes = [(s1 - s0) / (r1 - r0) for (r0, r1), (s0, s1) in steps]
    assert min(slopes) >= 0
    assert all(late >= early - 1e-9 for early, late in pairwise(slopes))


def test_copies_hide_from_the_least_batch_whose_pass_is_as_long():
    curve = curve_of(lambda b: 0.02 * max(1, b / 64))
    for fetch_s in (0.001, 0.02, 0.021, 0.05, 0.16):
        hides = [b for b in range(1, 513) if curve.at(b) >= fetch_s - 1e-12]
        assert hides[0] == curve.hiding_rows(fetch_s)
    assert curve.hiding_rows(0.17) is None


def test_a_curve_goes_on_beyond_its_last_size():
    curve = DecodeCurve(rows=(2.0, 4.0), seconds=(1.0, 2.0))
    assert [curve.at(b) for b in (1, 2, 3, 4, 6)] == [1.0, 1.0, 1.5, 2.0, 3.0]


def test_a_gpu_without_rates_is_refused():
    with pytest.raises(ConfigError, match="flops of a GPU must be a number above 0, got 0"):
        GpuRates(bytes_per_s=1, flops=0, link_bytes_per_s=1)
