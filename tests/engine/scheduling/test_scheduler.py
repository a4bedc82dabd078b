import math

import numpy as np
import pytest

from raybatch.config import EngineConfig
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from tests.engine.fakes import make_request


def make_scheduler(
    *, num_blocks=32, block_size=4, budget=16, max_slots=8, caching=True, full_step_tokens=math.inf
):
    table = SequenceTable(
        max_slots=max_slots, num_blocks=num_blocks, block_size=block_size, max_model_len=128
    )
    blocks = BlockManager(num_blocks, block_size)
    return Scheduler(
        blocks,
        table,
        max_batched_tokens=budget,
        enable_prefix_caching=caching,
        full_step_tokens=full_step_tokens,
    )


def add(scheduler, arrival, prompt, max_tokens=8, **sampling):
    prompt = np.full(prompt, 1000 + arrival) if isinstance(prompt, int) else prompt
    request = make_request(arrival, prompt, max_tokens=max_tokens, **sampling)
    record = Sequence(
        request=request, sample_idx=0, arrival=arrival, max_len=len(prompt) + max_tokens
    )
    scheduler.add(record)
    return record


def step(scheduler):
    """Run one step with token 0 everywhere; return (decode slots, [(slot, start, len)])."""
    schedule = scheduler.schedule()
    slots = scheduler.advance(schedule)
    scheduler.table.append_tokens(slots, np.zeros(len(slots), np.int64))
    scheduler.check()
    columns = (schedule.chunk_slots, schedule.chunk_starts, schedule.chunk_lens)
    chunks = list(zip(*(c.tolist() for c in columns), strict=True))
    return schedule.decode_slots.tolist(), chunks


def test_a_step_takes_decodes_then_started_prompts_then_new_ones():
    scheduler = make_scheduler()
    for arrival, prompt in enumerate((5, 20, 3, 2)):
        add(scheduler, arrival, prompt)
    assert [step(scheduler) for _ in range(3)] == [
        ([], [(0, 0, 5), (1, 0, 11)]),
        ([0], [(1, 11, 9), (2, 0, 3), (3, 0, 2)]),
        ([0, 1, 2, 3], []),
    ]


def test_chunks_count_when_they_are_computed_and_again_after_a_preemption():
    scheduler = make_scheduler()
    add(scheduler, 0, 20)
    counters = scheduler.counters
    step(scheduler)
    assert (20, 16) == (counters.prompt_tokens, counters.num_chunk_tokens)
    step(scheduler)
    assert 20 == counters.num_chunk_tokens
    scheduler.restart(0)
    _steps(scheduler, 3)
    # its generated token as well
    assert 20 + 21 == counters.num_chunk_tokens


def test_a_step_is_full_while_prefill_waits():
    scheduler = make_scheduler(num_blocks=100)
    for arrival in range(6):
        add(scheduler, arrival, 13, max_tokens=50)
    steps = _steps(scheduler, 5)
    sizes = [len(decodes) + sum(length for *_, length in chunks) for decodes, chunks in steps]
    assert sizes == [16] * 5


def _steps(scheduler, count):
    return [step(scheduler) for _ in range(count)]


@pytest.mark.parametrize("budget", [8, 13, 64])
def test_prompts_are_split_and_composed_so_that_every_step_is_exactly_full(budget, rng):
    scheduler = make_scheduler(num_blocks=4096, budget=budget, max_slots=64)
    for arrival in range(60):
        add(scheduler, arrival, int(rng.integers(1, 90)), max_tokens=int(rng.integers(2, 20)))
    table, sizes, split = scheduler.table, [], 0
    while scheduler.num_waiting:
        schedule = scheduler.schedule()
        sizes.append(schedule.num_tokens)
        ends = schedule.chunk_starts + schedule.chunk_lens
        is_cut = ends < table.num_prompt[schedule.chunk_slots]
        split += int(is_cut.sum())
        slots = scheduler.advance(schedule)
        # only the last chunk of a prompt generates
        assert not np.isin(schedule.chunk_slots[is_cut], slots).any()
        table.append_tokens(slots, np.zeros(len(slots), np.int64))
        for slot in slots[table.num_tokens[slots] >= table.max_len[slots]].tolist():
            scheduler.remove(slot)
    # the last row starts in the last of these steps, which may have room left
    assert set(sizes[:-1]) == {budget}
    assert split > 20


def test_admission_ends_where_the_cache_is_full():
    scheduler = make_scheduler(num_blocks=6, budget=64)
    for arrival in range(4):
        add(scheduler, arrival, 6)
    assert step(scheduler) == ([], [(0, 0, 6), (1, 0, 6), (2, 0, 6)])
    assert scheduler.num_waiting == 1


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "num_running"),
    [(4, 8, 5), (3, 8, 10), (4, 1, 10)],
    ids=["grows next step", "grows later", "ends"],
)
def test_blocks_that_running_sequences_need_next_are_kept(prompt_len, max_tokens, num_running):
    scheduler = make_scheduler(num_blocks=10, budget=64, max_slots=16)
    for arrival in range(12):
        add(scheduler, arrival, prompt_len, max_tokens=max_tokens)
    step(scheduler)
    assert scheduler.table.num_running == num_running


def test_blocks_that_decodes_need_next_are_kept():
    # two sequences with 2 of 4 slots left, which fill in the steps to come
    scheduler = make_scheduler(num_blocks=4, budget=64, max_slots=16)
    for arrival in range(2):
        add(scheduler, arrival, 2, max_tokens=8)
    _steps(scheduler, 2)
    add(scheduler, 2, 3, max_tokens=8)
    add(scheduler, 3, 3, max_tokens=8)
    step(scheduler)
    assert scheduler.table.num_running == 2


def test_the_last_token_needs_no_block():
    scheduler = make_scheduler(num_blocks=6, budget=64)
    for arrival in range(2):
        add(scheduler, arrival, 6, max_tokens=3)
    step(scheduler)
    add(scheduler, 2, 6, max_tokens=3)
    assert step(scheduler) == ([0, 1], [(2, 0, 6)])


def test_the_latest_sequence_is_preempted_when_blocks_run_out():
    scheduler = make_scheduler(num_blocks=5, budget=64)
    first, second = (add(scheduler, arrival, 4, max_tokens=16) for arrival in range(2))
    _steps(scheduler, 5)
    assert scheduler.counters.num_preemptions == 0
    _steps(scheduler, 4)
    assert (1, [second]) == (scheduler.counters.num_preemptions, scheduler.waiting())
    assert first is scheduler.table.record(0)


def test_a_preempted_sequence_keeps_its_tokens():
    scheduler = make_scheduler(num_blocks=5, budget=64)
    _, second = (add(scheduler, arrival, 4, max_tokens=16) for arrival in range(2))
    # with eight positions computed each needs its third block; one is left
    _steps(scheduler, 6)
    assert len(second.token_ids) == 5


def test_nothing_is_admitted_in_a_step_that_preempts():
    scheduler = make_scheduler(num_blocks=5, budget=64)
    for arrival in range(2):
        add(scheduler, arrival, 4, max_tokens=16)
    while not (schedule := scheduler.schedule()).preempted:
        slots = scheduler.advance(schedule)
        scheduler.table.append_tokens(slots, np.zeros(len(slots), np.int64))
    assert (schedule.preempted, schedule.admitted, schedule.decode_slots.tolist()) == (
        (1,),
        (),
        [0],
    )


def test_a_lone_sequence_without_room_ends():
    scheduler = make_scheduler(num_blocks=2, budget=64)
    record = add(scheduler, 0, 4, max_tokens=16)
    _steps(scheduler, 5)
    assert (record,) == scheduler.schedule().ended


def test_members_of_a_group_admitted_in_one_step_compute_their_prefix_once():
    scheduler = make_scheduler(budget=64)
    prefix = np.arange(8)
    for arrival in range(3):
        add(scheduler, arrival, np.r_[prefix, 100 + arrival])
    assert step(scheduler) == ([], [(0, 0, 9), (1, 8, 1), (2, 8, 1)])


def test_a_prefix_cut_by_the_budget_is_not_computed_twice():
    scheduler = make_scheduler(budget=10)
    for arrival in range(3):
        add(scheduler, arrival, np.r_[np.arange(16), 100 + arrival])
    assert _steps(scheduler, 2) == [([], [(0, 0, 10)]), ([], [(0, 10, 7), (1, 16, 1), (2, 16, 1)])]


def test_the_last_token_of_a_known_prompt_is_computed():
    scheduler = make_scheduler(budget=64)
    for arrival in range(2):
        add(scheduler, arrival, np.arange(8))
    assert step(scheduler) == ([], [(0, 0, 8), (1, 4, 4)])


def test_without_caching_requests_share_nothing():
    scheduler = make_scheduler(budget=64, caching=False)
    for arrival in range(2):
        add(scheduler, arrival, np.arange(9))
    assert step(scheduler) == ([], [(0, 0, 9), (1, 0, 9)])


def test_without_caching_samples_of_one_request_share_their_prompt():
    scheduler = make_scheduler(budget=64, caching=False)
    request = make_request(0, np.arange(9), n=2)
    for arrival in range(2):
        scheduler.add(Sequence(request=request, sample_idx=arrival, arrival=arrival, max_len=17))
    assert step(scheduler) == ([], [(0, 0, 9)])
    assert scheduler.table.num_computed[1] == 9
    for slot in (0, 1):
        scheduler.remove(slot)
    assert len(scheduler.blocks._free) == 32


def test_a_freed_slot_is_filled_in_the_next_step():
    scheduler = make_scheduler(max_slots=1)
    for arrival in range(2):
        add(scheduler, arrival, 3)
    step(scheduler)
    scheduler.remove(0)
    assert step(scheduler) == ([], [(0, 0, 3)])


def test_resumed_sequences_go_before_new_ones():
    scheduler = make_scheduler()
    add(scheduler, 0, 3)
    resumed = add(scheduler, 1, 3)
    scheduler.withdraw(lambda record: record is resumed)
    resumed.has_started = True
    scheduler.add(resumed)
    assert [record.arrival for record in scheduler.waiting()] == [1, 0]


@pytest.mark.parametrize("budget", [8, 16, 33])
def test_no_step_is_above_the_budget_and_no_decode_is_skipped(budget, rng):
    scheduler = make_scheduler(num_blocks=40, budget=budget)
    for arrival in range(30):
        add(scheduler, arrival, int(rng.integers(1, 30)), max_tokens=int(rng.integers(2, 20)))
    table = scheduler.table
    while scheduler.num_waiting or table.num_running:
        decoding = set(np.flatnonzero(table.phase == 2).tolist())
        schedule = scheduler.schedule()
        assert schedule.num_tokens <= budget
        assert decoding - set(schedule.preempted) == set(schedule.decode_slots.tolist())
        slots = scheduler.advance(schedule)
        table.append_tokens(slots, np.zeros(len(slots), np.int64))
        scheduler.check()
        for slot in slots[table.num_tokens[slots] >= table.max_len[slots]].tolist():
            scheduler.remove(slot)


def test_a_step_with_a_smaller_budget_has_shorter_chunks_and_all_decodes():
    scheduler = make_scheduler()
    for arrival, prompt in enumerate((2, 2, 2, 20)):
        add(scheduler, arrival, prompt)
    step(scheduler)
    small = scheduler.schedule(most_tokens=5)
    assert small.decode_slots.tolist() == [0, 1, 2]
    assert small.chunk_lens.tolist() == [2]
    slots = scheduler.advance(small)
    scheduler.table.append_tokens(slots, np.zeros(len(slots), np.int64))
    # decodes alone take more
    none = scheduler.schedule(most_tokens=2)
    assert (len(none.decode_slots), len(none.chunk_slots)) == (3, 0)
    slots = scheduler.advance(none)
    scheduler.table.append_tokens(slots, np.zeros(len(slots), np.int64))
    assert step(scheduler) == ([0, 1, 2], [(3, 12, 8)])


def test_the_default_config_fits_the_scheduler():
    config = EngineConfig()
    assert config.max_num_seqs <= config.token_budget
