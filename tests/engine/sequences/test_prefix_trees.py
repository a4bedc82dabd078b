"""Whatever prompts share, and however an engine runs them: each gets the tokens it gets alone."""

import itertools

import pytest

from raybatch.kernels.native.compiler import has_compiler
from tests.engine.real_engines import Engines, requests_of, run, tokens_of
from tests.engine.sequences.prefix_cases import Forest, Setup
from tests.engine.tiny_models import build

VARIANTS = ("qwen3", "mistral-window")
MOST_TOKENS = 9
# of each setup in the long test
NUM_SEEDS = 25
# one runner for each model and form of kernels
FEW = [
    Setup("qwen3", 16, True),
    Setup("qwen3", 8, False),
    Setup("mistral-window", 16, False),
    Setup("mistral-window", 8, True),
]
# tokens for which a pool has room where memory is short: those of the longest prompt, and some
SHORT_TOKENS = 208
ALL = [
    Setup(variant, block_size, is_compiled, options)
    for variant, block_size, is_compiled, options in itertools.product(
        VARIANTS,
        (4, 8, 16),
        (True, False),
        (
            {},
            {"num_blocks": None},
            {"num_blocks": None, "num_host_blocks": 200},
            {"kv_offload": True, "num_host_blocks": 400},
        ),
    )
]


class World:
    """The forest, engines of both models, and what each prompt gives alone."""

    def __init__(self, folder) -> None:
        self.forest = Forest()
        self._engines, self._alone = {}, {}
        for variant in VARIANTS:
            build(variant).save_pretrained(folder / variant)
            self._engines[variant] = Engines(folder / variant)

    def alone(self, variant, prompt) -> list:
        """The tokens of a prompt by the kernels of torch, without anything beside it."""
        key = variant, tuple(prompt)
        if key not in self._alone:
            engines = self._engines[variant]
            config = engines.config(
                block_size_tokens=16, compile_kernels=False, enable_prefix_caching=False
            )
            requests = requests_of([prompt], max_tokens=MOST_TOKENS)
            self._alone[key] = tokens_of(run(engines.make(config), requests))[0, 0]
        return self._alone[key]

    def check(self, setup, seed) -> None:
        """Run the case of a seed and compare every row with what it gives alone."""
        options = dict(setup.options)
        case = self.forest.draw(seed, takes_options=not options.get("kv_offload"))
        if "num_blocks" in options:
            options["num_blocks"] = SHORT_TOKENS // setup.block_size
        engines = self._engines[setup.variant]
        config = engines.config(
            block_size_tokens=setup.block_size,
            compile_kernels=setup.is_compiled,
            **options,
            **case.options,
        )
        requests = requests_of(
            case.prompts, plan=case.plan, max_tokens=case.max_tokens, n=case.num_samples
        )
        found = tokens_of(run(engines.make(config), requests, num_late=case.num_late))
        expected = {
            (i, sample): self.alone(setup.variant, prompt)[: case.max_tokens]
            for i, prompt in enumerate(case.prompts)
            for sample in range(case.num_samples)
        }
        assert expected == found, f"seed {seed} of {setup}"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("setup", FEW, ids=Setup.name)
def test_prompts_of_a_tree_give_the_tokens_that_each_gives_alone(world, setup):
    if setup.is_compiled and not has_compiler():
        pytest.skip("no C compiler here")
    for seed in range(14):
        world.check(setup, seed)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setup", ALL, ids=Setup.name)
def test_prompts_of_many_trees_give_the_tokens_that_each_gives_alone(world, setup):
    first = NUM_SEEDS * ALL.index(setup)
    for seed in range(first, first + NUM_SEEDS):
        world.check(setup, seed)
