"""What a visitor of the repository finds beside the code says what the code says."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]


def test_citation_and_changelog_have_the_version_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert f"## [{VERSION}] - {citation['date-released']}" in CHANGELOG


@pytest.mark.parametrize("section", SECTIONS, ids=[each.split("\n")[0] for each in SECTIONS])
def test_a_version_of_the_changelog_has_at_most_ten_lines(section: str):
    assert len(re.findall(r"^- ", section, flags=re.MULTILINE)) <= 10


@pytest.mark.parametrize(
    ("name", "job", "command"), [("ci", "ci", ".ci/run"), ("nightly", "all-tests", "make test-all")]
)
def test_workflows_run_what_a_change_must_pass_and_at_night_all_tests(name, job, command):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert {"run": command} in workflow["jobs"][job]["steps"]


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem
)
def test_an_issue_form_is_one_that_github_takes(form: Path):
    found = yaml.safe_load(form.read_text())
    assert found["name"]
    assert found["description"]
    assert found["body"]
    for part in found["body"]:
        assert part["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert part["attributes"]["label"]


def test_hooks_of_commits_use_the_tools_of_the_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    for hook in hooks:
        tool = hook["entry"].split()[0]
        assert tool == "make" or tool.startswith(".venv/bin/")
