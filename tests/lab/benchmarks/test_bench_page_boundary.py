from dataclasses import replace

import numpy as np
import pytest
from boundary.records import BoundaryOptions
from page_boundary import Case, run, w4, w5
from page_simulator import Lengths, Machine, simulate
from step_simulator import Device

MACHINE = Machine(
    device_pages=100,
    host_pages=100,
    page_tokens=64,
    max_active=8,
    link_bytes_per_s=50e9,
    roofline=Device(token_budget=32, kv_tokens=0),
)


def lengths(*pairs):
    prompt, output = np.array(pairs).T
    return Lengths(prompt=prompt, output=output, max_tokens=output)


def test_a_sequence_alone_takes_its_prefill_steps_and_one_step_per_token():
    outcome = simulate(lengths((64, 100)), MACHINE, BoundaryOptions())
    assert (2, 100, 1) == (outcome.prefill_steps, outcome.decode_steps, outcome.loaded_pages)
    # the round, two boundaries that decode, and the one that releases it
    assert 4 == outcome.boundaries


def test_sequences_that_fit_together_take_the_steps_of_the_longest():
    outcome = simulate(lengths((64, 100), (64, 300)), MACHINE, BoundaryOptions())
    assert (300, 400) == (outcome.decode_steps, outcome.decoded_tokens)


def test_a_slot_that_falls_empty_waits_for_the_boundary():
    one_slot = replace(MACHINE, max_active=1)
    outcome = simulate(lengths((64, 10), (64, 10)), one_slot, BoundaryOptions(lookahead=1))
    assert (20, 20) == (outcome.decode_steps, outcome.decoded_tokens)


def test_loading_costs_what_the_interval_does_not_hide():
    slow = replace(MACHINE, link_bytes_per_s=64 * 131_072 / 5)
    work = lengths((64, 10))
    fast_s = simulate(work, MACHINE, BoundaryOptions()).seconds
    hidden_s = 10 * (1.5e-3 + 1e-2)
    waits_s = simulate(work, slow, BoundaryOptions()).seconds - fast_s
    assert pytest.approx(5 - hidden_s) == waits_s


def test_small_memory_suspends_and_still_decodes_every_token():
    work = w5(0, num_rows=40)
    outcome = run(work, Case(device=0.3))
    assert outcome.suspended > 0
    assert (int(work.output.sum()), 0) == (outcome.decoded_tokens, outcome.over_capacity)


def test_host_memory_no_larger_than_the_device_prefills_again():
    outcome = run(w5(0, num_rows=40), Case(device=0.3, host=0.3))
    assert outcome.evicted > 0
    assert outcome.recomputed_tokens > 0


def test_no_run_takes_fewer_steps_than_the_bound():
    work = w4(0, num_rows=40)
    for device in (0.5, 0.8):
        pages = round(device * work.need_pages(64))
        bound = work.bound_steps(64, pages, len(work.prompt))
        assert bound <= run(work, Case(device=device)).decode_steps


def test_a_reservation_of_whole_outputs_never_suspends():
    whole = Case(device=0.5, reservation=(1 << 20, 1, 1))
    assert 0 == run(w4(0, num_rows=40), whole).suspended
