"""The tokens that are kept of transformers are what it says here and now."""

import pytest

from tests.engine.references import (
    PATH,
    WAY_OUT,
    WRITES,
    greedy_tokens,
    kept,
    model_of,
    reference_tokens,
    smallest_gap,
)
from tests.engine.tiny_models import VARIANTS


def test_every_architecture_has_references():
    assert {variant for variant, _, _ in kept()} >= set(VARIANTS)


@pytest.mark.skipif(WRITES, reason="they are added")
def test_tokens_that_are_not_kept_are_asked_for_with_the_way_out():
    with pytest.raises(LookupError, match="WRITE_REFERENCES=1 python -m pytest"):
        reference_tokens("llama", [[1, 2, 3, 4, 5, 6, 7]], 3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_what_is_kept_is_what_transformers_says(variant):
    for name, prompt, tokens in kept():
        if name != variant:
            continue
        found = greedy_tokens(model_of(variant), prompt, len(tokens))
        gap = smallest_gap(model_of(variant), prompt, found)
        assert tokens == found, (
            f"transformers or the tiny models have changed (two tokens differ by {gap:.1e}); "
            f"to make {PATH.name} anew: {WAY_OUT}"
        )
