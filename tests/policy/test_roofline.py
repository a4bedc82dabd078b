"""Rooflines: what is fitted is what the runs were made with."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.roofline import MeasuredWork, Roofline, Work, fit_roofline, link
from tests.policy.layers import SPARSE

TRUTH = Roofline(fixed_s=3e-4, operation_s=1e-11, byte_s=1e-10)
SIZES = (1, 4, 16, 64, 128, 256, 1024, 4096)
UNSEEN = (2, 8, 32, 48, 96, 512, 2048, 3000)


def relative_error(cost, points):
    """Return the root mean square of the relative errors over runs, such as ones left out."""
    return np.sqrt(np.mean([(cost.seconds(p.work) / p.seconds - 1) ** 2 for p in points]))


def runs_of(truth, sizes=SIZES, *, noise=None):
    works = [(n, SPARSE.ffn_work(n)) for n in sizes]
    factors = noise if noise is not None else [1.0] * len(works)
    return [
        MeasuredWork(tokens=n, work=work, seconds=truth.seconds(work) * factor)
        for (n, work), factor in zip(works, factors, strict=True)
    ]


@pytest.mark.parametrize("serial_fraction", [0.0, 0.5, 1.0])
def test_the_costs_behind_exact_runs_are_found(serial_fraction):
    truth = replace(TRUTH, serial_fraction=serial_fraction)
    found = fit_roofline(runs_of(truth))
    for name in ("fixed_s", "operation_s", "byte_s", "serial_fraction"):
        assert pytest.approx(getattr(truth, name), rel=1e-6) == getattr(found, name)
    assert found.fit_error < 1e-9


def test_runs_come_in_any_order(rng):
    runs = runs_of(TRUTH)
    shuffled = [runs[i] for i in rng.permutation(len(runs))]
    assert fit_roofline(runs) == fit_roofline(shuffled)


def test_sizes_that_were_not_measured_are_predicted_from_noisy_runs(rng):
    noise = rng.uniform(0.97, 1.03, len(SIZES))
    found = fit_roofline(runs_of(TRUTH, noise=noise))
    assert relative_error(found, runs_of(TRUTH, UNSEEN)) < 0.05


def test_moving_costs_nothing_where_it_bound_no_run():
    found = fit_roofline(runs_of(replace(TRUTH, byte_s=0.0)))
    assert 0.0 == found.byte_s
    assert pytest.approx(TRUTH.operation_s) == found.operation_s


def test_a_batch_beyond_runs_that_bytes_bound_is_taken_to_gain_nothing():
    sizes = (1, 2, 4, 8, 16)
    works = [SPARSE.ffn_work(n) for n in sizes]
    assert all(TRUTH.byte_s * w.moved_bytes > TRUTH.operation_s * w.operations for w in works)
    found = fit_roofline(runs_of(TRUTH, sizes))
    assert relative_error(found, runs_of(TRUTH, sizes)) < 1e-9
    variable = [found.seconds(SPARSE.ffn_work(n)) - found.fixed_s for n in (16, 160)]
    assert pytest.approx(10 * variable[0]) == variable[1]


def test_seconds_are_fixed_and_the_longer_side_and_a_share_of_the_shorter():
    cost = Roofline(fixed_s=1.0, operation_s=2.0, byte_s=3.0, serial_fraction=0.25)
    assert 1 + 10 + 0.25 * 9 == cost.seconds(Work(operations=5, moved_bytes=3))
    assert 1 + 12 + 0.25 * 10 == cost.seconds(Work(operations=5, moved_bytes=4))


def test_runs_have_the_same_weight_whether_short_or_long():
    work = Work(operations=0.0, moved_bytes=8.0)
    runs = [MeasuredWork(tokens=1, work=work, seconds=s) for s in (1.0, 3.0)]
    # the x that minimises (x / 1 - 1)^2 + (x / 3 - 1)^2
    assert pytest.approx(1.2) == fit_roofline(runs).seconds(work)
    assert pytest.approx(0.4**0.5 / 2**0.5) == fit_roofline(runs).fit_error


def test_a_link_takes_its_fixed_time_and_its_bandwidth():
    copy = link(1e9, fixed_s=0.5)
    assert pytest.approx(2.5) == copy.seconds(Work(operations=7.0, moved_bytes=2e9))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit_roofline([]), "got none"),
        (lambda: link(0.0), "bytes_per_s"),
        (lambda: replace(TRUTH, byte_s=-1.0), "cost .* got -1"),
        (lambda: replace(TRUTH, fixed_s=float("nan")), "cost .* got nan"),
        (lambda: replace(TRUTH, serial_fraction=1.5), r"serial_fraction .* got 1\.5"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
