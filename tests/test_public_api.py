"""What `import raybatch` offers, and what it does not load."""

import inspect
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import raybatch

ROOT = Path(__file__).parent.parent
HEAVY = ("ray", "torch", "transformers", "vllm", "pandas", "pyarrow", "numpy", "rich", "typer")
PUBLIC = [name for name in raybatch.__all__ if not name.startswith("__")]


def test_exported_names_are_sorted_and_unique():
    assert raybatch.__all__ == sorted(set(raybatch.__all__))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_resolves_and_has_a_docstring(name):
    assert getattr(raybatch, name).__doc__.strip()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_methods_have_docstrings(name):
    methods = inspect.getmembers(getattr(raybatch, name), inspect.isroutine)
    own = [m for m in methods if getattr(m[1], "__module__", None) in raybatch._HOMES.values()]
    assert [n for n, m in own if not n.startswith("_") and not inspect.getdoc(m)] == []


def test_dir_lists_the_public_names():
    assert set(raybatch.__all__) <= set(dir(raybatch))


def test_every_lazy_name_is_public():
    assert set(raybatch._HOMES) <= set(raybatch.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LLMStages'"):
        _ = raybatch.LLMStages


def test_import_loads_no_heavy_package():
    code = f"import sys, raybatch; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_version_is_that_of_the_project():
    try:
        metadata.version("raybatch")
    except metadata.PackageNotFoundError:
        pytest.skip("raybatch is not installed in this environment")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert raybatch.__version__ == project["version"]


def test_package_is_marked_as_typed():
    assert (Path(raybatch.__file__).parent / "py.typed").is_file()
