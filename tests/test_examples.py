"""The examples in docstrings say what comes of them."""

import doctest
import importlib
from pathlib import Path

import pytest

import raybatch

PACKAGE = Path(raybatch.__file__).parent
# classes whose examples show how they are used, whatever else has one
CENTRAL = {
    "raybatch.actors.coordinator.coordinator": "Coordinator",
    "raybatch.actors.queue.row_queue": "RowQueue",
    "raybatch.engine.engine": "Engine",
    "raybatch.engine.scheduling.scheduler": "Scheduler",
    "raybatch.engine.sequences.block_manager": "BlockManager",
}


def modules_with_examples():
    for path in sorted(PACKAGE.rglob("*.py")):
        if ">>> " in path.read_text("utf-8"):
            yield ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_say_what_comes_of_them(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert 0 == failed


@pytest.mark.parametrize("name", list(CENTRAL))
def test_central_classes_have_an_example_that_runs(name):
    owner = getattr(importlib.import_module(name), CENTRAL[name])
    (found,) = doctest.DocTestFinder(recurse=False).find(owner, CENTRAL[name])
    assert 5 <= len(found.examples)
    assert not any(doctest.SKIP in example.options for example in found.examples)
