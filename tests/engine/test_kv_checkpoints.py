"""KV that is copied to the host ahead of a preemption: what is saved by it, and what never changes.

Books under random traffic and failures are those of `test_swap`, with copies ahead and without.
"""

import pytest

from raybatch.config import EngineConfig
from raybatch.errors import ConfigError
from tests.engine.fakes import run_all
from tests.engine.test_engine import tokens_of
from tests.engine.test_groups import expected
from tests.engine.test_swap import Choice, make, rows, run_to_preemption


def make_ahead(ahead=2, **options):
    engine, runner = make(host_kv_bytes=1, kv_checkpoint_blocks=ahead, **options)
    runner.forgets_loaded = False
    return engine, runner


def saves_of(engine, runner):
    """Run to the end; per save the number of blocks, and whether a sequence yielded in it."""
    found, save_blocks = [], runner.save_blocks
    swap = engine._scheduler._swap

    def save(block_ids, host_ids):
        save_blocks(block_ids, host_ids)
        found.append([len(block_ids), swap.counters.saved_bytes])

    runner.save_blocks = save
    done = run_all(engine)
    last = swap.counters.saved_bytes
    counts = [number for _, number in found[1:]] + [last]
    return done, [(n, after > before) for (n, before), after in zip(found, counts, strict=True)]


def with_a_checkpoint(rng):
    """Return an engine with copies ahead, and the slot of a sequence that has some."""
    engine, _ = make_ahead(50)
    engine.add(rows(rng))
    while not engine.stats().checkpoint_bytes:
        engine.step()
    slots = enumerate(engine._scheduler.table.records)
    return engine, next(slot for slot, r in slots if r is not None and r.checkpoint)


def test_only_the_tail_is_copied_when_a_sequence_yields(rng):
    requests = rows(rng)
    engine, runner = make_ahead(50, enable_prefix_caching=False)
    engine.add(requests)
    done, saves = saves_of(engine, runner)
    assert expected(requests) == tokens_of(done)
    at_yield = [num_blocks for num_blocks, yields in saves if yields]
    # all full blocks were there; the one that is being filled, and one filled in the last step
    assert engine.stats().num_preemptions > len(at_yield) > 2
    assert max(at_yield) <= 2
    assert engine.stats().checkpoint_used_bytes > 10 * runner.block_bytes


def test_without_copies_ahead_all_blocks_are_copied_when_a_sequence_yields(rng):
    engine, runner = make(enable_prefix_caching=False)
    engine.add(rows(rng))
    _, saves = saves_of(engine, runner)
    assert max(num_blocks for num_blocks, _ in saves) > 4
    assert (engine.stats().checkpoint_bytes, engine.stats().checkpoint_used_bytes) == (0, 0)


def test_nothing_is_copied_ahead_while_there_is_room(rng):
    engine, runner = make_ahead(num_blocks=200)
    engine.add(rows(rng))
    run_all(engine)
    assert (runner.num_moves, engine.stats().checkpoint_bytes) == (0, 0)


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_a_step_copies_no_more_ahead_than_it_may(rng, ahead):
    engine, runner = make_ahead(ahead)
    engine.add(rows(rng))
    most = 0
    while engine.num_unfinished():
        before = engine.stats().checkpoint_bytes
        engine.step()
        most = max(most, engine.stats().checkpoint_bytes - before)
        engine.check()
    assert most == ahead * runner.block_bytes


def test_what_came_back_is_not_copied_again_when_its_sequence_yields_again(rng):
    requests = rows(rng, count=6, max_tokens=90)
    moved = {}
    for keeps in (False, True):
        engine, _ = make_ahead(1, num_blocks=28, enable_prefix_caching=False)
        engine._scheduler._swap.checkpoints._keeps_loaded = keeps
        engine.add(requests)
        assert expected(requests) == tokens_of(run_all(engine))
        assert engine.stats().num_preemptions > 8
        moved[keeps] = engine.stats().swapped_bytes
    assert moved[True] < 0.9 * moved[False]


def test_bytes_are_those_of_the_blocks_that_moved(rng):
    engine, runner = make_ahead()
    engine.add(rows(rng))
    run_all(engine)
    stats = engine.stats()
    assert stats.swapped_bytes == runner.num_moved_blocks * runner.block_bytes
    assert 0 < stats.checkpoint_bytes < stats.swapped_bytes


def test_checkpoints_give_way_to_the_kv_of_sequences_that_wait(rng):
    # of what a small host holds, no less than without copies ahead is brought back
    back, requests = [], rows(rng, count=10)
    for ahead in (0, 50):
        engine, _ = make_ahead(ahead, host=12)
        engine.add(requests)
        assert expected(requests) == tokens_of(run_all(engine))
        back.append(engine.stats().num_swapped_tokens)
    assert back[1] >= back[0] > 0


@pytest.mark.parametrize("failing", [{0}, {1}, {0, 1, 2, 3}, {2, 5, 9}, set(range(1000))])
def test_failed_copies_ahead_change_no_token(rng, failing):
    engine, runner = make_ahead()
    runner.failing_moves = failing
    requests = rows(rng)
    engine.add(requests)
    assert expected(requests) == tokens_of(run_all(engine))
    engine.check()
    assert engine._scheduler._swap.blocks.num_used == 0
    assert 0 < engine.stats().num_failed_copies <= len(failing)


def test_a_choice_for_computing_gives_the_checkpoint_up(rng):
    choice = Choice()
    engine, _ = make_ahead(50, recovery=choice)
    requests = rows(rng)
    engine.add(requests)
    while not engine.stats().checkpoint_bytes:
        engine.step()
    choice.copies = False
    assert expected(requests) == tokens_of(run_all(engine))
    assert (engine.stats().num_swapped_tokens, engine._scheduler._swap.blocks.num_used) == (0, 0)


def test_the_choice_counts_only_what_is_still_to_copy(rng):
    choice = Choice()
    engine, runner = make_ahead(50, recovery=choice, enable_prefix_caching=False)
    engine.add(rows(rng))
    run_all(engine)
    for asked in choice.asked:
        num_own = -(-asked["num_tokens"] // 4)
        # all of it back, and at most two blocks out
        assert asked["num_bytes"] <= (num_own + 2) * runner.block_bytes
    assert choice.asked


@pytest.mark.parametrize("leave", ["export", "abort"])
def test_running_rows_that_leave_give_their_checkpoints_up(rng, leave):
    engine, _ = make_ahead(50)
    requests = rows(rng)
    engine.add(requests)
    run_to_preemption(engine)
    getattr(engine, leave)([r.request_id for r in requests])
    engine.check()
    assert engine._scheduler._swap.blocks.num_used == 0


def test_books_that_miss_a_checkpoint_are_found(rng):
    engine, slot = with_a_checkpoint(rng)
    engine.check()
    engine._scheduler.table.record(slot).checkpoint = None
    with pytest.raises(RuntimeError, match="checkpoints: "):
        engine.check()


def test_a_sequence_that_starts_again_gives_its_checkpoint_up(rng):
    engine, slot = with_a_checkpoint(rng)
    scheduler = engine._scheduler
    record, _ = scheduler.restart(slot)
    assert record.checkpoint is None
    scheduler.check()


def test_books_in_which_one_that_waits_has_a_checkpoint_are_found(rng):
    engine, slot = with_a_checkpoint(rng)
    scheduler = engine._scheduler
    held = scheduler.table.record(slot).checkpoint
    scheduler.restart(slot)[0].checkpoint = held
    with pytest.raises(RuntimeError, match="a sequence that waits has one"):
        scheduler.check()


def test_copies_ahead_without_host_memory_are_refused():
    with pytest.raises(ConfigError, match="kv_checkpoint_blocks needs host memory"):
        EngineConfig(kv_checkpoint_blocks=4)
    assert EngineConfig(kv_checkpoint_blocks=0).kv_checkpoint_blocks == 0
