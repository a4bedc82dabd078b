"""raybatch-lab as an installation has it, whether or not it is one here."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3] / "lab" / "pyproject.toml"


@pytest.fixture
def lab(monkeypatch, tmp_path_factory):
    """The entry points of this tree, in place of those of any installed raybatch-lab."""
    folder = tmp_path_factory.mktemp("installed")
    project = tomllib.loads(PROJECT.read_text())["project"]
    info = folder / "raybatch_lab-0.1.0.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: raybatch-lab\nVersion: 0.1.0\n"
    )
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    info.joinpath("entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(folder)


@pytest.fixture
def no_lab(monkeypatch):
    """An environment without raybatch-lab."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
