"""Each broken rule of a page boundary has its own message."""

from dataclasses import replace

import pytest
from boundary.records import BoundaryPlan, apply_plan, check_snapshot

from tests.lab.benchmarks.boundary_cases import active, grants, pending, snapshot, stored

HEALTHY = snapshot(
    active(1, 8, device=3, host=3),
    stored(2, 8),
    stored(3, 8, status="prefilled"),
    pending(4, 8),
    pending(5, 8, status="evicted"),
)


def with_first(**changes):
    first, *others = HEALTHY.sequences
    return snapshot(replace(first, **changes), *others)


def test_a_healthy_snapshot_passes():
    check_snapshot(HEALTHY)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(HEALTHY, page_tokens=0), "pages of 0 tokens"),
        (replace(HEALTHY, max_active=0), "0 active sequences at most"),
        (replace(HEALTHY, device_free=996), "device memory has 1000 pages, but 996 are free"),
        (replace(HEALTHY, host_free=994), "host memory has 1000 pages, but 994 are free"),
        (replace(HEALTHY, host_pages=3, host_free=-4), "-4 are free"),
        (snapshot(pending(1, 8), pending(1, 8)), "sequence ids repeat"),
        (with_first(waited=-1), "a count is negative"),
        (with_first(remaining_tokens=-1), "a count is negative"),
        (with_first(progress_tokens=9), "progress is no part of the context"),
        (with_first(status="suspended"), "device pages without being active"),
        (with_first(status="waiting", device_pages=0), "host pages without a KV cache"),
        (with_first(context_tokens=13, host_pages=4), "a context beyond its device pages"),
        (with_first(context_tokens=12, host_pages=2), "a context beyond its host pages"),
    ],
)
def test_a_broken_snapshot_says_what_is_wrong(broken, message):
    with pytest.raises(RuntimeError, match=message):
        check_snapshot(broken)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (BoundaryPlan(release=(9,)), "sequence 9, which does not exist"),
        (BoundaryPlan(release=(1,), evict=(1,)), "sequence 1, which does not exist"),
        (BoundaryPlan(evict=(4,)), "sequence 4 is waiting"),
        (BoundaryPlan(suspend=(2,)), "sequence 2 is suspended"),
        (BoundaryPlan(evict=(1,), suspend=(1,)), "sequence 1 is evicted"),
        (BoundaryPlan(extend=grants(s2=1)), "sequence 2 is suspended"),
        (BoundaryPlan(load=grants(s1=1)), "sequence 1 is active"),
        (BoundaryPlan(load=grants(s4=1)), "sequence 4 is waiting"),
        (BoundaryPlan(suspend=(1,), load=grants(s1=5)), "two decisions about sequence 1"),
        (BoundaryPlan(evict=(2,), prefill=grants(s2=5)), "two decisions about sequence 2"),
        (BoundaryPlan(extend=(*grants(s1=1), *grants(s1=1))), "two decisions about sequence 1"),
        (BoundaryPlan(grow=grants(s2=1)), "sequence 2 is suspended"),
        (BoundaryPlan(extend=grants(s1=0)), "a grant of 0 pages"),
        (BoundaryPlan(extend=grants(s1=998)), "device memory has 1000 pages, but -1 are free"),
        (BoundaryPlan(grow=grants(s1=994)), "host memory has 1000 pages, but -1 are free"),
        (BoundaryPlan(load=grants(s2=1)), "a context beyond its device pages"),
        (BoundaryPlan(prefill=grants(s4=1), suspend=(1,)), "a context beyond its host pages"),
        (BoundaryPlan(prefill=grants(s4=2)), "1 sequences active in a prefill round"),
        (
            BoundaryPlan(prefill=grants(s4=2), load=grants(s2=2), suspend=(1,)),
            "a plan with a prefill round grants pages for decoding",
        ),
    ],
)
def test_a_broken_plan_says_what_is_wrong(plan, message):
    with pytest.raises(RuntimeError, match=message):
        apply_plan(HEALTHY, plan)


def test_more_active_sequences_than_allowed_are_told():
    with pytest.raises(RuntimeError, match="2 sequences are active, at most 1"):
        apply_plan(replace(HEALTHY, max_active=1), BoundaryPlan(load=grants(s2=2)))


def test_a_plan_moves_pages_and_statuses():
    plan = BoundaryPlan(release=(2,), suspend=(1,), load=grants(s3=3), grow=grants(s3=1))
    after = apply_plan(HEALTHY, plan)
    assert [(1, "suspended", 0, 3), (3, "active", 3, 3)] == [
        (s.id, s.status, s.device_pages, s.host_pages) for s in after.sequences[:2]
    ]
    assert (997, 994) == (after.device_free, after.host_free)
