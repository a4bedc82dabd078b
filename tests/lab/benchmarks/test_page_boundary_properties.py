"""Whole runs on a tiny machine with numbered pages, over random lengths, memories and options."""

import random
from dataclasses import replace
from itertools import pairwise

from boundary.page_boundary import plan_boundary
from boundary.records import BoundaryOptions
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.benchmarks.boundary_driver import Arrival, Machine

RUNS = settings(max_examples=150, deadline=None)


@st.composite
def machines(draw, most_wait=6):
    interval = draw(st.integers(1, 3))
    options = BoundaryOptions(
        interval=interval,
        initial=interval + draw(st.integers(0, 4)),
        extension=interval + draw(st.integers(0, 4)),
        victims=draw(st.sampled_from(["least", "most", "lifo"])),
        max_wait=draw(st.integers(0, most_wait)),
        watermark_pages=draw(st.integers(0, 3)),
        margin_pages=draw(st.integers(0, 2)),
        headroom_pages=draw(st.integers(0, 2)),
        lookahead=draw(st.integers(1, 4)),
        refill_ratio=draw(st.sampled_from([0, 0.25, 1.0])),
    )
    arrivals = st.builds(
        Arrival,
        prompt=st.integers(0, 30),
        # an output below the budget is an end that the policy cannot foresee
        output=st.integers(1, 60),
        budget=st.integers(1, 80),
        boundary=st.integers(0, 12),
        priority=st.integers(0, 1),
    )
    return Machine(
        draw(st.lists(arrivals, min_size=1, max_size=14)),
        device_pages=draw(st.integers(1, 40)),
        host_pages=draw(st.integers(1, 60)),
        max_active=draw(st.integers(1, 6)),
        page_tokens=draw(st.integers(1, 8)),
        chunk=draw(st.integers(0, 40)),
        options=options,
    )


def limit_tokens(machine):
    options = machine.options
    pages = min(
        machine.device_pages - options.headroom_pages,
        machine.host_pages - max(options.watermark_pages, options.margin_pages),
    )
    return max(0, pages) * machine.page


@RUNS
@given(machine=machines())
def test_pages_are_conserved_and_cover_every_context_at_every_step(machine):
    while machine.running or machine.to_come:
        machine.step()
        machine.check()


@RUNS
@given(machine=machines())
def test_every_sequence_ends_once_with_all_its_tokens_or_all_that_fit(machine):
    arrivals = dict(machine.to_come)
    machine.run()
    limit = limit_tokens(machine)
    expected = {}
    for id, arrival in arrivals.items():
        length = min(arrival.output, arrival.budget)
        fits = arrival.prompt + length <= limit
        expected[id] = ("stop", length) if fits else ("capacity", max(0, limit - arrival.prompt))
    assert expected == machine.ended


@RUNS
@given(machine=machines())
def test_each_boundary_is_of_use(machine):
    """A sequence ends, decodes, or is prefilled, so that every run ends."""
    while machine.running or machine.to_come:
        is_empty = not machine.running and all(
            arrival.boundary > len(machine.plans) for arrival in machine.to_come.values()
        )
        machine.step()
        plan, decoded = machine.plans[-1], machine.decoded[-1]
        has_decoded = sum(tokens or 0 for tokens in decoded.values()) > 0
        assert is_empty or plan.is_prefill or has_decoded or not machine.running
    for plan, following in pairwise(machine.plans):
        assert not (plan.is_prefill and following.is_prefill and following.suspend)


@RUNS
@given(machine=machines())
def test_whoever_is_active_decodes_a_whole_interval_or_ends(machine):
    arrivals = dict(machine.to_come)
    machine.run()
    interval = machine.options.interval * machine.page
    done = dict.fromkeys(arrivals, 0)
    for decoded in machine.decoded:
        for id, tokens in decoded.items():
            done[id] += tokens or 0
            at_end = done[id] == machine.ended[id][1]
            assert tokens in (None, interval) or at_end


@RUNS
@given(machine=machines(most_wait=3))
def test_nobody_waits_for_more_refills_than_there_were_before_it_and_max_wait(machine):
    machine.run()
    for kinds, grants_of in (
        (("suspended", "prefilled"), "load"),
        (("waiting", "evicted"), "prefill"),
    ):
        bound, refills = {}, {}
        for snapshot, plan in zip(machine.snapshots, machine.plans, strict=True):
            there = {s.id: s for s in snapshot.sequences if s.status in kinds}
            taken = {grant.id for grant in getattr(plan, grants_of)}
            gone = taken | set(plan.evict) | set(plan.release) | set(plan.over_capacity)
            for id, sequence in there.items():
                if sequence.waited == 0 or id not in bound:
                    bound[id] = len(there) - 1 + machine.options.max_wait
                    refills[id] = 0
                refills[id] += bool(taken) and id not in taken
                assert refills[id] <= bound[id]
            for id in gone & set(bound):
                del bound[id]


@RUNS
@given(machine=machines())
def test_a_prefill_round_is_followed_by_boundaries_that_decode_and_evict_nobody(machine):
    machine.run()
    ahead = machine.options.lookahead
    for start, plan in enumerate(machine.plans):
        if not plan.is_prefill:
            continue
        for number in range(start + 1, min(start + 1 + ahead, len(machine.plans))):
            later = machine.plans[number]
            assert () == later.evict
            can_decode = any(
                s.status in ("active", "suspended", "prefilled") and s.remaining_tokens
                for s in machine.snapshots[number].sequences
            )
            if later.is_prefill:
                assert not can_decode or later.over_capacity
                break


@RUNS
@given(machine=machines(), seed=st.integers(0, 10**6))
def test_the_order_of_sequences_in_a_snapshot_does_not_change_the_plan(machine, seed):
    machine.run()
    shuffle = random.Random(seed)
    for snapshot, plan in zip(machine.snapshots, machine.plans, strict=True):
        sequences = list(snapshot.sequences)
        shuffle.shuffle(sequences)
        again = replace(snapshot, sequences=tuple(sequences))
        assert plan == plan_boundary(again, machine.options)


@RUNS
@given(machine=machines())
def test_every_victim_order_brings_the_same_tokens(machine):
    arrivals = tuple(machine.to_come.values())
    machine.run()
    for victims in ("least", "most", "lifo"):
        other = Machine(
            arrivals,
            device_pages=machine.device_pages,
            host_pages=machine.host_pages,
            max_active=machine.max_active,
            page_tokens=machine.page,
            chunk=machine.chunk,
            options=replace(machine.options, victims=victims),
        )
        other.run()
        assert machine.ended == other.ended
