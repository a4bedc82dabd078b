"""Draws of top_k and top_p without a host: the tokens of a full sort, on a GPU by one kernel."""

import numpy as np
import pytest
import torch

from raybatch.engine.sampling.draw import DrawOptions, draw_ranked, draw_ranked_ahead
from tests.kernels.triton.interpreted import small_ops

VOCAB, TILE = 1300, 512  # more than the candidates, and more than one tile


def random_logits(rng, kind, num_rows):
    logits = rng.normal(size=(num_rows, VOCAB)).astype(np.float32) * 0.2
    if kind == "ties":
        # zeros of both signs are equal
        return np.trunc(logits * 8) / 8
    if kind == "few":
        logits[rng.random(logits.shape) < 0.3] = -np.inf
    if kind == "two":
        logits[:] = -np.inf
        logits[:, rng.permutation(VOCAB)[:2]] = 3.0
    if kind == "steep":
        logits *= 60
    return logits


def random_options(rng, num_rows):
    has_top_k = rng.random(num_rows) < 0.6
    top_k = rng.choice([1, 2, 60, 1023, 1024, 1100, 1299, VOCAB], num_rows)
    return DrawOptions(
        temperature=rng.choice([1e-5, 0.3, 1.0, 2.5], num_rows),
        top_k=np.where(has_top_k, top_k, VOCAB),
        top_p=rng.choice([1e-9, 0.5, 0.93, 0.999, 1.0], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.3, 1.0], num_rows),
        uniform=np.where(rng.random(num_rows) < 0.1, 0.0, rng.random(num_rows)),
    )


@pytest.mark.parametrize("kind", ["plain", "ties", "few", "two", "steep"])
def test_tokens_are_those_of_a_draw_that_the_host_settles(kind, device, monkeypatch):
    monkeypatch.setattr(small_ops, "_MAX_TILE", TILE)
    rng = np.random.default_rng(len(kind))
    num_rows = 12
    logits, rows = torch.from_numpy(random_logits(rng, kind, num_rows)), np.arange(num_rows)
    options = random_options(rng, num_rows)
    expected = draw_ranked(logits, rows, options)
    for form in (small_ops.find_ranks, None):
        drawn = draw_ranked_ahead(logits.to(device), rows, options, find_ranks=form)
        assert expected.token_ids.tolist() == drawn.token_ids.tolist()
        assert torch.equal(expected.max_logits, drawn.max_logits.cpu())
