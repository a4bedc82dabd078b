"""Prompts that others continue: rows whose keys are all in shared-prefix segments."""

import pytest

from tests.engine.real_engines import Engines, requests_of, run, tokens_of
from tests.engine.tiny_models import build

VOCAB = 211


@pytest.fixture(scope="module")
def engines_of(tmp_path_factory):
    """Engines of a tiny model by its variant."""
    made = {}

    def of(variant):
        if variant not in made:
            path = tmp_path_factory.mktemp(variant)
            build(variant).save_pretrained(path)
            made[variant] = Engines(path)
        return made[variant]

    return of


def alone(engines, config, prompts, **sampling):
    """Return the tokens of prompts that each run in a separate engine."""
    found = {}
    for i, prompt in enumerate(prompts):
        done = tokens_of(run(engines.make(config), requests_of([prompt], **sampling)))
        found |= {(i, sample): tokens for (_, sample), tokens in done.items()}
    return found


def chain(rng, *lengths):
    """Return prompts of these lengths, each of which continues all shorter ones."""
    tokens = rng.integers(1, VOCAB, max(lengths)).tolist()
    return [tokens[:length] for length in lengths]


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize(
    ("block_size", "lengths"),
    [(64, (128, 140)), (64, (192, 200)), (64, (256, 300)), (16, (160, 170)), (64, (64, 128, 200))],
    ids=str,
)
def test_a_prompt_of_whole_blocks_that_another_continues(
    engines_of, rng, block_size, lengths, kv_dtype, is_compiled
):
    engines = engines_of("qwen3")
    config = engines.config(
        num_blocks=24,
        block_size_tokens=block_size,
        compile_kernels=is_compiled,
        kv_cache_dtype=kv_dtype,
    )
    prompts = chain(rng, *lengths)
    expected = alone(engines, config, prompts)
    assert expected == tokens_of(run(engines.make(config), requests_of(prompts)))
