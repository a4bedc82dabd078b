"""The stored tokens of transformers are those of the installed version."""

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
def test_missing_tokens_are_an_error_that_says_how_to_add_them():
    with pytest.raises(LookupError, match="WRITE_REFERENCES=1 python -m pytest"):
        reference_tokens("llama", [[1, 2, 3, 4, 5, 6, 7]], 3)


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_stored_tokens_are_those_of_transformers(variant):
    for name, prompt, tokens in kept():
        if name != variant:
            continue
        found = greedy_tokens(model_of(variant), prompt, len(tokens))
        gap = smallest_gap(model_of(variant), prompt, found)
        assert tokens == found, (
            f"transformers or the tiny models have changed (two tokens differ by {gap:.1e}); "
            f"to write {PATH.name} again: {WAY_OUT}"
        )
