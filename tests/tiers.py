"""What a test proves by default, and what under `pytest -m exhaustive` or `-m slow`.

Property tests draw the same few examples in each run by default, and many new ones there. Products
of parameters run in part by default (each value of one, mostly beside each value of every other),
and whole there.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

settings.register_profile("default-tier", derandomize=True, deadline=None)
settings.register_profile("exhaustive", deadline=None, print_blob=True)
settings.load_profile("default-tier")


def pytest_configure(config: pytest.Config) -> None:
    """Take the long form of property tests where those are asked for."""
    if re.search(r"(?<!not )\bexhaustive\b", config.getoption("markexpr")):
        settings.load_profile("exhaustive")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let property tests be among those that are asked for, before others are left out."""
    if settings.get_current_profile_name() != "exhaustive":
        return
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("exhaustive")


def examples(few: int, *, full: int) -> int:
    """Return how many examples a property test draws."""
    return full if settings.get_current_profile_name() == "exhaustive" else few


def some(values: Iterable[Any], few: int = 1, *, ids: Iterable[str] = ()) -> list[Any]:
    """Return parameters of which the first `few` are in the default tier; the others are slow.

    A tuple is the values of several parameters.
    """
    names = iter(ids)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=next(names, None),
            marks=[pytest.mark.slow] if number >= few else [],
        )
        for number, value in enumerate(values)
    ]


def pairs(*axes: Sequence[Any]) -> list[Any]:
    """Return the full product of some axes, of which few are in the default tier.

    Those have each value of an axis together with each value of every other axis.
    """
    return _tiered(axes, strength=2)


def singles(*axes: Sequence[Any]) -> list[Any]:
    """Return the full product of some axes, of which those in the default tier have each value."""
    return _tiered(axes, strength=1)


def _tiered(axes: Sequence[Sequence[Any]], *, strength: int) -> list[Any]:
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = _covering(product, strength)
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, places, strict=True)),
            marks=() if places in chosen else pytest.mark.exhaustive,
        )
        for places in product
    ]


def _covering(product: Sequence[tuple[int, ...]], strength: int) -> set[tuple[int, ...]]:
    """Return part of a product that has all choices of `strength` values, chosen greedily."""
    parts = {places: set(itertools.combinations(enumerate(places), strength)) for places in product}
    missing = set().union(*parts.values())
    chosen: set[tuple[int, ...]] = set()
    while missing:
        # the first of those that are as good, whatever the run
        best = max(product, key=lambda places: len(missing & parts[places]))
        chosen.add(best)
        missing -= parts[best]
    return chosen
