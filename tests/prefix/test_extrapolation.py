"""What a plan over many rows saves, forecast from the first of them."""

import numpy as np
import pytest

from raybatch.prefix.block_keys import BlockKeys, hash_blocks
from raybatch.prefix.forecast import forecast_sharing

SHARED, OWN, BLOCK = 160, 40, 16
WINDOW = 1024


def keys_of(documents) -> BlockKeys:
    """Return rows about documents, each with some distinct tokens."""
    documents = np.asarray(documents)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, 1 << 20, (documents.max() + 1, SHARED), dtype=np.int32)
    tokens = np.concatenate(
        [texts[documents], rng.integers(0, 1 << 20, (len(documents), OWN), dtype=np.int32)], axis=1
    )
    offsets = np.arange(len(documents) + 1) * (SHARED + OWN)
    return hash_blocks(tokens.reshape(-1), offsets, BLOCK)


def computed(num_documents: int, num_rows: int) -> float:
    """Return the share of the prompt tokens that is computed where each document is once."""
    return (num_documents * SHARED / num_rows + OWN) / (SHARED + OWN)


@pytest.mark.parametrize("num_documents", [100, 1000, 10_000])
def test_a_sample_of_shuffled_rows_tells_what_all_share(num_documents):
    num_rows = 15 * num_documents
    documents = np.random.default_rng(1).permutation(num_rows) // 15
    forecast = forecast_sharing(keys_of(documents[:1024]), num_rows, WINDOW)
    assert not forecast.is_sorted
    planned = forecast.planned_tokens / forecast.prompt_tokens
    assert planned == pytest.approx(computed(num_documents, num_rows), abs=0.05)
    seen = [len(set(documents[i : i + WINDOW])) for i in range(0, num_rows - WINDOW + 1, WINDOW)]
    waiting = forecast.waiting_tokens / forecast.prompt_tokens
    assert waiting == pytest.approx(computed(np.mean(seen), WINDOW), abs=0.05)


def test_a_plan_saves_nothing_where_rows_lie_together():
    forecast = forecast_sharing(keys_of(np.arange(1024) // 15), 10**6, WINDOW)
    assert forecast.is_sorted
    assert 0 == forecast.saved_fraction


@pytest.mark.parametrize("documents", [np.arange(1024), np.zeros(1024, np.int64)])
def test_a_plan_saves_little_where_nothing_or_one_prefix_is_shared(documents):
    assert forecast_sharing(keys_of(documents), 10**6, WINDOW).saved_fraction < 0.02


def test_rows_that_wait_together_are_planned_already():
    documents = np.random.default_rng(1).permutation(900) // 15
    assert 0 == forecast_sharing(keys_of(documents), 900, WINDOW).saved_fraction


@pytest.mark.parametrize("num_rows", [0, 1])
def test_samples_without_pairs_forecast_nothing(num_rows):
    sample = keys_of([0]).slice(0, num_rows)
    assert 0 == forecast_sharing(sample, 10**6, WINDOW).saved_fraction
