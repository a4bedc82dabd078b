"""Random chains and trees of prompts, and how engines run them: a case follows from its seed."""

import random
from dataclasses import dataclass, field

VOCAB = 211
# the sizes of blocks divide this one, so that its borders are theirs
BORDER = 16
MAX_LEN = 11 * BORDER


@dataclass(frozen=True)
class Setup:
    """What an engine is loaded for: one runner each."""

    variant: str
    block_size: int
    is_compiled: bool
    options: dict = field(default_factory=dict)

    def name(self) -> str:
        form = "compiled" if self.is_compiled else "torch"
        return "-".join([self.variant, str(self.block_size), form, *self.options])


@dataclass(frozen=True)
class Case:
    """Prompts in the order in which they come, and how an engine runs them.

    Args:
        plan: group and prefix length of each prompt.
        options: of the scheduler, which go with any runner.
        num_late: of the prompts, which come after some steps.
    """

    prompts: list
    plan: list
    max_tokens: int
    num_samples: int
    options: dict
    num_late: int


class Forest:
    """Paths of random tokens that go together for a while: whole trees, of which prompts are cut.

    The forest is the same for every case, so that what a prompt gives alone is computed once.
    """

    def __init__(self, num_trees=3, paths_per_tree=4) -> None:
        rng = random.Random(11)
        self.trees = []
        for _ in range(num_trees):
            paths = [_tokens(rng, MAX_LEN)]
            while len(paths) < paths_per_tree:
                start = _length(rng, MAX_LEN)
                paths.append(rng.choice(paths)[:start] + _tokens(rng, MAX_LEN - start))
            self.trees.append(paths)

    def draw(self, seed, *, takes_options=True) -> Case:
        """Return the case of a seed.

        Args:
            seed: of everything in it.
            takes_options: whether drafts may be asked for.
        """
        rng = random.Random(seed)
        trees = rng.sample(range(len(self.trees)), rng.choice((1, 1, 2)))
        # many short prompts, or few of which some are long
        longest = rng.choice((3 * BORDER, MAX_LEN, MAX_LEN))
        drawn = []
        for _ in range(rng.randint(2, 6)):
            tree = rng.choice(trees)
            paths = self.trees[tree]
            path = paths[0] if rng.random() < 0.6 else rng.choice(paths)
            drawn.append((tree, path[: _length(rng, longest)]))
        if rng.random() < 0.5:
            # a prompt of whole blocks, and some that continue it
            tree = rng.choice(trees)
            path = rng.choice(self.trees[tree])
            length = BORDER * rng.randint(2, MAX_LEN // BORDER - 1)
            more = [rng.randint(1, MAX_LEN - length) for _ in range(rng.randint(1, 4))]
            drawn += [(tree, path[: length + extra]) for extra in (0, *more)]
        order = rng.choice(("drawn", "short", "short", "long"))
        if order != "drawn":
            drawn.sort(key=lambda row: len(row[1]), reverse=order == "long")
        prompts = [prompt for _, prompt in drawn]
        options = {
            "max_batched_tokens": rng.choice((9, 33, 64, 512, 2048, 2048)),
            "max_num_seqs": rng.choice((1, 3, 64, 64, 64)),
            "enable_prefix_caching": rng.random() < 0.75,
        }
        if takes_options and rng.random() < 0.25:
            options["speculative_tokens"] = rng.choice((1, 3))
        return Case(
            prompts=prompts,
            plan=_plan(rng, drawn) if rng.random() < 0.5 else [(None, 0)] * len(prompts),
            max_tokens=rng.choice((1, 2, 5, 9)),
            num_samples=rng.choice((1, 1, 1, 2, 3)),
            options=options,
            num_late=rng.choice((0, 0, 1, 2)),
        )


def _tokens(rng, count) -> list:
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def _length(rng, longest) -> int:
    """Return a length at, before or after a border more often than others."""
    length = BORDER * rng.randint(1, longest // BORDER)
    kind = rng.random()
    if kind < 0.35:
        return length
    if kind < 0.65:
        return max(1, min(longest, length + rng.choice((-1, 1))))
    # borders of smaller blocks, or of none
    return rng.choice((4 * rng.randint(1, longest // 4), rng.randint(1, longest)))


def _plan(rng, drawn) -> list:
    """Return groups as a plan makes them, sometimes with other lengths than all members share."""
    shared = {}
    for tree, prompt in drawn:
        known = shared.setdefault(tree, prompt)
        same = [one == other for one, other in zip(known, prompt, strict=False)]
        shared[tree] = known[: same.index(False) if False in same else len(same)]
    is_sound = rng.random() < 0.7
    return [
        (tree, len(shared[tree]) if is_sound else rng.randint(0, len(prompt)))
        for tree, prompt in drawn
    ]
