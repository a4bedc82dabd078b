"""Drafts change only the number of steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.drafts import LookupDrafter
from raybatch.engine.engine import Engine
from raybatch.engine.sampling.sampler import Sampler
from raybatch.engine.sequences.table import DECODE, Sequence, SequenceTable
from raybatch.errors import ConfigError
from raybatch.records.types import Sampling
from tests.engine.fakes import (
    FakeRunner,
    FakeSpec,
    FakeStopChecker,
    generate,
    make_request,
    run_all,
)
from tests.tiers import examples

VOCAB = 50
MAX_DRAFTS = 5


class ForeseeingDrafter:
    """Drafts tokens that are each right with the probability `right`.

    Args:
        expected: generated tokens by (request id, sample).
        wrong: tokens that are drafted in place of right ones; None: any.
    """

    def __init__(self, table, expected, right, *, rng=None, wrong=None):
        self.table, self.expected, self.right, self.wrong = table, expected, right, wrong
        self.rng = rng or np.random.default_rng(0)
        self.slots, self.num_notes = set(), 0

    def add(self, slot):
        self.slots.add(slot)

    def remove(self, slot):
        self.slots.discard(slot)

    def propose(self):
        slots = np.flatnonzero(self.table.phase == DECODE).tolist()
        return {slot: self.draft(slot) for slot in slots if slot in self.slots}

    def draft(self, slot):
        record = self.table.record(slot)
        known = self.table.generated_since(slot, 0)
        truth = self.expected[record.request.request_id, record.sample_idx]
        assert known == truth[: len(known)]
        # some exceed the end
        length = int(self.rng.integers(0, MAX_DRAFTS + 1)) if self.right < 1 else MAX_DRAFTS
        draft = [*truth[len(known) :], *self.rng.integers(0, VOCAB, MAX_DRAFTS).tolist()][:length]
        return [token if self.rng.random() < self.right else self.other(token) for token in draft]

    def other(self, token):
        if self.wrong is not None:
            return int(self.rng.choice(self.wrong))
        return int((token + self.rng.integers(1, VOCAB)) % VOCAB)

    def note_step(self, num_rows, seconds):
        assert num_rows > 0
        assert seconds > 0
        self.num_notes += 1


def make_engine(
    *, expected=None, right=1.0, num_blocks=64, eos=(), nan_after=None, seed=0, wrong=None, **config
):
    options = {"block_size_tokens": 4, "max_batched_tokens": 64, "max_num_seqs": 16} | config
    runner = FakeRunner(
        num_blocks=num_blocks,
        block_size=options["block_size_tokens"],
        spec=FakeSpec(VOCAB, eos, 256),
        nan_after=nan_after,
    )

    def make_drafter(table):
        rng = np.random.default_rng(seed)
        return ForeseeingDrafter(table, expected, right, rng=rng, wrong=wrong)

    sampler = Sampler(VOCAB, options["max_num_seqs"], eos)
    engine = Engine(
        runner,
        sampler,
        FakeStopChecker(),
        EngineConfig(**options),
        make_drafter=None if expected is None else make_drafter,
    )
    return engine, runner


def visible(done):
    """Return all that a user sees of completions."""
    return {
        key: (
            c.token_ids.tolist(),
            c.finish_reason,
            c.stop_reason,
            c.error,
            [(ids.tolist(), values.tolist()) for ids, values in c.logprobs or ()],
        )
        for key, c in done.items()
    }


def tokens_of(done):
    return {key: completion.token_ids.tolist() for key, completion in done.items()}


def any_requests(rng, count):
    """Greedy and random rows with all finish reasons; some share a prefix."""
    stem = rng.integers(0, VOCAB, 20)
    requests = []
    for i in range(count):
        prompt = np.r_[stem[: rng.integers(0, 20)], rng.integers(0, VOCAB, 1 + rng.integers(8))]
        ends = [{}, {"stop": (f"{rng.integers(VOCAB)},",)}, {"stop_token_ids": (3, 4)}]
        kinds = [{}, {"temperature": 0.9}, {"temperature": 1.0, "top_k": 9, "logprobs": 2}]
        kinds += [{"repetition_penalty": 1.3}, {"min_tokens": 8, "temperature": 0.4}]
        options = ends[rng.integers(3)] | kinds[rng.integers(5)]
        requests.append(
            make_request(i, prompt, n=int(rng.integers(1, 3)), **({"max_tokens": 24} | options))
        )
    return requests


@settings(max_examples=examples(8, full=20))
@given(
    seed=st.integers(0, 2**32 - 1),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_blocks=st.integers(24, 90),
    budget=st.integers(8, 70),
    block_size=st.sampled_from([2, 4, 5]),
    caching=st.booleans(),
)
def test_completions_are_those_without_drafts(seed, right, num_blocks, budget, block_size, caching):
    rng = np.random.default_rng(seed)
    requests = any_requests(rng, 12)
    options = {
        "eos": (7,),
        "num_blocks": num_blocks * 4 // block_size,
        "max_batched_tokens": budget,
        "block_size_tokens": block_size,
        "enable_prefix_caching": caching,
    }
    plain, _ = make_engine(**options)
    plain.add(requests)
    expected = run_all(plain)
    engine, runner = make_engine(**options, expected=tokens_of(expected), right=right, seed=seed)
    engine.add(requests)
    assert visible(run_all(engine)) == visible(expected)
    assert all(step.num_tokens <= budget for step in runner.steps)
    stats = engine.stats()
    assert stats.kv_used_fraction == 0.0
    assert stats.generated_tokens == plain.stats().generated_tokens
    assert stats.num_drafted_tokens >= stats.num_accepted_tokens
    assert (stats.num_accepted_tokens > 0) == (right > 0)


@pytest.mark.parametrize(("right", "num_steps", "num_accepted"), [(1.0, 5, 16), (0.0, 21, 0)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(right, num_steps, num_accepted):
    expected = generate([1, 2, 3], 21, VOCAB)
    engine, runner = make_engine(expected={(0, 0): expected}, right=right)
    engine.add([make_request(0, [1, 2, 3], max_tokens=21)])
    assert run_all(engine)[0, 0].token_ids.tolist() == expected
    stats = engine.stats()
    assert (len(runner.steps), stats.num_accepted_tokens) == (num_steps, num_accepted)


def test_drafts_after_the_end_token_are_dropped():
    expected = generate([1, 2, 3], 30, VOCAB)
    eos = expected[6]
    end = expected.index(eos) + 1
    # the tokens of the model after its end token are drafted as well
    engine, _ = make_engine(expected={(0, 0): expected}, eos=(eos,))
    engine.add([make_request(0, [1, 2, 3], max_tokens=30)])
    found = run_all(engine)[0, 0]
    assert (found.token_ids.tolist(), found.finish_reason) == (expected[:end], "stop")
    assert engine.stats().generated_tokens == end


def test_drafts_after_a_stop_string_are_dropped():
    expected = generate([1, 2, 3], 30, VOCAB)
    stop = f"{expected[7]},{expected[8]},"
    engine, _ = make_engine(expected={(0, 0): expected})
    engine.add([make_request(0, [1, 2, 3], max_tokens=30, stop=(stop,), logprobs=1)])
    found = run_all(engine)[0, 0]
    assert (found.token_ids.tolist(), found.stop_reason) == (expected[:9], stop)
    assert [ids[0] for ids, _ in found.logprobs] == expected[:9]


def test_a_sequence_ends_at_its_length_with_drafts_beyond_it():
    expected = generate([1, 2, 3], 30, VOCAB)
    engine, _ = make_engine(expected={(0, 0): expected})
    engine.add([make_request(0, [1, 2, 3], max_tokens=10)])
    found = run_all(engine)[0, 0]
    assert (found.token_ids.tolist(), found.finish_reason) == (expected[:10], "length")


@pytest.mark.parametrize("right", [0.0, 0.8])
def test_drafts_under_preemption_keep_the_outputs(rng, right):
    prompts = [rng.integers(0, VOCAB, 6) for _ in range(8)]
    expected = {(i, 0): generate(p.tolist(), 40, VOCAB) for i, p in enumerate(prompts)}
    engine, _ = make_engine(expected=expected, right=right, num_blocks=20)
    engine.add(make_request(i, p, max_tokens=40) for i, p in enumerate(prompts))
    assert tokens_of(run_all(engine)) == expected
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_drafted_tokens > 0


def test_sequences_move_between_engines_in_the_middle_of_drafts(rng):
    requests = [make_request(i, rng.integers(0, VOCAB, 6), max_tokens=40, n=2) for i in range(4)]
    requests += [make_request(9, [1, 2], max_tokens=40, temperature=0.9, logprobs=1)]
    plain, _ = make_engine()
    plain.add(requests)
    expected = run_all(plain)
    tokens = tokens_of(expected)
    first, _ = make_engine(expected=tokens, right=0.9)
    first.add(requests)
    for _ in range(4):
        assert not first.step()
    states = first.export([request.request_id for request in requests])
    first.check()
    assert all(len(state.token_ids) > 4 for state in states)
    second, _ = make_engine(expected=tokens, right=0.9)
    second.restore(states)
    assert visible(run_all(second)) == visible(expected)


def test_an_aborted_row_with_drafts_leaves_nothing_behind(rng):
    prompts = [rng.integers(0, VOCAB, 6) for _ in range(2)]
    expected = {(i, 0): generate(p.tolist(), 40, VOCAB) for i, p in enumerate(prompts)}
    engine, _ = make_engine(expected=expected)
    engine.add(make_request(i, p, max_tokens=40) for i, p in enumerate(prompts))
    for _ in range(3):
        engine.step()
    engine.abort([0])
    engine.check()
    assert tokens_of(run_all(engine)) == {(1, 0): expected[1, 0]}
    assert engine.stats().kv_used_fraction == 0.0


def test_a_draft_with_bad_logits_changes_no_row():
    prompt = list(range(1, 11))
    expected = generate(prompt, 30, VOCAB)
    deadly = min(set(range(VOCAB)) - {*prompt, *expected})
    engine, runner = make_engine(
        expected={(0, 0): expected}, right=0.5, wrong=[deadly], nan_after=deadly
    )
    engine.add([make_request(0, prompt, max_tokens=30)])
    found = run_all(engine)[0, 0]
    assert (found.token_ids.tolist(), found.error) == (expected, "")
    # its KV was recomputed in cleared blocks, and drafting stopped
    assert runner.cleared
    assert engine.stats().num_drafted_tokens <= MAX_DRAFTS


def test_no_row_finds_the_blocks_that_were_cleared_for_a_draft():
    prompt = list(range(1, 11))
    expected = generate(prompt, 30, VOCAB)
    deadly = min(set(range(VOCAB)) - {*prompt, *expected})
    engine, runner = make_engine(
        expected={(i, 0): expected for i in range(2)}, right=0.5, wrong=[deadly], nan_after=deadly
    )
    engine.add([make_request(0, prompt, max_tokens=30)])
    while not runner.cleared:
        engine.step()
    engine.abort([0])
    engine.add([make_request(1, prompt, max_tokens=30)])
    assert run_all(engine)[1, 0].token_ids.tolist() == expected


def test_a_token_with_bad_logits_is_an_error_with_drafts_as_well():
    expected = generate([1, 2, 3], 30, VOCAB)
    plain, _ = make_engine(nan_after=expected[8])
    drafting, _ = make_engine(nan_after=expected[8], expected={(0, 0): expected})
    found = []
    for engine in (plain, drafting):
        engine.add([make_request(0, [1, 2, 3], max_tokens=30)])
        found.append(visible(run_all(engine)))
    assert found[0] == found[1]
    assert "NonFiniteLogits" in found[0][0, 0][3]


@pytest.mark.parametrize(
    ("options", "gets_drafts"),
    [
        ({"temperature": 0.8, "top_p": 0.9, "min_tokens": 4}, True),
        ({"repetition_penalty": 1.2}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
    ],
)
def test_rows_whose_tokens_depend_on_earlier_ones_get_no_drafts(options, gets_drafts):
    plain, _ = make_engine()
    plain.add([make_request(0, [1, 2, 3], max_tokens=20, **options)])
    expected = tokens_of(run_all(plain))
    engine, _ = make_engine(expected=expected)
    engine.add([make_request(0, [1, 2, 3], max_tokens=20, **options)])
    assert tokens_of(run_all(engine)) == expected
    assert (engine.stats().num_drafted_tokens > 0) == gets_drafts


def test_a_grammar_gets_no_drafts():
    sampler = Sampler(VOCAB, 4, ())
    assert not sampler.is_stateless(Sampling(structured_outputs={"choice": ["a", "b"]}))


def test_steps_with_prompts_do_not_measure_drafts():
    expected = {(i, 0): generate([i, 2, 3], 6, VOCAB) for i in range(2)}
    engine, runner = make_engine(expected=expected, right=0.0, max_num_seqs=1)
    engine.add(make_request(i, [i, 2, 3], max_tokens=6) for i in range(2))
    run_all(engine)
    assert len(runner.steps) == 12
    assert engine._drafter.num_notes == 10


class Table:
    """A drafter with the table of an engine, whose sequences are placed by hand."""

    def __init__(self, *prompts, max_tokens=4):
        self.table = SequenceTable(max_slots=8, num_blocks=64, block_size=4, max_model_len=4000)
        self.drafter = LookupDrafter(self.table, max_tokens)
        for i, prompt in enumerate(prompts):
            request = make_request(i, prompt)
            record = Sequence(request=request, sample_idx=0, arrival=i, max_len=3000)
            slot = self.table.place(record, [])
            self.table.phase[slot] = DECODE
            self.drafter.add(slot)

    def say(self, slot, *tokens):
        for token in tokens:
            self.table.append_tokens(np.array([slot]), np.array([token]))

    def cost(self, seconds):
        for rows, cost in seconds.items():
            for _ in range(3):
                self.drafter.note_step(rows, cost)


def test_a_copied_passage_is_drafted_as_long_as_steps_are_cheap():
    found = Table(range(100))
    found.say(0, 10, 11, 12)
    assert found.drafter.propose() == {}
    found.cost({1: 0.010})
    # larger steps and this sequence are unknown: one draft is tried
    assert found.drafter.propose() == {0: [13]}
    found.say(0, *range(13, 30))
    assert found.drafter.propose() == {0: [30, 31, 32, 33]}
    found.cost({2: 0.0195})
    assert found.drafter.propose() == {}


def test_a_sequence_whose_guesses_are_wrong_rests_and_is_tried_again():
    # every context is in the prompt, followed by any of ten tokens
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 10, 1200)
    found, proposed, looks = Table(prompt), [], set()
    found.cost({1: 0.010, 2: 0.013})
    for token in [*rng.integers(0, 10, 400), *prompt[:300]]:
        found.say(0, token)
        proposed.append(len(found.drafter.propose()))
        looks.add(found.drafter._guessers[0].num_fed)
    assert sum(proposed[:20]) > 0
    assert sum(proposed[100:400]) < 15
    assert len([look for look in looks if 100 <= look < 400]) < 40
    assert all(proposed[-200:])


def test_tokens_of_a_sequence_help_the_next_one_even_without_drafts():
    found = Table([7, 8, 9], [4, 5, 6])
    found.say(0, *range(20, 40))
    found.drafter.remove(0)
    found.table.remove(0)
    found.say(1, 20, 21, 22)
    found.cost({1: 0.010})
    assert found.drafter.propose() == {1: [23]}


def test_the_drafter_gets_all_tokens_of_a_restored_sequence():
    found = Table(range(100))
    found.cost({1: 0.010})
    found.say(0, *range(10, 20))
    found.drafter.propose()
    record = found.table.remove(0)
    found.drafter.remove(0)
    slot = found.table.place(record, [])
    found.table.phase[slot] = DECODE
    found.drafter.add(slot)
    found.say(slot, 20)
    assert found.drafter.propose()[slot][0] == 21


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_tokens": -1}, "speculative_tokens must be a whole number of at least 0"),
        ({"speculative_tokens": 2.5}, "speculative_tokens must be a whole number of at least 0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_the_option_makes_the_engine_look_drafts_up():
    assert make_engine()[0]._drafter is None
    assert make_engine(speculative_tokens=0)[0]._drafter is None
    engine, _ = make_engine(speculative_tokens=4)
    engine.add(make_request(i, [1, 2, 3], max_tokens=30) for i in range(3))
    assert tokens_of(run_all(engine)) == {(i, 0): generate([1, 2, 3], 30, VOCAB) for i in range(3)}
    assert isinstance(engine._drafter, LookupDrafter)
