"""The links, the workloads and the figures of simulations."""

import json
from dataclasses import replace

import numpy as np
import pytest

from raybatch.engine.profile.cached_file import write_cached
from raybatch.errors import ConfigError
from raybatch.records.types import ReplicaStats
from raybatch_lab.simulator.events import PoolSpec
from raybatch_lab.simulator.figures import Ideal, ideal_of, idle_share, simulate
from raybatch_lab.simulator.links import Link, LinkSpec
from raybatch_lab.simulator.pool import PoolOutcome, ReplicaOutcome
from raybatch_lab.simulator.validation import (
    HeldOutRun,
    Validation,
    read_validation,
    validation_path,
)
from raybatch_lab.simulator.workloads import make_rows
from tests.lab.simulator.pools import engine_spec, fixed_rows

NAMES = ("W1", "W2", "W3", "W4", "W5", "W6", "W7", "W8", "W11")


def test_transfers_share_a_link():
    link = Link(LinkSpec(bytes_per_s=10.0, latency_s=0.5))
    assert [link.arrival(0.0, 20), link.arrival(0.0, 10), link.arrival(10.0, 10)] == [
        2.5,
        3.5,
        11.5,
    ]


def test_a_pause_lets_a_burst_pass_and_no_more():
    link = Link(LinkSpec(bytes_per_s=10.0, burst_bytes=20.0))
    assert [link.arrival(0.0, 20), link.arrival(100.0, 20), link.arrival(100.0, 10)] == [
        0,
        100,
        101,
    ]


def test_a_link_without_bytes_is_refused():
    with pytest.raises(ConfigError, match="above 0"):
        LinkSpec(bytes_per_s=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_workloads_are_the_same_for_a_seed(name):
    first, again, other = (make_rows(name, num_rows=480, seed=seed) for seed in (1, 1, 2))
    for column in ("prompt", "output", "group", "prefix"):
        assert getattr(first, column).tolist() == getattr(again, column).tolist()
    is_drawn = name in ("W3", "W4", "W5", "W7", "W8")
    assert is_drawn == (first.output.tolist() != other.output.tolist())


def test_groups_of_a_workload_lie_side_by_side():
    rows = make_rows("W3", num_rows=1200)
    group = rows.group[rows.group >= 0]
    assert np.count_nonzero(np.diff(group)) == len(np.unique(group)) - 1


def test_the_heavy_tail_is_as_long_as_it_says():
    output = make_rows("w4").output
    assert len(output) == 20_000
    assert np.median(output) == pytest.approx(200, rel=0.05)
    assert np.quantile(output, 0.99) / np.quantile(output, 0.95) == pytest.approx(3.7, rel=0.2)
    assert output.max() / np.quantile(output, 0.95) == pytest.approx(9.2, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"name": "W9"}, "unknown workload 'W9'"), ({"name": "W4", "num_rows": 0}, "at least 1")],
)
def test_a_workload_that_is_none_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_rows(**options)


def test_an_ideal_pool_is_bound_by_its_longest_row():
    ideal = Ideal(longest_row_s=10.0, one_engine_s=100.0)
    assert [ideal.seconds(speed) for speed in (1, 5, 20)] == [100.0, 20.0, 10.0]


def test_one_engine_of_equal_rows_is_ideal():
    rows, spec = fixed_rows(400), engine_spec()
    figures = simulate(rows, spec, PoolSpec(num_replicas=1), ideal_of(rows, spec))
    assert figures.ratio == pytest.approx(1.0, rel=0.02)
    assert figures.linear_share == pytest.approx(1.0, rel=0.02)
    assert figures.idle_share == pytest.approx(0.0, abs=0.01)


def test_a_slow_replica_counts_as_what_it_does():
    rows, spec = fixed_rows(800), engine_spec()
    ideal = ideal_of(rows, spec)
    plain, slowed = (
        simulate(rows, spec, PoolSpec(num_replicas=2, slowness=slowness), ideal)
        for slowness in ({}, {0: 2.0})
    )
    assert slowed.ideal_s / plain.ideal_s == pytest.approx(2 / 1.5)
    assert slowed.ratio == pytest.approx(1.0, rel=0.1)


def outcome_of(*busy):
    replicas = tuple(
        ReplicaOutcome(rank=rank, num_rows=1, busy=spans, stats=ReplicaStats())
        for rank, spans in enumerate(busy)
    )
    return PoolOutcome(
        ready_s=0.0,
        completion_s=100.0,
        finished=np.ones(2, np.int64),
        num_given_up=0,
        num_stolen=0,
        num_moved=0,
        num_deaths=0,
        dry_s=0.0,
        dry_tokens=0,
        replicas=replicas,
    )


def test_idle_time_is_that_of_the_last_tenth():
    outcome = outcome_of(((0.0, 50.0), (92.0, 100.0)), ((0.0, 95.0),))
    assert idle_share(outcome, 2) == pytest.approx(1 - (8 + 5) / 20)
    late = replace(outcome, ready_s=50.0)
    assert idle_share(late, 2) == pytest.approx(1 - 5 / 10)


def test_a_start_is_no_part_of_a_completion():
    rows, spec = fixed_rows(400), engine_spec()
    ideal = ideal_of(rows, spec)
    plain, late = (
        simulate(rows, spec, PoolSpec(num_replicas=1, start_s=start_s), ideal).completion_s
        for start_s in (0.0, 100.0)
    )
    assert plain == pytest.approx(late)


def held_out(workload, policy, measured, simulated):
    return HeldOutRun(
        workload=workload,
        policy=policy,
        measured_s=np.array(measured),
        simulated_s=np.array(simulated),
    )


RUNS = (
    held_out("tail", "long", [1.0, 1.0, 2.0], [1.01, 1.0, 2.02]),
    held_out("tail", "short", [2.0, 2.0, 4.0], [2.0, 2.02, 4.1]),
    held_out("mixed", "long", [1.0], [0.99]),
    held_out("mixed", "short", [1.0], [0.99]),
)


def test_errors_are_those_of_steps_completions_and_ratios():
    found = Validation.of(RUNS, full_step_tokens=10.0, cpu_share=1.0)
    assert found.completion_error == pytest.approx(0.12 / 8)
    assert found.ratio_error == pytest.approx((8.12 / 4.03) / 2 - 1)
    # the medians of the runs are 1, 1, 1 and 1 %
    assert found.step_error == pytest.approx(0.01)
    assert found.failures() == []


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("step_error", 0.2, "a step is off by 20.0%"),
        ("completion_error", 0.06, "a completion is off by 6.0%"),
        ("ratio_error", 0.03, "ratio of two policies is off by 3.0%"),
        ("ratio_error", float("nan"), "ratio of two policies"),
    ],
)
def test_a_validation_that_is_too_far_off_fails(name, error, message):
    found = Validation.of(RUNS, full_step_tokens=10.0, cpu_share=1.0)
    (failure,) = replace(found, **{name: error}).failures()
    assert message in failure


def test_a_validation_lies_beside_its_cost_model(tmp_path):
    found = Validation.of(RUNS, full_step_tokens=None, cpu_share=1.0)
    cost_model = tmp_path / "model.json"
    write_cached(found, validation_path(cost_model), what="validation")
    assert read_validation(cost_model) == found


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps({"runs": [{"surprise": 1}]})])
def test_a_cost_model_without_a_validation_is_told(tmp_path, text):
    if text is not None:
        validation_path(tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match="bench calibrate"):
        read_validation(tmp_path / "model.json")
