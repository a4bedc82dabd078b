"""Fixtures of the whole suite: a seeded generator, and memory that is never clean by luck."""

import sys

import numpy as np
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM and what it imports warn: their warnings are not ours to mend."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.Generator(np.random.PCG64(42))


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill float tensors that the package leaves uninitialised with NaN."""
    torch = sys.modules.get("torch")
    if torch is None:
        return

    def poisoning(make):
        def wrapped(*args, **kwargs):
            made = make(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("raybatch.") and made.is_floating_point():
                made.fill_(float("nan"))
            return made

        return wrapped

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder of the fake backend: a byte-level tokenizer without a chat template."""
    # slow to load, and most tests need no Ray
    from tests.stages.support import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture(scope="module")
def cluster():
    """A small Ray cluster; its pools end with the module."""
    from tests.stages.support import local_ray

    with local_ray():
        yield
