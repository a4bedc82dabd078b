"""The commands of other distributions of this repository, installed and not."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from raybatch.cli.app import ADDED_COMMANDS, TwoWords, add_commands, app
from raybatch.errors import MissingDependency
from raybatch.installation import LAB, OPENAI, SUBMIT, TABLES, installed_commands
from tests.cli.test_cli import run_main
from tests.distributions import DISTRIBUTIONS

ROOT = Path(__file__).parents[2]
GROUP = "raybatch.commands"


@pytest.fixture
def alone():
    """A command line without other distributions."""
    app, bench = typer.Typer(), typer.Typer(cls=TwoWords)
    app.add_typer(bench, name="bench")
    add_commands(app, bench, {}, (SUBMIT, OPENAI, TABLES, LAB))
    return app


@pytest.fixture
def entry_points(monkeypatch):
    """Return a function that makes these the commands that are installed."""

    def install(**points):
        made = [importlib.metadata.EntryPoint(name, at, GROUP) for name, at in points.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: made)

    return install


@pytest.mark.parametrize("path", ADDED_COMMANDS)
def test_a_missing_command_says_what_to_install(path, alone):
    result = CliRunner().invoke(alone, [*path.split(), "demo", "--rows", "3"])
    assert isinstance(result.exception, MissingDependency), result.output
    name, place = "raybatch-openai", "./raybatch-openai"
    if path.startswith("bench "):
        name, place = "raybatch-lab", "./raybatch-extensions -e ./lab"
    elif path in ("submit", "manifest", "check"):
        name, place = "raybatch-submit", "./raybatch-submit"
    elif path == "publish":
        name, place = "raybatch-tables", "'./raybatch-tables[all]'"
    assert str(result.exception).startswith(f"raybatch {path} needs {name}, ")
    assert str(result.exception).endswith(f"pip install -e {place}")


@pytest.mark.parametrize("path", ADDED_COMMANDS)
def test_a_missing_command_is_listed(path, alone):
    group = ["bench"] if path.startswith("bench ") else []
    listed = CliRunner().invoke(alone, [*group, "--help"]).output
    assert path.removeprefix("bench ") in listed
    assert "pip install" in CliRunner().invoke(alone, [*path.split(), "--help"]).output


def test_a_batch_file_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("raybatch.cli.app._INSTALLED_COMMANDS", {})
    assert run_main(monkeypatch, "run", "in.jsonl", "--openai", "-o", "out.jsonl") == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: raybatch run --openai needs raybatch-openai, ")
    assert stderr.endswith("pip install -e ./raybatch-openai\n")


def test_every_added_command_is_an_entry_point_of_this_tree(entry_points):
    points = {}
    for folder in ("lab", *DISTRIBUTIONS[1:]):
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        points |= project.get("entry-points", {}).get(GROUP, {})
    entry_points(**points)
    assert set(points) == {path.replace(" ", "-") for path in ADDED_COMMANDS} | {"run-openai"}
    assert set(installed_commands()) == set(points)


def test_a_command_of_another_version_is_left_out(entry_points):
    entry_points(gone="no_such_package:run", older="raybatch.errors:run", fine="json:dumps")
    assert list(installed_commands()) == ["fine"]


@pytest.mark.parametrize("path", ADDED_COMMANDS)
def test_an_installed_command_has_its_help(path):
    group = ["bench"] if path.startswith("bench ") else []
    help_text = ADDED_COMMANDS[path][1]
    assert help_text[:30] in CliRunner().invoke(app, [*group, "--help"]).output
    output = CliRunner().invoke(app, [*path.split(), "--help"]).output
    of_commands = ("--out", "--gpu-bytes", "--folder", "to-batch", "delta:", "--address")
    assert any(text in output for text in of_commands)
