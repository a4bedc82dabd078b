import json
import subprocess
import sys

import pytest

SOURCE = """def clamp(value, low, high):
    if value < low:
        return low
    while value > high:
        value = high
    return value
"""
TESTS = """from grown.clamp import clamp


def test_red():
    assert clamp(1, 2, 3) == 1


def test_low():
    assert clamp(1, 2, 3) == 2


def test_high():
    assert clamp(4, 2, 3) == 3
"""
BUGS = {
    "killed": ("        return low", "        return high"),
    "endless": ("        value = high", "        pass"),
    "survived": ("    if value < low:", "    if value <= low:"),
    "gone": ("    if low > high:", "    if low >= high:"),
    "left-out": ("    return value", "    return +value"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A package with one function, its tests, and a list of bugs."""
    folder = tmp_path_factory.mktemp("planted")
    tree = folder / "tree"
    (tree / "grown").mkdir(parents=True)
    (tree / "grown" / "clamp.py").write_text(SOURCE)
    (tree / "test_clamp.py").write_text(TESTS)
    marks = '["exhaustive", "gpu", "vllm", "slow", "ray"]'
    options = f"[tool.pytest.ini_options]\nmarkers = {marks}\ntimeout = 5\n"
    (tree / "pyproject.toml").write_text(options)
    bugs = [
        {
            "name": name,
            "area": "clamp",
            "file": "grown/clamp.py",
            "function": "clamp",
            "kind": "any",
            "anchor": [anchor],
            "replacement": [replacement],
            **({"left_out": "the same number"} if name == "left-out" else {}),
        }
        for name, (anchor, replacement) in BUGS.items()
    ]
    area = {"name": "clamp", "files": ["grown/*.py"], "first": ["test_clamp.py", "test_gone.py"]}
    message = {"heavy": ["hypothesis"], "areas": [area], "bugs": bugs}
    (folder / "bugs.json").write_text(json.dumps(message))
    return folder


def run(folder, *options):
    command = [sys.executable, "-m", "raybatch_lab.planted_bugs"]
    places = ["--list", "bugs.json", "--tree", "tree"]
    done = subprocess.run(
        [*command, *places, "run", "--test-timeout-s", "0.5", "--out", "out.json", *options],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def first(folder):
    return run(folder)


def test_each_bug_is_told_by_who_found_it(first):
    reported, found = first
    outcomes = {name: (one["outcome"], one.get("by")) for name, one in found["bugs"].items()}
    assert outcomes == {
        "killed": ("killed", "test_clamp.py::test_low"),
        "endless": ("killed", "test_clamp.py::test_high"),
        "survived": ("survived", None),
        "gone": ("anchor gone", None),
        "left-out": ("left out", None),
    }
    assert found["summary"] == {
        "clamp": {"anchor gone": 1, "killed": 2, "left out": 1, "survived": 1}
    }
    assert "all                        2           1           1           1" in reported


def test_a_test_that_fails_without_a_bug_finds_none(first):
    _, found = first
    assert found["clean"]["clamp 0"]["red"] == ["test_clamp.py::test_red"]


def test_the_tree_itself_stays_as_it_was(folder, first):
    assert (folder / "tree" / "grown" / "clamp.py").read_text() == SOURCE


def test_what_is_known_is_not_asked_again_but_survivors_are_on_demand(folder, first):
    with (folder / "tree" / "test_clamp.py").open("a") as file:
        file.write("\n\ndef test_border():\n    assert isinstance(clamp(2.0, 2, 3), float)\n")
    again, _ = run(folder)
    assert again.startswith("area ")
    reported, found = run(folder, "--anew", "--bugs", "surv*")
    assert found["bugs"]["survived"]["by"] == "test_clamp.py::test_border"
    assert found["summary"]["clamp"]["killed"] == 3
    assert reported.splitlines()[0].startswith("survived           killed")
