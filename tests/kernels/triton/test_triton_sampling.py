import pytest
import torch

from raybatch.kernels import sampling
from raybatch.kernels.triton import sampling as kernels


def numbers(num_rows, seed=0):
    """Temperatures (every third row takes its likeliest token), min_p, and numbers in [0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(3, num_rows, generator=generator, dtype=torch.float64)
    temperature = 0.3 + drawn[0]
    temperature[::3] = 0.0
    return temperature, torch.where(drawn[1] < 0.5, 0.0, 0.02), drawn[2]


def run(logits, given, device):
    moved = [tensor.to(device) for tensor in (logits, *given)]
    return [found.cpu() for found in kernels.draw_tokens(*moved)]


# under, at and over the edges of blocks of 256 tokens and of tiles of 4096
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [(0, 300), (4, 1), (7, 255), (5, 256), (9, 700), (3, 4096), (4, 9001)],
)
def test_drawn_tokens_equal_the_reference(num_rows, vocab_size, device):
    torch.manual_seed(vocab_size)
    logits, given = torch.randn(num_rows, vocab_size) * 2, numbers(num_rows)
    expected = sampling.draw_tokens(logits, *given)
    token_ids, max_logits, logprobs = run(logits, given, device)
    assert expected.token_ids.tolist() == token_ids.tolist()
    assert torch.equal(expected.max_logits, max_logits)
    torch.testing.assert_close(logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_a_row_draws_the_same_alone_and_in_any_batch(device):
    torch.manual_seed(1)
    logits, given = torch.randn(6, 1000), numbers(6, seed=3)
    together = run(logits, given, device)
    order = torch.tensor([4, 0, 5, 2])
    for rows in (order, *(torch.tensor([row]) for row in range(6))):
        some = run(logits[rows], [number[rows] for number in given], device)
        for found, expected in zip(some, together, strict=True):
            assert torch.equal(expected[rows], found)


def test_the_first_of_equal_logits_is_the_likeliest(device):
    logits = torch.zeros(3, 9000)
    logits[0, [8500, 5000]] = 2.0
    logits[1, [4095, 4096]] = 2.0
    zeros = torch.zeros(3, dtype=torch.float64)
    token_ids, *_ = run(logits, (zeros, zeros, zeros), device)
    assert [5000, 4095, 0] == token_ids.tolist()


def test_numbers_from_0_to_1_draw_tokens_by_their_shares_in_the_order_of_ids(device):
    shares = torch.tensor([0.5, 0.0, 0.3, 0.2])
    logits = torch.full((10, 5000), float("-inf"))
    logits[:, [2, 255, 300, 4900]] = shares.log()
    uniform = torch.arange(10, dtype=torch.float64) / 10 + 1e-4
    ones = torch.ones_like(uniform)
    token_ids, *_ = run(logits, (ones, 0 * ones, uniform), device)
    assert [2] * 5 + [300] * 3 + [4900] * 2 == token_ids.tolist()
    # the largest number below 1, and tokens that min_p leaves out
    last = torch.full_like(uniform, 1 - 2**-53)
    assert {4900} == set(run(logits, (ones, 0 * ones, last), device)[0].tolist())
    assert {300} == set(run(logits, (ones, 0.5 * ones, last), device)[0].tolist())
    # nothing is drawn of blocks without any share, not even at 0
    logits[:, :256] = float("-inf")
    assert {300} == set(run(logits, (ones, 0 * ones, 0 * ones), device)[0].tolist())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("token", [0, 4500, slice(None)])
def test_a_broken_row_is_told_and_breaks_no_other(token, broken, device):
    torch.manual_seed(2)
    logits, given = torch.randn(4, 5000), numbers(4)
    expected = run(logits, given, device)
    logits[1:3, token] = broken
    token_ids, max_logits, _ = run(logits, given, device)
    assert [True, False, False, True] == torch.isfinite(max_logits).tolist()
    assert (token_ids >= 0).all()
    assert (token_ids < 5000).all()
    assert [expected[0][0], expected[0][3]] == [token_ids[0], token_ids[3]]


def test_logits_are_read_from_a_wider_tensor(device):
    torch.manual_seed(4)
    wide, given = torch.randn(3, 800), numbers(3)
    expected = sampling.draw_tokens(wide[:, :513].contiguous(), *given)
    assert expected.token_ids.tolist() == run(wide[:, :513], given, device)[0].tolist()
