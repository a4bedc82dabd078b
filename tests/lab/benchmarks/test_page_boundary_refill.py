"""When prompts are computed: rounds that are worth it, and no ping-pong between the phases."""

from itertools import pairwise

from boundary.page_boundary import plan_boundary
from boundary.records import BoundaryOptions

from tests.lab.benchmarks.boundary_cases import active, grants, pending, snapshot, stored
from tests.lab.benchmarks.boundary_driver import Arrival, Machine


def plan(*sequences, options=None, **more):
    boundary = snapshot(*sequences, **{"boundaries_since_prefill": 100} | more)
    return plan_boundary(boundary, options or BoundaryOptions())


def waiting(*ids, **more):
    return [pending(id, 8, **more) for id in ids]


def test_the_first_boundary_prefills():
    first = plan(*waiting(1, 2), boundaries_since_prefill=0)
    assert first.is_prefill
    # two pages of prompt, and four of growth until four boundaries later
    assert grants(s1=6, s2=6) == first.prefill


def test_a_prefilled_sequence_gets_host_pages_for_the_chunk():
    assert grants(s1=2 + 10) == plan(*waiting(1), host_chunk_tokens=40).prefill
    assert grants(s1=2 + 5) == plan(*waiting(1, remaining=20), host_chunk_tokens=40).prefill


def test_in_a_round_all_that_decode_are_suspended_and_nothing_is_loaded():
    due = plan(active(1, 8), active(2, 9), stored(3, 8), *waiting(4))
    assert grants(s4=6) == due.prefill
    assert (1, 2) == due.suspend
    assert ((), (), ()) == (due.extend, due.grow, due.load)


def test_nothing_is_prefilled_while_something_is_in_store():
    assert () == plan(active(1, 8), stored(2, 8), *waiting(3), device=6).prefill


def test_nothing_is_prefilled_while_the_device_has_no_room():
    assert () == plan(active(1, 8, device=3), *waiting(2), device=6).prefill
    assert grants(s2=6) == plan(active(1, 8, device=3), *waiting(2), device=7).prefill


def test_nothing_is_prefilled_for_a_full_batch():
    full = [active(id, 8) for id in (1, 2)]
    assert () == plan(*full, *waiting(3), max_active=2).prefill


def test_nothing_is_prefilled_at_a_boundary_that_evicts():
    # the freed memory would be enough for the prompt
    sequences = (active(1, 8, progress_tokens=4), stored(2, 40), *waiting(3))
    short = plan(*sequences, host=12)
    assert (2,) == short.evict
    assert () == short.prefill


def test_a_round_stops_at_a_full_batch_in_store():
    assert grants(s1=6, s2=6, s3=6) == plan(*waiting(1, 2, 3, 4, 5), max_active=3).prefill


def test_a_round_leaves_host_memory_for_the_growth_of_those_that_decode():
    # two pages are held, four boundaries add four to them
    assert () == plan(active(1, 8), *waiting(2), host=11).prefill
    assert grants(s2=6) == plan(active(1, 8), *waiting(2), host=12).prefill


def test_a_round_that_brings_too_few_waits():
    decoding = [active(id, 8) for id in range(1, 6)]
    options = BoundaryOptions(refill_ratio=0.5)
    assert () == plan(*decoding, *waiting(11, 12), options=options).prefill
    assert 3 == len(plan(*decoding, *waiting(11, 12, 13), options=options).prefill)


def test_a_round_follows_another_only_after_some_boundaries():
    sequences = (active(1, 8), *waiting(2))
    assert () == plan(*sequences, boundaries_since_prefill=3).prefill
    assert grants(s2=6) == plan(*sequences, boundaries_since_prefill=4).prefill


def test_who_is_evicted_is_prefilled_before_those_that_never_ran():
    again = pending(2, 8, status="evicted", progress_tokens=4)
    assert grants(s2=6) == plan(pending(1, 8, waited=3), again, host=6).prefill


def test_who_has_waited_too_long_is_prefilled_before_those_that_were_evicted():
    again = pending(2, 8, status="evicted", progress_tokens=4)
    assert grants(s1=6) == plan(pending(1, 8, waited=8), again, host=6).prefill


def test_a_prompt_that_does_not_fit_is_passed_over_until_it_has_waited_too_long():
    decoding = active(1, 8)
    for waited, expected in ((7, grants(s3=6)), (8, ())):
        large = pending(2, 40, waited=waited)
        assert expected == plan(decoding, large, pending(3, 8), host=16).prefill


def rounds_that_pass_a_large_prompt(max_wait):
    """Return the rounds that prefill others while sequence 1 waits; small ones keep coming."""
    arrivals = [
        Arrival(prompt=4, output=24),
        Arrival(prompt=48, output=4, boundary=1),
        *(Arrival(prompt=4, output=24, boundary=n) for n in range(1, 60) for _ in range(2)),
    ]
    options = BoundaryOptions(max_wait=max_wait, lookahead=1)
    machine = Machine(arrivals, device_pages=20, host_pages=14, options=options)
    machine.run()
    taken = [{grant.id for grant in plan.prefill} for plan in machine.plans if plan.is_prefill]
    return next(n for n, ids in enumerate(taken) if 1 in ids)


def test_a_large_prompt_is_not_passed_for_ever():
    # one sequence came before it
    assert rounds_that_pass_a_large_prompt(max_wait=4) <= 5
    assert rounds_that_pass_a_large_prompt(max_wait=1000) > 5


def test_arrivals_at_every_boundary_do_not_make_the_phases_change_at_every_boundary():
    # endless work: one sequence comes before each boundary
    arrivals = [Arrival(prompt=8, output=40, boundary=n) for n in range(60)]
    machine = Machine(arrivals, device_pages=400, host_pages=400, max_active=32)
    machine.run(60)
    rounds = [n for n, plan in enumerate(machine.plans) if plan.is_prefill]
    assert 0 == rounds[0]
    assert all(later - earlier > 4 for earlier, later in pairwise(rounds))
    assert len(rounds) >= 5


def test_a_full_host_memory_does_not_make_the_phases_change_at_every_boundary():
    arrivals = [Arrival(prompt=8, output=200) for _ in range(30)]
    machine = Machine(arrivals, device_pages=80, host_pages=80, max_active=32)
    machine.run()
    rounds = [n for n, plan in enumerate(machine.plans) if plan.is_prefill]
    evictions = [n for n, plan in enumerate(machine.plans) if plan.evict]
    assert evictions
    assert all(later - earlier > 4 for earlier, later in pairwise(rounds))
    assert not any(0 < eviction - start <= 4 for eviction in evictions for start in rounds)
