"""Compiles a C source of this folder with the host's compiler and loads it.

Nothing is kept on disk: a library fits the processor that it was compiled on, a compilation takes
half a second, and a file that lies in a shared folder could be anybody's.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["FLOATS", "WEIGHT_FORMS", "address", "compile_library", "has_compiler", "whole"]

# the kernels' tensors, whatever the process takes by default
FLOATS: Mapping[str, Any] = {"dtype": torch.float32, "device": "cpu"}

# what panels.h calls the types of weights
WEIGHT_FORMS: Mapping[torch.dtype, int] = {
    torch.float32: 0,
    torch.int8: 1,
    torch.float8_e4m3fn: 2,
}

_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    # sums in any order, so that they become vectors; NaN and infinity stay what they are
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-freciprocal-math",
)
_TIMEOUT_S = 60.0

_logger = logging.getLogger(__name__)


def compile_library(source: str, names: Mapping[str, int]) -> ctypes.CDLL | None:
    """Return a source of this folder as a library, None where it cannot be had, which is logged.

    Args:
        source: name of the file.
        names: that the source uses and does not define, with their values.
    """
    compiler = _compiler()
    if not compiler:
        _logger.info("no C compiler here (CC, cc, gcc or clang): kernels run as plain torch")
        return None
    definitions = [f"-D{name}={value}" for name, value in names.items()]
    try:
        # a mapped file is not gone at once on every file system
        with tempfile.TemporaryDirectory(prefix="raybatch-", ignore_cleanup_errors=True) as folder:
            compiled, library = str(Path(folder) / "kernel.o"), str(Path(folder) / "kernel.so")
            given = [*_FLAGS, *definitions, "-c", str(_FOLDER / source), "-o", compiled]
            _run([*compiler, *given])
            # apart: a linker that is told of loose arithmetic changes it for the whole process
            _run([*compiler, "-shared", compiled, "-o", library, "-lm"])
            return ctypes.CDLL(library)
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning(
            "%s could not be compiled, so it runs as plain torch, which is slower: %s",
            source,
            _cause(error),
        )
        return None


def has_compiler() -> bool:
    """Return whether the host has a C compiler."""
    return bool(_compiler())


def address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Return where a tensor's first element lies, null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def whole(*values: int) -> tuple[ctypes.c_int64, ...]:
    """Return whole numbers as a library takes them."""
    return tuple(ctypes.c_int64(value) for value in values)


def _compiler() -> list[str]:
    """Return the command of the compiler, which CC may give with arguments; empty for none."""
    commands = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    return next((command for command in commands if command and shutil.which(command[0])), [])


def _run(command: list[str]) -> None:
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_S,
    )


def _cause(error: OSError | subprocess.SubprocessError) -> str:
    output = getattr(error, "stderr", None)
    return f"{error}: {output.strip()[-500:]}" if output else str(error)
