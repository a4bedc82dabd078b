import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raybatch.engine.sampling.draw import (
    DrawOptions,
    draw_dense,
    draw_greedy,
    draw_ranked,
    sequence_key,
    uniforms,
)
from raybatch.engine.sampling.sampler import Sampler
from raybatch.records.types import Sampling
from tests import tolerances

EOS = 3
PROMPT = np.array([5, 6, 7, 7, 8], np.int32)
OUTPUT = [6, 11, 11, 2]

OPTIONS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 90},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.05},
    {"temperature": 1.4, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 1.0, "repetition_penalty": 1.7},
    {"temperature": 0.8, "repetition_penalty": 0.6, "top_k": 5},
    {"temperature": 1.0, "min_tokens": 9},
    {"temperature": 0.9, "repetition_penalty": 1.3, "min_tokens": 9, "top_k": 9, "top_p": 0.9},
]


def make_logits(num_rows, vocab_size, *, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def expected_probabilities(logits, sampling, prompt=PROMPT, output=OUTPUT):
    """Probabilities of transformers' processors in the order of its generate()."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_tokens:
        processors.append(
            MinNewTokensLengthLogitsProcessor(
                len(prompt), sampling.min_tokens, [EOS, *sampling.stop_token_ids]
            )
        )
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    input_ids = torch.tensor([[*prompt.tolist(), *output]])
    scores = processors(input_ids, logits[None].clone().double())
    return scores.softmax(dim=-1)[0].numpy()


def invert(probabilities, logits, uniform, *, is_ranked):
    """Token whose running probability passes `uniform`, falling or in the order of ids."""
    order = np.arange(len(probabilities))
    if is_ranked:
        order = np.argsort(-logits.numpy(), kind="stable")
    ends = probabilities[order].cumsum()
    return int(order[np.searchsorted(ends, uniform * ends[-1], side="right")])


def make_options(num_rows, *, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0, uniform=None):
    return DrawOptions(
        temperature=np.full(num_rows, temperature),
        top_k=np.full(num_rows, top_k, np.int64),
        top_p=np.full(num_rows, top_p),
        min_p=np.full(num_rows, min_p),
        uniform=(np.arange(num_rows) + 0.5) / num_rows if uniform is None else uniform,
    )


def sample_alone(sampling, logits, *, seed=1, slot=0, num_generated=4, output=OUTPUT):
    sampler = Sampler(logits.shape[1], 8, (EOS,))
    sampler.add(slot, sampling, seed, 0, PROMPT, output)
    return sampler.sample(logits, np.array([slot]), np.array([num_generated]))


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
@pytest.mark.parametrize("vocab_size", [97, 3001])
def test_tokens_are_those_of_transformers_probabilities(fields, vocab_size):
    sampling = Sampling(**fields)
    logits = make_logits(1, vocab_size)
    probabilities = expected_probabilities(logits[0], sampling)
    is_ranked = sampling.top_k is not None or sampling.top_p < 1.0
    adjusted = logits[0].clone()
    if is_ranked and sampling.repetition_penalty != 1.0:
        plain = Sampling(
            temperature=1.0,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=sampling.min_tokens,
        )
        adjusted = torch.from_numpy(np.log(expected_probabilities(logits[0], plain) + 1e-300))
    for seed in range(40):
        uniform = uniforms(np.array([sequence_key(seed, 0)], np.uint64), np.array([len(OUTPUT)]))
        expected = invert(probabilities, adjusted, uniform[0], is_ranked=is_ranked)
        assert expected == sample_alone(sampling, logits, seed=seed).token_ids[0]


@pytest.mark.parametrize(
    "fields",
    [f for f in OPTIONS if "repetition_penalty" not in f and "min_tokens" not in f],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [97, 3001])
def test_a_grid_of_numbers_gives_the_filtered_probabilities(fields, vocab_size):
    num_rows = 2000
    logits = make_logits(1, vocab_size, seed=3)
    options = make_options(num_rows, **{"top_k": vocab_size, **fields})
    draw = draw_ranked if "top_k" in fields or "top_p" in fields else draw_dense
    drawn = draw(logits.expand(num_rows, -1).contiguous(), np.arange(num_rows), options)
    counts = np.bincount(drawn.token_ids, minlength=vocab_size)
    expected = expected_probabilities(logits[0], Sampling(**fields))
    assert np.abs(counts / num_rows - expected).max() <= 1.0 / num_rows + 1e-6
    assert not counts[expected == 0.0].any()


def test_presence_and_frequency_look_at_the_output_only():
    logits = torch.zeros(1, 20)
    logits[0, 5] = 1.5  # in the prompt only
    logits[0, 6] = 2.4  # generated once: 2.4 - 0.5 - 0.5 = 1.4
    logits[0, 11] = 2.9  # generated twice: 2.9 - 0.5 - 1.0 = 1.4
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.5)
    assert sample_alone(sampling, logits).token_ids[0] == 5


def test_frequency_penalty_grows_with_every_occurrence():
    logits = torch.zeros(1, 20)
    logits[0, 6], logits[0, 11] = 1.0, 1.0 + 0.6
    drawn = [
        int(sample_alone(Sampling(frequency_penalty=penalty), logits).token_ids[0])
        for penalty in (0.5, 0.7)
    ]
    assert drawn == [11, 6]


def test_repetition_penalty_comes_before_presence():
    logits = torch.full((1, 20), -9.0)
    logits[0, 6] = 4.0  # 4 / 2 - 1 = 1; the other order would give 1.5
    logits[0, 9] = 1.2
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=1.0)
    assert sample_alone(sampling, logits).token_ids[0] == 9


def test_presence_leaves_a_prompt_alone_that_repetition_looks_at():
    logits = torch.zeros(1, 20)
    logits[0, 5], logits[0, 9] = 1.5, 1.3
    sampling = Sampling(repetition_penalty=1.01, presence_penalty=0.5)
    assert sample_alone(sampling, logits).token_ids[0] == 5


def test_repetition_penalty_lowers_a_negative_logit():
    logits = torch.full((1, 20), -9.0)
    logits[0, 6], logits[0, 9] = -1.0, -1.5
    assert sample_alone(Sampling(repetition_penalty=2.0), logits).token_ids[0] == 9


def test_sampled_tokens_count_for_later_penalties():
    logits = torch.zeros(1, 50)
    logits[0, 4], logits[0, 9] = 1.0, 0.9
    sampler = Sampler(50, 1, ())
    sampler.add(0, Sampling(presence_penalty=0.5), 0, 0, PROMPT)
    slots = np.array([0])
    drawn = [int(sampler.sample(logits, slots, np.array([step])).token_ids[0]) for step in (0, 1)]
    assert drawn == [4, 9]


def test_a_history_outgrows_its_first_allocation():
    logits = torch.linspace(1.0, 2.0, 300)[None]
    sampler = Sampler(300, 1, ())
    sampler.add(0, Sampling(presence_penalty=2.0), 0, 0, PROMPT)
    slots = np.array([0])
    drawn = [int(sampler.sample(logits, slots, np.array([n])).token_ids[0]) for n in range(250)]
    assert drawn == list(range(299, 49, -1))


def test_min_tokens_holds_back_end_and_stop_tokens():
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 7], logits[0, 1] = 9.0, 8.0, 1.0
    sampling = Sampling(min_tokens=2, stop_token_ids=(7,))
    drawn = [
        int(sample_alone(sampling, logits, num_generated=n, output=[]).token_ids[0])
        for n in (0, 1, 2)
    ]
    assert drawn == [1, 1, EOS]


def test_logits_of_the_caller_stay_as_they_are():
    logits = make_logits(1, 97)
    before = logits.clone()
    sample_alone(Sampling(temperature=1.0, repetition_penalty=2.0, min_tokens=9), logits)
    assert torch.equal(before, logits)


MIXED = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.2, top_k=50),
    Sampling(temperature=1.5, top_k=900, top_p=0.99),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=0.9, frequency_penalty=0.3, top_p=0.95),
    Sampling(min_tokens=50),
    Sampling(temperature=4.0, top_p=0.999),
]


@pytest.mark.parametrize("is_rounded", [False, True], ids=["float32", "bfloat16 ties"])
def test_a_row_draws_the_same_token_in_any_batch(is_rounded):
    num_rows, vocab_size = 60, 2500
    logits = make_logits(num_rows, vocab_size)
    if is_rounded:
        logits = logits.bfloat16().float()
    rng = np.random.default_rng(0)

    def draw(rows, slots):
        sampler = Sampler(vocab_size, 100, (EOS,))
        for row, slot in zip(rows, slots, strict=True):
            sampler.add(slot, MIXED[row % len(MIXED)], 1000 + row, row % 3, PROMPT, OUTPUT)
        found = sampler.sample(logits[rows], np.asarray(slots), np.full(len(rows), len(OUTPUT)))
        return dict(zip(rows, found.token_ids.tolist(), strict=True))

    together = draw(list(range(num_rows)), list(range(num_rows)))
    shuffled = draw(rng.permutation(num_rows).tolist(), rng.permutation(100)[:num_rows].tolist())
    alone = {row: draw([row], [7])[row] for row in range(num_rows)}
    assert together == shuffled == alone


def test_a_sequence_taken_up_elsewhere_goes_on_with_the_same_tokens():
    vocab_size, length = 64, 30
    steps = make_logits(length, vocab_size, seed=5)
    sampling = Sampling(temperature=1.0, top_p=0.95, frequency_penalty=0.4, min_tokens=20)

    def run(cut):
        sampler, slot, tokens = Sampler(vocab_size, 9, (EOS,)), 2, []
        sampler.add(slot, sampling, 42, 1, PROMPT)
        for position in range(length):
            if position == cut:
                sampler, slot = Sampler(vocab_size, 4, (EOS,)), 3
                sampler.add(slot, sampling, 42, 1, PROMPT, np.array(tokens, np.int32))
            drawn = sampler.sample(
                steps[position : position + 1], np.array([slot]), np.array([position])
            )
            tokens.append(int(drawn.token_ids[0]))
        return tokens

    assert run(None) == run(11)


def test_equal_logits_at_the_edge_of_top_k_all_stay():
    logits = torch.zeros(200, 3000)
    logits[:, 100:103] = 2.0
    drawn = draw_ranked(logits, np.arange(200), make_options(200, top_k=2))
    assert set(drawn.token_ids.tolist()) == {100, 101, 102}


def test_equal_logits_beyond_the_candidates_count_for_top_p():
    logits = torch.zeros(1, 3000)
    logits[0, 7] = 6.0  # 403 of 3402
    options = make_options(1, top_k=50, top_p=0.5, uniform=np.array([0.9]))
    expected = int(np.ceil(0.9 * 1701.5 - 403.4)) + 1  # ids 0..6 come before the likely one
    assert abs(draw_ranked(logits, np.array([0]), options).token_ids[0] - expected) <= 2


def test_equal_logits_rank_in_the_order_of_their_ids():
    logits = torch.zeros(4, 3000)
    logits[:, [2900, 17, 5]] = 40.0
    options = make_options(4, top_k=3000, top_p=0.9999, uniform=np.array([0.0, 0.34, 0.67, 0.99]))
    assert draw_ranked(logits, np.arange(4), options).token_ids.tolist() == [5, 17, 2900, 2900]


def test_greedy_takes_the_first_of_equal_logits():
    logits = torch.zeros(2, 500)
    logits[0, [44, 400]] = 1.0
    assert draw_greedy(logits, np.array([0, 1])).token_ids.tolist() == [44, 0]


def test_no_mass_is_lost_at_the_ends_of_the_number_range():
    logits = torch.full((2, 700), -torch.inf)
    logits[:, [10, 650]] = 0.0
    options = make_options(2, top_k=700, uniform=np.array([0.0, 1.0 - 2.0**-53]))
    assert draw_dense(logits, np.arange(2), options).token_ids.tolist() == [10, 650]


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("bad_row", range(len(MIXED)))
def test_a_broken_row_is_reported_and_leaves_others_alone(bad_row, value):
    vocab_size = 2500
    slots = np.arange(len(MIXED))
    counts = np.full(len(MIXED), len(OUTPUT))

    def draw(logits):
        sampler = Sampler(vocab_size, 16, (EOS,))
        for slot in slots:
            sampler.add(int(slot), MIXED[slot], 9, 0, PROMPT, OUTPUT)
        return sampler.sample(logits, slots, counts)

    logits = make_logits(len(MIXED), vocab_size)
    good = draw(logits)
    logits[bad_row, 1234] = value
    broken = draw(logits)
    others = slots != bad_row
    assert good.is_finite.all()
    assert np.array_equal(others, broken.is_finite)
    assert np.array_equal(good.token_ids[others], broken.token_ids[others])


def test_logprobs_are_those_of_the_raw_logits():
    logits = make_logits(1, 97)
    found = sample_alone(Sampling(temperature=2.0, logprobs=4, repetition_penalty=1.9), logits)
    ids, values = found.logprobs[0]
    expected = logits.log_softmax(dim=-1)[0]
    chosen = expected[torch.from_numpy(ids).long()]
    tolerance = tolerances.of_sums(torch.float32, logits.shape[1])
    tolerances.assert_close(torch.from_numpy(values), chosen, tolerance)


def test_the_sampled_token_leads_the_logprobs():
    logits = make_logits(1, 97)
    found = sample_alone(Sampling(temperature=9.0, logprobs=3), logits, seed=4)
    top = set(logits[0].topk(3).indices.tolist())
    token_id = int(found.token_ids[0])
    assert token_id not in top
    assert found.logprobs[0][0].tolist()[0] == token_id
    assert set(found.logprobs[0][0].tolist()[1:]) == top


def test_a_sampled_token_among_the_most_likely_is_listed_once():
    logits = make_logits(1, 97)
    ids, _ = sample_alone(Sampling(logprobs=3), logits).logprobs[0]
    assert sorted(logits[0].topk(3).indices.tolist()) == sorted(ids.tolist())


def test_logprobs_zero_gives_the_sampled_token_alone():
    found = sample_alone(Sampling(logprobs=0), make_logits(1, 97))
    assert found.logprobs[0][0].tolist() == found.token_ids.tolist()


def test_only_rows_that_asked_get_logprobs():
    sampler = Sampler(97, 2, ())
    sampler.add(0, Sampling(), 0, 0, PROMPT)
    sampler.add(1, Sampling(logprobs=1), 0, 0, PROMPT)
    found = sampler.sample(make_logits(2, 97), np.array([0, 1]), np.zeros(2, np.int64))
    assert [entry is None for entry in found.logprobs] == [True, False]


def test_a_removed_slot_leaves_nothing_to_the_next():
    logits = make_logits(1, 97)
    sampler = Sampler(97, 1, (EOS,))
    sampler.add(0, Sampling(temperature=1.0, repetition_penalty=9.0, logprobs=2), 0, 0, PROMPT)
    sampler.remove(0)
    sampler.add(0, Sampling(), 0, 0, PROMPT)
    found = sampler.sample(logits, np.array([0]), np.array([0]))
    assert (int(logits.argmax()), None) == (int(found.token_ids[0]), found.logprobs)


def test_a_token_without_logit_in_the_prompt_is_no_error():
    logits = make_logits(1, 97)
    sampler = Sampler(97, 1, ())
    sampler.add(0, Sampling(repetition_penalty=1.1), 0, 0, np.array([96, 97, 5000, -1]))
    assert sampler.sample(logits, np.array([0]), np.array([0])).is_finite.all()


def test_an_empty_step_gives_an_empty_result():
    found = Sampler(97, 1, ()).sample(make_logits(0, 97), np.empty(0, np.int64), np.empty(0, int))
    assert found.token_ids.shape == (0,)
