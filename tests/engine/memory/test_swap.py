"""KV of preempted sequences in host memory: moves, blocks left on the device, failures."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.engine.sequences.block_manager import BlockManager
from tests.engine.fakes import generate, make_request, run_all
from tests.engine.sequences.test_groups import _mixed_requests, expected, member
from tests.engine.test_engine import VOCAB, make_engine, tokens_of
from tests.tiers import examples


class Choice:
    """Copies or recomputes as configured, and learns nothing."""

    def __init__(self, *, copies=True):
        self.copies = copies
        self.queries = []

    def is_copy_quicker(self, **sizes):
        self.queries.append(sizes)
        return self.copies

    def note(self, schedule, table, seconds):
        pass


def make(**options):
    return make_engine(**({"num_blocks": 20, "host": 100, "recovery": Choice()}) | options)


def rows(rng, count=8, prompt=6, max_tokens=40):
    return [
        make_request(i, rng.integers(0, VOCAB, prompt), max_tokens=max_tokens) for i in range(count)
    ]


def num_used(engine):
    """Return the number of used host blocks, exact and 8-bit."""
    return sum(tier.blocks.num_used for tier in engine._scheduler._swap._tiers.values())


def run_to_preemption(engine):
    """Step until a sequence has KV in host memory."""
    done = {}
    while not engine.stats().swapped_bytes:
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
    return done


def test_restored_kv_is_not_recomputed(rng):
    engine, runner = make(enable_prefix_caching=False)
    requests = rows(rng)
    engine.add(requests)
    assert expected(requests) == tokens_of(run_all(engine))
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_recomputed_tokens, stats.kv_used_fraction) == (0, 0.0)
    assert stats.num_swapped_tokens > stats.num_preemptions * 6
    # every token is computed once, except for the last of each row
    computed = sum(step.num_tokens for step in runner.steps)
    assert computed == stats.prompt_tokens + stats.generated_tokens - len(requests)


def test_a_restored_sequence_decodes_in_the_same_step(rng):
    engine, runner = make(enable_prefix_caching=False)
    engine.add(rows(rng))
    run_all(engine)
    prompts = [n for step in runner.steps for n in step.chunk_lens]
    assert prompts == [6] * 8


def test_moves_are_counted_in_bytes_in_both_directions(rng):
    engine, runner = make()
    engine.add(rows(rng))
    run_all(engine)
    assert runner.num_moves == 2 * engine.stats().num_preemptions
    assert engine.stats().swapped_bytes == runner.num_moved_blocks * runner.block_bytes


@pytest.mark.parametrize(
    ("host", "copies"), [(0, True), (100, False)], ids=["no room", "computing is quicker"]
)
def test_without_host_blocks_or_gain_the_tokens_are_recomputed(rng, host, copies):
    engine, runner = make(host=host, recovery=Choice(copies=copies))
    requests = rows(rng)
    engine.add(requests)
    assert expected(requests) == tokens_of(run_all(engine))
    assert engine.stats().num_recomputed_tokens > 0
    assert (runner.num_moves, engine.stats().swapped_bytes) == (0, 0)


def test_a_small_host_takes_what_fits(rng):
    engine, _ = make(host=5)
    requests = rows(rng)
    engine.add(requests)
    assert expected(requests) == tokens_of(run_all(engine))
    stats = engine.stats()
    assert stats.num_swapped_tokens > 0
    assert stats.num_recomputed_tokens > 0


def test_the_choice_covers_both_directions_without_the_shared_prefix(rng):
    choice = Choice()
    engine, runner = make(recovery=choice)
    prompt = rng.integers(0, VOCAB, 14)
    engine.add([make_request(i, [*prompt, i], max_tokens=30) for i in range(4)])
    run_to_preemption(engine)
    (query,) = choice.queries
    num_own = -(-query["num_tokens"] // 4) - 12 // 4
    assert (query["num_shared_tokens"], query["num_bytes"]) == (
        12,
        2 * num_own * runner.block_bytes,
    )


def test_a_prefix_that_others_use_stays_on_the_device(rng):
    engine, runner = make(enable_prefix_caching=False, num_blocks=24)
    prefix = rng.integers(0, VOCAB, 24)
    requests = [member(i, 1, prefix, [i, 5], max_tokens=30) for i in range(6)]
    engine.add(requests)
    assert expected(requests) == tokens_of(run_all(engine))
    stats = engine.stats()
    assert (stats.num_recomputed_tokens, stats.num_preemptions > 0) == (0, True)
    # six of the blocks of every sequence are the prefix
    assert stats.swapped_bytes < stats.num_preemptions * 2 * 8 * runner.block_bytes
    assert sum(sum(step.chunk_lens) for step in runner.steps) == 24 + 6 * 2


def prefix_is_gone_when_the_second_comes_back(rng, *, is_failing=False):
    """Run two samples of one prompt without a cache; the first ends while the second waits."""
    engine, runner = make(num_blocks=12, enable_prefix_caching=False, max_num_seqs=3)
    # the first sample has another length, so both are requests with the same prefix hashes
    request = make_request(0, rng.integers(0, VOCAB, 17), n=2, max_tokens=20)
    engine.add([request])
    run_to_preemption(engine)
    (waiting,) = engine._scheduler.waiting()
    assert (waiting.sample_idx, waiting.swapped.first_block) == (1, 4)
    if is_failing:
        runner.failing_moves = {runner.num_moves}
    return engine, runner, request


@pytest.mark.parametrize("is_failing", [False, True], ids=["comes back", "copy fails"])
def test_an_evicted_shared_prefix_is_recomputed_and_the_rest_restored(rng, is_failing):
    engine, runner, request = prefix_is_gone_when_the_second_comes_back(rng, is_failing=is_failing)
    num_steps = len(runner.steps)
    assert expected([request]) == tokens_of(run_all(engine))
    chunks = [n for step in runner.steps[num_steps:] for n in step.chunk_lens]
    stats = engine.stats()
    assert chunks[0] == 16
    if is_failing:
        assert (stats.num_swapped_tokens, stats.num_recomputed_tokens) == (0, sum(chunks) - 1)
    else:
        assert (len(chunks), stats.num_recomputed_tokens) == (1, 16)
        assert stats.num_swapped_tokens > 0


def watch_decodes(engine):
    """Check that no sequence decodes over blocks that a chunk fills in the same step."""
    scheduler = engine._scheduler
    plain, table, size = scheduler.schedule, scheduler.table, scheduler.table.block_size

    def schedule(drafts, **options):
        found = plain(drafts, **options)
        chunks = zip(found.chunk_slots, found.chunk_starts, strict=True)
        filled = {b for slot, start in chunks for b in table.blocks(slot)[start // size :].tolist()}
        for slot in found.decode_slots:
            assert not filled & set(table.blocks(slot).tolist())
        return found

    scheduler.schedule = schedule


def test_a_sequence_waits_for_a_prefix_that_another_one_computes(rng):
    # parts of a step may run one after the other, so the KV of a decode must exist before
    engine, _ = make(num_blocks=24, enable_prefix_caching=False)
    watch_decodes(engine)
    request = make_request(1, rng.integers(0, VOCAB, 17), n=3, max_tokens=34)
    engine.add([make_request(0, [1, 2, 3], max_tokens=90), request])
    done = {}
    while (1, 0) not in done:
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
    # both others wait with KV after an evicted prefix; the second computes it for the third
    assert [4, 4] == [r.swapped.first_block for r in engine._scheduler.waiting()]
    engine.abort([0])
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_recomputed_tokens) == (2, 16)
    assert expected([request]) == tokens_of(done | run_all(engine))


def test_a_prefix_that_is_findable_again_is_not_copied_back(rng):
    engine, runner = make(num_blocks=14, max_num_seqs=2)
    prompt = rng.integers(0, VOCAB, 21)
    engine.add(
        [
            make_request(0, rng.integers(0, VOCAB, 3), max_tokens=48),
            make_request(1, prompt, max_tokens=30),
        ]
    )
    run_to_preemption(engine)
    saved = engine.stats().swapped_bytes
    # its unshared prompt of five whole blocks is still cached when the first row ends
    engine.abort([0])
    run_all(engine)
    assert engine.stats().num_recomputed_tokens == 0
    loaded = engine.stats().swapped_bytes - saved
    assert loaded == saved - 5 * runner.block_bytes


def test_a_sequence_whose_blocks_are_all_findable_again_is_not_copied_back(rng):
    engine, runner = make(num_blocks=19, max_num_seqs=2, max_batched_tokens=9)
    prompt = rng.integers(0, VOCAB, 64)
    engine.add([make_request(0, [7], max_tokens=60), make_request(1, prompt, max_tokens=3)])
    # the first row grows when the second has its prompt of whole blocks
    run_to_preemption(engine)
    (waiting,) = engine._scheduler.waiting()
    assert (0, 64) == (waiting.swapped.first_block, waiting.swapped.num_tokens)
    engine.abort([0])
    run_all(engine)
    assert (1, 0) == (runner.num_moves, num_used(engine))


def test_a_failed_move_recomputes_and_loses_nothing(rng):
    requests = rows(rng)
    plain, plain_runner = make()
    plain.add(requests)
    run_all(plain)
    assert plain_runner.num_moves > 6
    for failing in ({0}, {1}, {2, 5}, set(range(100))):
        engine, runner = make()
        runner.failing_moves = failing
        engine.add(requests)
        assert expected(requests) == tokens_of(run_all(engine))
        stats = engine.stats()
        assert (stats.num_recomputed_tokens > 0, stats.kv_used_fraction) == (True, 0.0)
        assert 0 < stats.num_failed_copies <= len(failing)


@pytest.mark.parametrize("leave", ["export", "abort"])
def test_rows_that_leave_free_their_host_blocks(rng, leave):
    engine, _ = make()
    requests = rows(rng)
    engine.add(requests)
    run_to_preemption(engine)
    assert num_used(engine) > 0
    states = getattr(engine, leave)([r.request_id for r in requests])
    engine.check()
    assert num_used(engine) == 0
    if states:
        target, _ = make()
        target.restore(states)
        assert expected(requests) == tokens_of(run_all(target))


def test_a_row_that_outgrows_the_pool_ends_by_capacity_with_its_tokens():
    engine, _ = make(num_blocks=4)
    engine.add([make_request(i, range(10 - 4 * i), max_tokens=50) for i in range(2)])
    done = run_all(engine)
    assert {c.finish_reason for c in done.values()} == {"capacity"}
    assert done[0, 0].token_ids.tolist() == generate(list(range(10)), 7, VOCAB)
    assert done[1, 0].token_ids.tolist() == generate(list(range(6)), 11, VOCAB)
    assert num_used(engine) == 0


def test_a_row_that_fails_after_a_restore_leaves_nothing(rng):
    requests = rows(rng)
    preempted = rows_that_move(requests)
    outputs = generate(requests[preempted].prompt_token_ids.tolist(), 40, VOCAB)
    engine, _ = make(nan_after=outputs[38])
    engine.add(requests)
    done = run_all(engine)
    assert done[preempted, 0].error.startswith("NonFiniteLogits: ")
    assert (num_used(engine), engine.stats().kv_used_fraction) == (0, 0.0)
    whole = [r for r in requests if not done[r.request_id, 0].error]
    assert expected(whole) == tokens_of({k: c for k, c in done.items() if not c.error})


def rows_that_move(requests):
    """Return a request that is preempted when all of these run."""
    engine, _ = make()
    engine.add(requests)
    return next(i for _, i, kind in moves_by_step(engine) if kind == "in")


def moves_by_step(engine):
    """Run to the end; return step numbers of (request, preempted or resumed)."""
    events, waiting, num_step = [], set(), 0
    while engine.num_unfinished():
        engine.step()
        now = {r.request.request_id for r in engine._scheduler.waiting() if r.swapped is not None}
        events += [(num_step, i, "out") for i in now - waiting]
        events += [(num_step, i, "in") for i in waiting - now]
        waiting, num_step = now, num_step + 1
    return events


@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_a_resumed_sequence_is_not_preempted_again_at_once(rng, block_size):
    engine, _ = make(num_blocks=160 // block_size, block_size_tokens=block_size, max_num_seqs=12)
    engine.add(rows(rng, count=24, prompt=9, max_tokens=80))
    events = moves_by_step(engine)
    ran = []
    for step, request_id, kind in events:
        if kind == "in":
            later = [s for s, i, k in events if (i, k) == (request_id, "out") and s > step]
            ran += [min(later) - step] if later else []
    assert engine.stats().num_preemptions > 5
    # one block or sixteen steps, the smaller one
    assert min(ran, default=99) >= min(16, block_size)
    # limits the moves of a row of 80 tokens
    assert len(events) <= 2 * 24 * (1 + 80 // min(16, block_size))


@settings(max_examples=examples(14, full=40))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(16, 40),
    host=st.integers(0, 30),
    budget=st.integers(6, 60),
    caching=st.booleans(),
    failing=st.sets(st.integers(0, 12)),
    events=st.lists(st.integers(0, 9), max_size=40),
)
def test_the_books_of_both_pools_are_always_right(
    seed, num_blocks, host, budget, caching, failing, events
):
    rng = np.random.default_rng(seed)
    engine, runner = make(
        num_blocks=num_blocks,
        host=host,
        max_batched_tokens=budget,
        max_num_seqs=6,
        enable_prefix_caching=caching,
        host_kv_bytes=1,
    )
    runner.failing_moves = failing
    watch_decodes(engine)
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=20 + i % 7))
        for i, r in enumerate(_mixed_requests(rng))
    ]
    new, done, gone = list(requests), {}, set()
    for event in events:
        ids = rng.choice(len(requests), 3).tolist()
        if event == 0:
            engine.abort(ids)
            gone |= set(ids)
        elif event == 1:
            engine.restore(engine.export(ids))
        elif event in (2, 3) and new:
            engine.add(r for r in new[:6] if r.request_id not in gone)
            new = new[6:]
        else:
            done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        engine.check()
    engine.add(r for r in new if r.request_id not in gone)
    done |= run_all(engine)
    outputs = tokens_of({k: c for k, c in done.items() if k[0] not in gone})
    assert {k: v for k, v in expected(requests).items() if k[0] not in gone} == outputs
    assert (num_used(engine), engine.stats().kv_used_fraction) == (0, 0.0)
    assert all(step.num_tokens <= budget for step in runner.steps)


def test_a_restored_sequence_takes_a_token_of_the_budget(rng):
    engine, runner = make(max_batched_tokens=8, max_num_seqs=8)
    engine.add(rows(rng, count=20, prompt=30, max_tokens=30))
    run_all(engine)
    assert engine.stats().num_swapped_tokens > 0
    assert max(step.num_tokens for step in runner.steps) == 8


def test_allocated_and_released_blocks_are_counted(rng):
    pool, held = BlockManager(30, 4), []
    for _ in range(300):
        count = int(rng.integers(0, 6))
        if count <= pool.num_available and rng.random() < 0.6:
            held.append(np.array(pool.allocate(count), np.int32))
        elif held:
            pool.release(held.pop(int(rng.integers(len(held)))))
        pool.check(held)
        assert pool.num_used == sum(map(len, held)) == 30 - pool.num_available
    with pytest.raises(RuntimeError, match="cannot allocate"):
        pool.allocate(31)
