"""One boundary: who ends, yields, grows and is loaded. Pages have four tokens."""

from dataclasses import replace

import pytest
from boundary.page_boundary import plan_boundary
from boundary.records import BoundaryOptions, BoundaryPlan

from raybatch.errors import ConfigError
from tests.lab.benchmarks.boundary_cases import active, grants, pending, snapshot, stored

DEFAULT = BoundaryOptions()


def plan(*sequences, options=DEFAULT, **more):
    return plan_boundary(snapshot(*sequences, **more), options)


def test_nothing_happens_where_nobody_is():
    assert BoundaryPlan() == plan()


def test_a_sequence_that_has_ended_is_released_whatever_its_status():
    ended = (active(1, 8, remaining=0), stored(2, 8, remaining=0), pending(3, 8, remaining=0))
    assert BoundaryPlan(release=(1, 2, 3)) == plan(*ended)


def test_a_sequence_with_pages_for_the_next_interval_gets_none():
    assert () == plan(active(1, 8, device=3)).extend


def test_a_sequence_short_of_the_next_interval_is_extended():
    assert grants(s1=2) == plan(active(1, 9, device=3)).extend


def test_the_extension_is_the_configured_one():
    options = BoundaryOptions(initial=8, extension=8, interval=4)
    assert grants(s1=8) == plan(active(1, 9, device=6), options=options).extend


def test_nobody_gets_pages_that_it_can_never_fill():
    assert grants(s1=1) == plan(active(1, 8, remaining=2)).extend
    assert grants(s1=3) == plan(stored(1, 8, remaining=2)).load


def test_host_memory_grows_with_the_next_interval():
    assert grants(s1=1) == plan(active(1, 8)).grow
    assert () == plan(active(1, 8, host=3)).grow


@pytest.mark.parametrize(("victims", "expected"), [("least", 2), ("most", 3), ("lifo", 4)])
def test_the_victim_of_a_device_shortage_is_the_configured_one(victims, expected):
    sequences = (
        active(1, 8, progress_tokens=5),
        active(2, 8, progress_tokens=2),
        active(3, 8, progress_tokens=7),
        active(4, 8, progress_tokens=4),
    )
    shortage = plan(*sequences, device=12, options=BoundaryOptions(victims=victims))
    assert (expected,) == shortage.suspend
    assert {1, 2, 3, 4} - {expected} == {grant.id for grant in shortage.extend}


@pytest.mark.parametrize("victims", ["least", "most", "lifo"])
def test_a_sequence_of_higher_priority_yields_later(victims):
    first, second = active(1, 8, progress_tokens=4), active(2, 8, progress_tokens=4)
    options = BoundaryOptions(victims=victims)
    for important, other in ((1, 2), (2, 1)):
        sequences = [replace(s, priority=int(s.id == important)) for s in (first, second)]
        assert (other,) == plan(*sequences, device=5, options=options).suspend


@pytest.mark.parametrize("victims", ["least", "most", "lifo"])
def test_among_equal_victims_the_last_that_came_yields_wherever_it_is_listed(victims):
    equal = [active(id, 8, progress_tokens=4) for id in (1, 2, 3)]
    options = BoundaryOptions(victims=victims)
    for sequences in (equal, equal[::-1]):
        assert (3,) == plan(*sequences, device=10, options=options).suspend


def test_a_victim_takes_its_own_need_along():
    # both need two pages; four come free with the first one that yields
    short = plan(active(1, 16), active(2, 16, progress_tokens=3), device=8)
    assert (1,) == short.suspend
    assert grants(s2=2) == short.extend


def test_a_sequence_that_yields_at_a_boundary_is_not_loaded_there():
    short = plan(active(1, 16), active(2, 4, progress_tokens=4, remaining=4), device=6)
    assert (1,) == short.suspend
    assert () == short.load


def test_those_above_the_batch_size_yield():
    many = [active(id, 4, device=3, progress_tokens=id % 5) for id in range(1, 5)]
    assert (1, 2) == plan(*many, max_active=2).suspend


def test_candidates_are_loaded_with_the_initial_pages_beyond_their_context():
    assert grants(s1=2 + 2, s2=3 + 2) == plan(stored(1, 8), stored(2, 9)).load
    options = BoundaryOptions(initial=7)
    assert grants(s1=2 + 7) == plan(stored(1, 8), options=options).load


def test_who_waits_longest_is_loaded_first():
    waits = (stored(1, 8, waited=1), stored(2, 8, waited=3), stored(3, 8, waited=2))
    assert grants(s2=4) == plan(*waits, device=7).load


def test_among_equal_waits_priority_and_then_the_id_decide():
    assert grants(s1=4) == plan(stored(1, 8), stored(2, 8), device=7).load
    assert grants(s2=4) == plan(stored(1, 8), stored(2, 8, priority=1), device=7).load


def test_a_candidate_that_does_not_fit_is_passed_over():
    waits = (stored(1, 40, waited=3), stored(2, 8, waited=1))
    assert grants(s2=4) == plan(active(9, 8, device=3), *waits, device=14).load


def test_nobody_passes_a_candidate_that_has_waited_too_long():
    waits = (stored(1, 40, waited=8), stored(2, 8, waited=7))
    assert () == plan(active(9, 8, device=3), *waits, device=14).load


def test_who_has_waited_too_long_goes_before_higher_priorities():
    waits = (stored(1, 8, waited=8), stored(2, 8, waited=7, priority=5))
    assert grants(s1=4) == plan(*waits, device=7).load


def test_no_more_are_loaded_than_may_be_active():
    waits = [stored(id, 4) for id in range(1, 6)]
    assert grants(s1=3, s2=3) == plan(active(9, 4, device=2), *waits, max_active=3).load


def test_a_loaded_sequence_gets_the_host_pages_that_it_will_fill():
    assert grants(s1=1) == plan(stored(1, 8)).grow
    assert grants(s1=2) == plan(stored(1, 8), options=BoundaryOptions(interval=2)).grow


def test_nobody_is_loaded_whose_growth_host_memory_has_no_page_for():
    full = plan(active(1, 8, device=3, host=3), stored(2, 8), device=100, host=5)
    assert () == full.load


def test_a_host_shortage_evicts_and_the_growth_of_victims_does_not_count():
    short = plan(active(1, 8), active(2, 8, progress_tokens=4), host=4)
    assert (1,) == short.evict
    assert () == short.suspend
    assert grants(s2=1) == short.grow


@pytest.mark.parametrize(("victims", "expected"), [("least", 2), ("most", 1), ("lifo", 3)])
def test_suspended_and_prefilled_sequences_are_victims_of_a_host_shortage_too(victims, expected):
    sequences = (
        active(1, 8, device=3, progress_tokens=5),
        stored(2, 8, status="prefilled"),
        stored(3, 8, progress_tokens=3),
    )
    options = BoundaryOptions(victims=victims)
    # two pages more, or none are missing where the victim is the one that grows
    assert (expected,) == plan(*sequences, host=6, device=3, options=options).evict


def test_the_watermark_is_kept_by_evicting():
    sequences = (active(1, 8, host=3, progress_tokens=4), stored(2, 8))
    assert () == plan(*sequences, host=8, options=BoundaryOptions(watermark_pages=3)).evict
    assert (2,) == plan(*sequences, host=7, options=BoundaryOptions(watermark_pages=3)).evict


def test_the_margin_is_kept_beside_the_growth():
    sequences = (active(1, 8, progress_tokens=4), stored(2, 8))
    assert () == plan(*sequences, host=7, options=BoundaryOptions(margin_pages=2)).evict
    assert (2,) == plan(*sequences, host=6, options=BoundaryOptions(margin_pages=2)).evict


def test_the_last_sequence_is_never_evicted():
    options = BoundaryOptions(watermark_pages=2)
    alone = plan(active(1, 12, remaining=4, device=4), host=6, options=options)
    assert BoundaryPlan(grow=grants(s1=1)) == alone


def test_a_sequence_alone_keeps_host_pages_that_it_got_ahead():
    alone = active(1, 12, remaining=4, device=4, host=5)
    assert BoundaryPlan() == plan(alone, host=6, options=BoundaryOptions(watermark_pages=2))


def test_nobody_is_loaded_into_the_margin():
    sequences = (active(1, 8, device=3, host=3), stored(2, 8))
    assert grants(s2=4) == plan(*sequences, host=6).load
    assert () == plan(*sequences, host=6, options=BoundaryOptions(margin_pages=1)).load


def test_a_stored_sequence_is_evicted_where_else_nobody_could_decode():
    full = plan(stored(1, 8), stored(2, 8), host=4)
    assert (2,) == full.evict
    assert grants(s1=4) == full.load


def test_a_sequence_that_fills_all_memory_ends_with_capacity():
    for memory in ({"device": 3}, {"host": 3}):
        assert BoundaryPlan(over_capacity=(1,)) == plan(active(1, 12), **memory)


def test_a_prompt_that_fills_all_memory_still_gets_the_token_that_comes_with_it():
    assert grants(s1=3) == plan(pending(1, 12), device=3).prefill
    assert (1,) == plan(pending(1, 13), device=3).over_capacity


@pytest.mark.parametrize(
    "options",
    [{"headroom_pages": 1}, {"watermark_pages": 1}, {"margin_pages": 1}],
    ids=["headroom", "watermark", "margin"],
)
def test_memory_that_stays_free_is_no_capacity(options):
    sequence = stored(1, 8)
    assert () == plan(sequence, device=3, host=3).over_capacity
    with_reserve = plan(sequence, device=3, host=3, options=BoundaryOptions(**options))
    assert (1,) == with_reserve.over_capacity


def test_the_last_sequence_may_use_all_pages():
    assert grants(s1=1) == plan(active(1, 12), device=4).extend


def test_pages_of_those_that_end_serve_the_others():
    after = plan(active(1, 8, remaining=0), active(2, 8), device=4)
    assert grants(s2=2) == after.extend
    assert () == after.suspend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extension": 1, "interval": 2}, "extension must be at least interval"),
        ({"initial": 1, "interval": 2}, "initial must be at least interval"),
        ({"interval": 0}, "interval must be a number of at least 1, got 0"),
        ({"lookahead": 0}, "lookahead must be a number of at least 1"),
        ({"max_wait": -1}, "max_wait must be a number of at least 0"),
        ({"watermark_pages": -1}, "watermark_pages must be a number of at least 0"),
        ({"margin_pages": -1}, "margin_pages must be a number of at least 0"),
        ({"headroom_pages": -1}, "headroom_pages must be a number of at least 0"),
        ({"refill_ratio": float("nan")}, "refill_ratio must be a finite number of at least 0"),
        ({"victims": "oldest"}, "victims must be one of least, most, lifo, got 'oldest'"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        BoundaryOptions(**options)
