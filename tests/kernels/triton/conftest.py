"""The same tests on a GPU and, where there is none, on the CPU under Triton's interpreter."""

import pytest
import torch

from tests.kernels.triton.interpreted import DEVICE, HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


@pytest.fixture(scope="session")
def library():
    """(module, name, function) of what Triton's own library has defined to be compiled.

    That is all of it where another test imported Triton first, as transformers does.
    """
    if DEVICE.type == "cuda":
        return []
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return [
        (module, name, InterpretedFunction(value.fn))
        for module in (tl, tl.standard)
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction)
    ]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, library):
    """Interpret what a kernel calls, and let Triton import the rest of itself for that."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module, name, function in library:
        monkeypatch.setattr(module, name, function)


@pytest.fixture
def device() -> torch.device:
    return DEVICE
