"""The same tests on a GPU and, where there is none, on the CPU under Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Triton has wheels for Linux alone; without it this very folder would be found, which has no origin
_SPEC = find_spec("triton")
_HAS_TRITON = _SPEC is not None and _SPEC.origin is not None
collect_ignore_glob = [] if _HAS_TRITON else ["test_*.py"]

if _HAS_TRITON:
    # Triton decides when a kernel is defined. The variable does not stay, as it would reach other
    # tests and the processes that they start.
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        import triton
        import triton.language as tl

        import raybatch.kernels.triton.attention
        import raybatch.kernels.triton.moe
        import raybatch.kernels.triton.small_ops  # noqa: F401


@pytest.fixture(scope="session")
def library():
    """(module, name, function) of what Triton's own library has defined to be compiled.

    That is all of it where another test imported Triton first, as transformers does.
    """
    if DEVICE.type == "cuda":
        return []
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
