import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.engine.scheduling.admission import KVForecast, OutputLengths
from raybatch.engine.sequences.table import Sequence
from tests.engine.fakes import make_request, run_all
from tests.engine.scheduling.test_scheduler import make_scheduler
from tests.engine.test_engine import make_engine


def lengths_after(ended, running=()):
    lengths = OutputLengths()
    for length in ended:
        lengths.note(length)
    lengths.update(np.array(running, np.int64))
    return lengths


def expect(lengths, num_generated, max_generated=100):
    return float(lengths.expect(np.array([num_generated]), np.array([max_generated]))[0])


def test_an_output_is_expected_to_reach_its_bound_while_nothing_has_ended():
    assert expect(lengths_after([]), 0) == 100


def test_an_output_is_expected_to_be_like_those_that_ended():
    assert expect(lengths_after([10, 20, 30]), 0) == pytest.approx(20)


def test_an_output_is_expected_to_be_like_those_that_were_longer():
    assert expect(lengths_after([10, 20, 30]), 15) == pytest.approx(25)


def test_an_output_longer_than_all_is_expected_to_reach_its_bound():
    assert expect(lengths_after([10, 20, 30]), 30) == 100


def test_running_outputs_count_as_longer_than_they_are():
    # one of two has ended; the other is taken to reach the bound
    assert expect(lengths_after([10], running=[40]), 0) == pytest.approx((10 + 100) / 2)


def test_running_outputs_shorter_than_an_ended_one_do_not_count():
    assert expect(lengths_after([10], running=[9]), 0) == pytest.approx(10)


def test_lengths_that_came_with_rows_count_until_outputs_end_here():
    lengths = OutputLengths()
    lengths.begin((10, 30))
    lengths.begin((70,))
    lengths.update(np.array([], np.int64))
    assert expect(lengths, 0) == 20


def test_lengths_that_come_after_an_output_has_ended_do_not_count():
    lengths = lengths_after([10])
    lengths.begin((70,))
    lengths.update(np.array([], np.int64))
    assert expect(lengths, 0) == 10


def test_a_row_of_a_smaller_bound_is_expected_to_be_cut_off_there():
    assert expect(lengths_after([10, 30, 90]), 0, 40) == pytest.approx((10 + 30 + 40) / 3)


SEQUENCE = st.tuples(st.floats(0.5, 20), st.integers(1, 30))


@settings(max_examples=100, deadline=None)
@given(st.lists(SEQUENCE, max_size=8), st.lists(SEQUENCE, min_size=1, max_size=3))
def test_the_peak_is_that_of_a_step_by_step_simulation(sequences, more):
    block_size, shared = 4, 7
    sizes, remaining = (np.array([s[i] for s in sequences], float) for i in (0, 1))
    forecast = KVForecast(shared, sizes, remaining, block_size)
    for i, (size, left) in enumerate(more):
        every = sequences + more[: i + 1]
        peak = max(sum(s + t / block_size for s, r in every if r >= t) for t in range(1, 31))
        assert forecast.peak(size, left) == pytest.approx(shared + peak)
        forecast.add(size, left, 0)


def simulate(lengths, *, full_step_tokens, max_tokens=100, prompt=12, likely=()):
    """Run to the end; return the counters and the mean number of decodes per step."""
    num_blocks = 20 * (prompt + max_tokens) // 4
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        budget=256,
        max_slots=128,
        caching=False,
        full_step_tokens=full_step_tokens,
    )
    for i in range(len(lengths)):
        request = make_request(i, np.full(prompt, 1), max_tokens=max_tokens)
        request = replace(request, likely_output_lens=likely)
        scheduler.add(
            Sequence(request=request, sample_idx=0, arrival=i, max_len=prompt + max_tokens)
        )
    table, num_decodes = scheduler.table, []
    while scheduler.num_waiting or table.num_running:
        schedule = scheduler.schedule()
        slots = scheduler.advance(schedule)
        table.append_tokens(slots, np.zeros(len(slots), np.int64))
        num_decodes.append(len(schedule.decode_slots))
        num_generated = table.num_tokens[slots] - table.num_prompt[slots]
        for slot, count in zip(slots.tolist(), num_generated.tolist(), strict=True):
            if count >= lengths[table.record(slot).request.request_id]:
                scheduler.finish(slot)
    scheduler.check()
    return scheduler.counters, float(np.mean(num_decodes))


@pytest.mark.parametrize("kind", ["equal", "uniform"])
def test_few_tokens_are_computed_again_while_the_batch_stays_large(rng, kind):
    count = 300
    lengths = np.full(count, 100) if kind == "equal" else rng.integers(1, 101, count)
    eager, eager_decodes = simulate(lengths, full_step_tokens=math.inf)
    counters, decodes = simulate(lengths, full_step_tokens=20)
    assert eager.num_recomputed_tokens > 0.2 * lengths.sum()
    assert counters.num_recomputed_tokens < 0.02 * lengths.sum()
    assert decodes > 0.6 * eager_decodes


def test_steps_that_keep_a_sequence_waiting_are_counted():
    counters, _ = simulate(np.full(60, 100), full_step_tokens=0)
    assert counters.num_admission_stalls > 0


def test_rows_known_to_be_short_do_not_wait_until_some_have_ended():
    counters, _ = simulate(np.full(60, 2), full_step_tokens=0)
    informed, _ = simulate(np.full(60, 2), full_step_tokens=0, likely=(2,))
    assert informed.num_admission_stalls < counters.num_admission_stalls


@pytest.mark.parametrize(("full_step_tokens", "is_held"), [(4, True), (math.inf, False)])
def test_rows_wait_by_themselves_where_steps_are_full(full_step_tokens, is_held):
    engine, _ = make_engine(num_blocks=20, full_step_tokens=full_step_tokens)
    engine.add(make_request(i, [i, 1, 2, 3], max_tokens=16, ignore_eos=True) for i in range(12))
    run_all(engine)
    stats = engine.stats()
    assert is_held == (stats.num_admission_stalls > 0)
    assert is_held == (stats.num_preemptions == 0)
