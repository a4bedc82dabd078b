"""Draws on a device without data, where a read by the host fails: launches and copies are few."""

import numpy as np
import pytest
import torch

from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sampling.draw import DrawOptions, draw_ranked
from raybatch.engine.sampling.sampler import Sampler
from raybatch.records.types import Sampling
from tests.engine.lazy_queue import LazyQueue
from tests.kernels.triton.test_triton_meta import META, launches

__all__ = ["launches"]  # a fixture
pytestmark = pytest.mark.meta

VOCAB, EOS = 5000, 3
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_k": 2000, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.0, "min_tokens": 9},
    {"temperature": 1.0, "min_tokens": 9},
    {"temperature": 1.0, "top_p": 0.9, "min_tokens": 9},
]
# kinds of draws, rows with and without min_tokens apart
MAX_LAUNCHES = 240


def draw(kinds, copies, launches, device=META):
    sampler = Sampler(
        VOCAB, len(kinds), (EOS,), upload=IndexUploads(torch.device("cpu"), copies).upload
    )
    slots = np.arange(len(kinds))
    for slot in slots:
        sampler.add(slot, Sampling(**kinds[slot]), 1, 0, np.array([1]))
    assert sampler.can_wait(slots)
    with launches:
        drawn = sampler.draw(torch.empty(len(kinds), VOCAB, device=device), slots, 0 * slots + 4)
    return drawn


@pytest.mark.parametrize("repeats", [1, 20])
def test_draws_of_all_kinds_read_nothing_back_in_a_constant_number_of_launches(repeats, launches):
    copies = LazyQueue(runs_at_once=True)
    copies.empty = lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=META)
    drawn = draw(KINDS * repeats, copies, launches)
    assert drawn.token_ids.shape == drawn.is_finite.shape == (len(KINDS) * repeats,)
    # options of all rows, and tokens that are held back
    assert 2 == len(copies.pending)
    assert 0 == launches.num_uploads
    assert 2 == launches.names["rank_kernel"]
    assert launches.names.total() <= MAX_LAUNCHES


def test_a_read_by_the_host_is_found(launches, monkeypatch):
    monkeypatch.setattr(
        "raybatch.engine.sampling.draw._agreed_ranks", lambda _: lambda run, *_: run[0].nonzero()
    )
    ones = np.ones(3)
    options = DrawOptions(ones, np.full(3, 7), ones, 0 * ones, 0.5 * ones)
    with pytest.raises(NotImplementedError, match="nonzero"), launches:
        draw_ranked(torch.empty(3, VOCAB, device=META), np.arange(3), options)
