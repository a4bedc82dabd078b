"""Compiles a C source of this folder with the host's compiler, loads it and calls it.

A library is kept on disk under all that it depends on, the processor included, so that a host
compiles a source once. The environment may name the compiler (CC) and lesser vectors than the
host's (RAYBATCH_KERNEL_VECTORS).
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch

from raybatch.config import cache_dir, environment
from raybatch.config.environment import kernel_vectors
from raybatch.errors import ConfigError

_CPU_INFO = Path("/proc/cpuinfo")
# what tells processors apart there, on x86 and on ARM; others change from core to core
_CPU_FIELDS = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"),
    }
)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3",
    "-fPIC",
    # sums in any order, so that they become vectors; NaN and infinity stay what they are
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-freciprocal-math",
)
# instructions by RAYBATCH_KERNEL_VECTORS, None for all that the host has; x86-64 alone has names
# for them, and a compiler that is told nothing takes the least of its processors
_MACHINES: Mapping[str | None, tuple[str, ...]] = {
    None: ("-march=native",),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
_TIMEOUT_S = 60.0
# what kernels make of random tensors differs from torch's by a hundredth of this
_TOLERANCE = 1e-4

_logger = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Made = TypeVar("_Made")


def library_name(command: Iterable[str], files: Iterable[Path]) -> str | None:
    """Return the name of what a command makes here of files: a hash of all that decides about it.

    None where the host does not tell its processor: another one may lack an instruction. `command`
    has the compiler, its flags and its version.
    """
    try:
        first, _, _ = _CPU_INFO.read_text(encoding="utf-8", errors="replace").partition("\n\n")
    except OSError:
        return None
    fields = (
        (name.strip(), value) for name, _, value in (x.partition(":") for x in first.splitlines())
    )
    processor = "\n".join(
        sorted(f"{name}={value}" for name, value in fields if name in _CPU_FIELDS)
    )
    if not processor:
        return None
    parts = [platform.machine(), processor, *command]
    contents = [part.encode() for part in parts] + [file.read_bytes() for file in files]
    # each by itself: parts that are put together otherwise are other parts
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    return f"{hashlib.sha256(digests).hexdigest()[:32]}.so"


def find_or_build(folder: Path, name: str | None, build: Callable[[Path], None]) -> ctypes.CDLL:
    """Return the library of a name; what nobody has kept is built, and kept for the next process.

    Processes that ask at the same time build it once.

    Args:
        folder: where libraries are kept; it is made.
        name: of the library; None for one that cannot be told from others, which is not kept.
        build: writes the library to a path.

    Raises:
        OSError: what was built cannot be loaded, or there is no room to build it.
    """
    with ExitStack() as open_things:
        private = None if name is None else open_things.enter_context(_private_folder(folder))
        kept = None if private is None or name is None else private / name
        if kept is not None:
            if library := _loaded(kept):
                return library
            # wait while another process builds; where files cannot be locked, nobody waits
            # (Windows has no such locks; nothing is kept there)
            import fcntl

            with suppress(OSError):
                lock = open_things.enter_context((kept.parent / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            if library := _loaded(kept):
                return library
        # a mapped file is not gone at once on every file system
        built = open_things.enter_context(
            tempfile.TemporaryDirectory(prefix="raybatch-", ignore_cleanup_errors=True)
        )
        path = Path(built) / "kernel.so"
        build(path)
        library = ctypes.CDLL(str(path))
        if kept is not None:
            _keep(path, kept)
        return library


@contextmanager
def _private_folder(folder: Path) -> Iterator[Path | None]:
    """Make a folder, and yield a path to it that stays its own whoever moves what is above it.

    None where it cannot be had or where others than this user and root can write into it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        _logger.info("compiled kernels are not kept: %s", error)
        yield None
        return
    try:
        status = os.fstat(handle)
        is_private = status.st_uid in (0, os.getuid()) and not status.st_mode & _WRITABLE_BY_OTHERS
        if not is_private:
            _logger.info("compiled kernels are not kept in %s: others can write there", folder)
        yield Path(f"/proc/self/fd/{handle}") if is_private else None
    finally:
        os.close(handle)


def _loaded(path: Path) -> ctypes.CDLL | None:
    """Return the library of a file; None if there is none, or one that cannot be loaded."""
    # a process that has loaded a path before does not look at the file again
    if not path.exists():
        return None
    with suppress(OSError):
        return ctypes.CDLL(str(path))
    return None


def _keep(built: Path, path: Path) -> None:
    """Copy a library so that processes which look for it see all of it or nothing."""
    try:
        # a folder of its own goes away with what was not moved out of it
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as staged:
            whole = Path(staged) / path.name
            shutil.copyfile(built, whole)
            with whole.open("rb+") as file:
                # a host that goes down must not leave the name of a file without its content
                os.fsync(file.fileno())
            os.replace(whole, path)
    except OSError as error:
        _logger.info("compiled kernels are not kept: %s", error)


class CompiledOnce(Generic[_Args, _Made]):
    """Keeps what a function compiles, by its arguments and the vectors that it is compiled for."""

    def __init__(self, make: Callable[_Args, _Made]) -> None:
        functools.update_wrapper(self, make)
        made = functools.cache(lambda _vectors, *args, **kwargs: make(*args, **kwargs))
        self._made: Callable[..., _Made] = made
        self.cache_clear: Callable[[], None] = made.cache_clear

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Made:
        """Return what was made for these arguments, or make it."""
        return self._made(kernel_vectors(), *args, **kwargs)


def host_vectors() -> tuple[str, ...]:
    """Return the values of RAYBATCH_KERNEL_VECTORS whose kernels this host can run, best first."""
    names = ("avx512", "avx2", "plain")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return names[2:]
    best = {"AVX512": 0, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 2)
    return names[best:]


def compile_library(source: str, names: Mapping[str, int]) -> ctypes.CDLL | None:
    """Return a source of this folder as a library, None where it cannot be had, which is logged.

    `names` are those that the source uses and does not define, with their values.

    Raises:
        ConfigError: RAYBATCH_KERNEL_VECTORS names vectors that the host lacks.
    """
    vectors = kernel_vectors()
    if vectors is not None and vectors not in host_vectors():
        raise ConfigError(
            f"RAYBATCH_KERNEL_VECTORS is {vectors}, and the processor of this host has no such "
            f"instructions; take one of {', '.join(host_vectors())}, or leave it out"
        )
    compiler = _compiler()
    if not compiler:
        _warn_of_no_compiler()
        return None
    options = [*_FLAGS, *_vector_flags(vectors), *(f"-D{name}={names[name]}" for name in names)]

    def build(library: Path) -> None:
        compiled = library.with_suffix(".o")
        _run(*compiler, *options, "-c", str(_FOLDER / source), "-o", str(compiled))
        # apart: a linker that is told of loose arithmetic changes it for the whole process
        _run(*compiler, "-shared", str(compiled), "-o", str(library), "-lm")

    # one whose compiler cannot be told from others has no name on disk
    name = None
    with suppress(OSError, subprocess.SubprocessError):
        command = [*compiler, _version(*compiler), *options]
        name = library_name(command, [_FOLDER / source, *sorted(_FOLDER.glob("*.h"))])
    try:
        return find_or_build(cache_dir() / "kernels", name, build)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        cause = f"{error}: {output.strip()[-500:]}" if output else str(error)
        _logger.warning(
            "%s could not be compiled, so it runs as plain torch, which is slower: %s",
            source,
            cause,
        )
        return None


def _vector_flags(vectors: str | None) -> tuple[str, ...]:
    # ARM as macOS names it, whose compilers did not take -march=native there before clang 15
    if vectors is None and platform.machine() == "arm64":
        return ("-mcpu=native",)
    return _MACHINES[vectors]


@functools.cache
def _warn_of_no_compiler() -> None:
    """Say once per process what is missing and how to get it."""
    _logger.warning(
        "no C compiler on this host (CC, cc, gcc or clang), so the engine runs as plain torch, "
        "which is slower; install one, such as gcc (apt-get install gcc libc6-dev)"
    )


def has_compiler() -> bool:
    """Return whether the host has a C compiler."""
    return bool(_compiler())


def _compiler() -> list[str]:
    """Return the command of the compiler, which CC may give with arguments; empty for none."""
    commands = [shlex.split(environment().get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    return next((command for command in commands if command and shutil.which(command[0])), [])


@functools.cache
def _version(*compiler: str) -> str:
    return _run(*compiler, "--version")


def _run(*command: str) -> str:
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
    )
    return done.stdout


def call(kernel: Callable[..., None], *values: torch.Tensor | float | None) -> None:
    """Call a function of a library: tensors by their addresses (None: null), int64, and floats.

    Each call of a function has values of the same types.
    """
    function = cast(Any, kernel)
    if function.argtypes is None:
        # a call that knows them takes half the time
        function.argtypes = [_ctype_of(value) for value in values]
    kernel(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values))


def _ctype_of(value: torch.Tensor | float | None) -> type:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_int64 if isinstance(value, int) else ctypes.c_float


def random_tensors() -> Callable[..., torch.Tensor]:
    """Return what makes the same tensors each time, whatever the process takes by default."""
    generator = torch.Generator().manual_seed(0)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")


def resemble(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a kernel made what torch makes of the same random tensors."""
    return torch.allclose(actual, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
