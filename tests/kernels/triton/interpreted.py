"""Imports the kernels, interpreted without a GPU; the first import decides."""

from importlib.util import find_spec

import pytest
import torch

from tests.kernels.triton.numpy_scalars import settle_interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Triton has wheels for Linux alone; without it this very folder would be found, which has no origin
_SPEC = find_spec("triton")
HAS_TRITON = _SPEC is not None and _SPEC.origin is not None

if HAS_TRITON:
    # Triton decides when a kernel is defined. The variable does not stay, as it would reach other
    # tests and the processes that they start.
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            settle_interpreter()
        from raybatch.kernels.triton import attention, moe, small_ops  # noqa: F401
