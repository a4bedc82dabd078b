import numpy as np
import pytest
import torch

from raybatch.engine.sampling.draw import DrawOptions, draw_dense, draw_greedy
from raybatch.kernels.sampling import draw_tokens


def options(num_rows, vocab_size, seed):
    rng = np.random.default_rng(seed)
    return DrawOptions(
        temperature=rng.uniform(0.3, 2.0, num_rows),
        top_k=np.full(num_rows, vocab_size),
        top_p=np.ones(num_rows),
        min_p=rng.choice([0.0, 0.05], num_rows),
        uniform=rng.random(num_rows),
    )


@pytest.mark.parametrize("vocab_size", [1, 255, 256, 700, 5000])
def test_the_op_draws_what_the_sampler_draws(vocab_size):
    torch.manual_seed(vocab_size)
    logits, rows = torch.randn(16, vocab_size) * 3, np.arange(16)
    given = options(16, vocab_size, seed=vocab_size)
    numbers = [torch.from_numpy(x) for x in (given.temperature, given.min_p, given.uniform)]
    drawn = draw_tokens(logits, *numbers)
    expected = draw_dense(logits, rows, given)
    assert expected.token_ids.tolist() == drawn.token_ids.tolist()
    assert expected.max_logits.tolist() == drawn.max_logits.tolist()
    greedy = draw_tokens(logits, torch.zeros(16).double(), *numbers[1:])
    assert draw_greedy(logits, rows).token_ids.tolist() == greedy.token_ids.tolist()


def test_log_probabilities_are_those_of_the_raw_logits():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    half = torch.tensor([0.5]).double()
    drawn = draw_tokens(logits, half * 0, half * 0, half)
    expected = torch.log_softmax(logits, dim=-1)[0, 1]
    torch.testing.assert_close(drawn.logprobs, expected[None])
