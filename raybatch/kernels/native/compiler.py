"""Compiles C sources of this folder with the host's compiler, loads and calls them.

Libraries are cached on disk by a hash of everything they depend on, including the CPU model. The
environment may set the compiler (CC) and a smaller vector instruction set
(RAYBATCH_KERNEL_VECTORS).
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
# fields of /proc/cpuinfo that identify a CPU model, on x86 and ARM; others vary by core
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
    # sums in any order, for vectorisation; NaN and infinity are preserved
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-freciprocal-math",
)
# compiler flags by RAYBATCH_KERNEL_VECTORS; None for everything the host has. Only x86-64 has named
# levels; without flags a compiler targets the baseline CPU
_MACHINES: Mapping[str | None, tuple[str, ...]] = {
    None: ("-march=native",),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "plain": (),
}
_TIMEOUT_S = 60.0
# allowed error of kernels on random tensors; typical errors are a hundredth of it
_TOLERANCE = 1e-4

_logger = logging.getLogger(__name__)

_Args = ParamSpec("_Args")
_Made = TypeVar("_Made")


def library_name(command: Iterable[str], files: Iterable[Path]) -> str | None:
    """Return the name of a compiled library: a hash of everything that it depends on.

    None if the CPU model is unknown, as another CPU may lack instructions. `command` includes the
    compiler, its flags and its version.
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
    # hash each file separately, so that boundaries matter
    digests = b"".join(hashlib.sha256(content).digest() for content in contents)
    return f"{hashlib.sha256(digests).hexdigest()[:32]}.so"


def find_or_build(folder: Path, name: str | None, build: Callable[[Path], None]) -> ctypes.CDLL:
    """Return a cached library, or build and cache it; concurrent processes build it once.

    Args:
        folder: cache folder; created if missing.
        name: of the library; None to disable caching.
        build: writes the library to a path.

    Raises:
        OSError: the library cannot be loaded, or the disk is full.
    """
    with ExitStack() as open_things:
        private = None if name is None else open_things.enter_context(_private_folder(folder))
        kept = None if private is None or name is None else private / name
        if kept is not None:
            if library := _loaded(kept):
                return library
            # wait while another process builds, unless files cannot be locked (on Windows nothing
            # is cached)
            import fcntl

            with suppress(OSError):
                lock = open_things.enter_context((kept.parent / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            if library := _loaded(kept):
                return library
        # some file systems cannot delete a mapped file immediately
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
    """Create a folder, and yield a path to it that is immune to renames of its parents.

    None if it cannot be created, or if users other than this one and root can write into it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        _logger.info("cannot cache compiled kernels, so each process compiles them: %s", error)
        yield None
        return
    try:
        status = os.fstat(handle)
        is_private = status.st_uid in (0, os.getuid()) and not status.st_mode & _WRITABLE_BY_OTHERS
        if not is_private:
            _logger.info(
                "not caching compiled kernels: other users can write to the cache folder %s", folder
            )
        yield Path(f"/proc/self/fd/{handle}") if is_private else None
    finally:
        os.close(handle)


def _loaded(path: Path) -> ctypes.CDLL | None:
    """Load the library of a file; None if it is missing or cannot be loaded."""
    # a path that was loaded before would not be read again
    if not path.exists():
        return None
    with suppress(OSError):
        return ctypes.CDLL(str(path))
    return None


def _keep(built: Path, path: Path) -> None:
    """Copy a library into the cache atomically."""
    try:
        # a temporary folder is removed with everything that was not moved
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as staged:
            whole = Path(staged) / path.name
            shutil.copyfile(built, whole)
            with whole.open("rb+") as file:
                # a crash must not leave a file name without content
                os.fsync(file.fileno())
            os.replace(whole, path)
    except OSError as error:
        _logger.info("cannot cache compiled kernels, so each process compiles them: %s", error)


class CompiledOnce(Generic[_Args, _Made]):
    """Wraps a function that compiles; caches its results by arguments and instruction set."""

    def __init__(self, make: Callable[_Args, _Made]) -> None:
        functools.update_wrapper(self, make)
        made = functools.cache(lambda _vectors, *args, **kwargs: make(*args, **kwargs))
        self._made: Callable[..., _Made] = made
        self.cache_clear: Callable[[], None] = made.cache_clear

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Made:
        """Return the cached result for these arguments, or compute it."""
        return self._made(kernel_vectors(), *args, **kwargs)


def host_vectors() -> tuple[str, ...]:
    """Return the values of RAYBATCH_KERNEL_VECTORS whose kernels this host can run, best first."""
    names = ("avx512", "avx2", "plain")
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return names[2:]
    best = {"AVX512": 0, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 2)
    return names[best:]


def compile_library(source: str, names: Mapping[str, int]) -> ctypes.CDLL | None:
    """Compile a source of this folder to a library; None, with a log entry, if that fails.

    `names` are macros that the source needs, with their values.

    Raises:
        ConfigError: RAYBATCH_KERNEL_VECTORS names an instruction set that the host lacks.
    """
    vectors = kernel_vectors()
    if vectors is not None and vectors not in host_vectors():
        raise ConfigError(
            f"RAYBATCH_KERNEL_VECTORS is {vectors}, but the CPU of this host does not support it; "
            f"set it to one of {', '.join(host_vectors())}, or unset it"
        )
    compiler = _compiler()
    if not compiler:
        _warn_of_no_compiler()
        return None
    options = [*_FLAGS, *_vector_flags(vectors), *(f"-D{name}={names[name]}" for name in names)]

    def build(library: Path) -> None:
        compiled = library.with_suffix(".o")
        _run(*compiler, *options, "-c", str(_FOLDER / source), "-o", str(compiled))
        # separately: a linker with -fassociative-math changes arithmetic of the whole process
        _run(*compiler, "-shared", str(compiled), "-o", str(library), "-lm")

    # without a known compiler version the library is not cached
    name = None
    with suppress(OSError, subprocess.SubprocessError):
        command = [*compiler, _version(*compiler), *options]
        name = library_name(command, [_FOLDER / source, *sorted(_FOLDER.glob("*.h"))])
    try:
        return find_or_build(cache_dir() / "kernels", name, build)
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", None)
        cause = f"{error}: {output.strip()[-500:]}" if output else str(error)
        _logger.warning("could not compile %s, using slower torch ops: %s", source, cause)
        return None


def _vector_flags(vectors: str | None) -> tuple[str, ...]:
    # macOS on ARM: clang before 15 does not support -march=native there
    if vectors is None and platform.machine() == "arm64":
        return ("-mcpu=native",)
    return _MACHINES[vectors]


@functools.cache
def _warn_of_no_compiler() -> None:
    """Warn once per process that there is no compiler, and how to install one."""
    _logger.warning(
        "no C compiler on this host (CC, cc, gcc or clang), using slower torch ops; install one, "
        "such as gcc (apt-get install gcc libc6-dev)"
    )


def has_compiler() -> bool:
    """Return whether the host has a C compiler."""
    return bool(_compiler())


def _compiler() -> list[str]:
    """Return the command of the compiler; CC may include arguments. Empty if there is none."""
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
    """Call a function of a C library; tensors are passed as pointers, None as a null pointer.

    Other values are int64 or double. All calls of a function must have the same argument types.
    """
    function = cast(Any, kernel)
    if function.argtypes is None:
        # declared types halve the call overhead
        function.argtypes = [_ctype_of(value) for value in values]
    kernel(*(v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values))


def _ctype_of(value: torch.Tensor | float | None) -> type:
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p
    return ctypes.c_int64 if isinstance(value, int) else ctypes.c_float


def random_tensors() -> Callable[..., torch.Tensor]:
    """Return a function like `torch.randn` that makes the same float32 tensors in every process."""
    generator = torch.Generator().manual_seed(0)
    return functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")


def resemble(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether a kernel's result equals that of torch, up to rounding."""
    return torch.allclose(actual, expected, atol=_TOLERANCE, rtol=_TOLERANCE)
