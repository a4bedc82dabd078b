"""The scripts behind `make demo` and `make test`: which Python, which torch, which versions."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE_VENV, INSTALL_TORCH = ROOT / "scripts" / "make_venv.sh", ROOT / "scripts" / "install_torch.py"
PINS = (ROOT / "constraints.txt").read_text()
PINNED = re.search(r"^torch==(\S+)", PINS, re.MULTILINE)[1]
# a Python that only says what environment it was asked for
PYTHON = f"""#!/bin/sh
if [ "$1" = -m ]; then shift; echo "$(basename "$0") -m $*"; else exec {sys.executable} "$@"; fi
"""
BROKEN = "#!/bin/sh\necho 'not among these versions' >&2\nexit 127\n"
FAKE_PIP = """
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    print("pip", *sys.argv[1:], file=calls)
if "--dry-run" in sys.argv:
    names = ["torch", *os.environ["BRINGS"].split()]
    print(json.dumps({"install": [{"metadata": {"name": name}} for name in names]}))
"""


def make_program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path):
    """A PATH with what the scripts call, and no Python yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "env", "sh", "basename", "cat", "tail"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def make_venv(path, *arguments):
    command = [MAKE_VENV, "an env", *arguments]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("programs", "taken"),
    [
        ({"python3.11": PYTHON, "python3.13": PYTHON, "python3": PYTHON}, "python3.13"),
        ({"python3.14": BROKEN, "python3.12": PYTHON}, "python3.12"),
        ({"python3": PYTHON}, "python3"),
    ],
)
def test_the_newest_python_that_works_makes_the_environment(path, programs, taken):
    for name, text in programs.items():
        make_program(path, name, text)
    done = make_venv(path)
    assert done.returncode == 0, done.stderr
    asked = done.stdout.replace("--system-site-packages ", "")
    assert asked == f"{taken} -m venv an env\n"
    assert "an env: made with" in done.stderr


def test_a_python_that_is_named_is_the_one_that_is_tried(path):
    make_program(path, "python3.12", PYTHON)
    make_program(path, "mine", BROKEN)
    done = make_venv(path, "mine")
    assert done.returncode == 1
    assert "mine: not among these versions" in done.stderr


def test_a_host_without_a_python_that_fits_hears_what_to_install(path):
    done = make_venv(path)
    assert done.returncode == 1
    assert "needs CPython 3.11 to 3.14" in done.stderr
    assert "apt install python3 python3-venv" in done.stderr


@pytest.fixture
def install(tmp_path, path):
    """Run install_torch.py beside a pip, a uv and a torch that are none."""
    modules, out, calls = tmp_path / "modules", tmp_path / "out.txt", tmp_path / "calls"
    modules.mkdir()
    (modules / "pip.py").write_text(FAKE_PIP)

    def run(*options, here=None, brings="", uv=None, **variables):
        dist = modules / "torch-0.dist-info"
        if here:
            dist.mkdir()
            (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {here}\n")
        if uv is not None:
            make_program(path, "uv", f'#!/bin/sh\necho "uv $*" >> {calls}\nexit {uv}\n')
        environment = {"PATH": str(path), "PYTHONPATH": str(modules), "CALLS": str(calls)}
        # -S: without the torch of the environment that the tests run in
        done = subprocess.run(
            [sys.executable, "-S", INSTALL_TORCH, out, *options],
            env=environment | {"BRINGS": brings} | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        asked = calls.read_text().splitlines() if calls.exists() else []
        return asked, done.stderr, out.read_text()

    return run


@pytest.mark.parametrize(("options", "here"), [((), "2.12.1+cu130"), (("--pinned",), PINNED)])
def test_a_torch_that_fits_is_kept(install, options, here):
    asked, _, pins = install(*options, here=here)
    assert asked == []
    kept = re.findall(r"^(torch|triton|nvidia-cublas)==", pins, re.MULTILINE)
    # what comes next must not ask for another one
    assert kept == ([] if here != PINNED else ["nvidia-cublas", "torch", "triton"])
    assert "pyarrow==" in pins


@pytest.mark.parametrize(
    ("options", "here"), [((), "2.9.1"), (("--pinned",), "2.12.1"), ((), None)]
)
def test_a_torch_that_does_not_fit_is_replaced(install, options, here):
    asked, _, pins = install(*options, here=here)
    assert [f"torch=={PINNED}" in call for call in asked] == [True, True]
    assert pins == PINS


def test_the_small_build_comes_from_uv_where_pip_would_fetch_cuda(install):
    asked, said, _ = install(brings="nvidia-cublas", uv=0)
    assert "--dry-run" in asked[0]
    assert "--torch-backend cpu" in asked[1]
    assert len(asked) == 2
    assert "CUDA" not in said


def test_the_large_build_is_announced_where_no_other_can_be_had(install):
    asked, said, _ = install(brings="nvidia-cublas", uv=2)
    assert asked[-1].startswith("pip install torch==")
    assert "GB to fetch" in said
    assert "TORCH_INDEX=URL" in said


def test_an_index_that_is_named_is_asked_at_once(install):
    asked, _, _ = install(brings="nvidia-cublas", uv=0, TORCH_INDEX="file:///wheels")
    assert len(asked) == 1
    assert "--extra-index-url file:///wheels" in asked[0]


def test_pins_are_single_versions_for_what_the_project_asks_for():
    names = re.findall(r"^([a-z0-9-]+)==\S+$", PINS, re.MULTILINE)
    assert len(names) == len(set(names)) == len(PINS.splitlines()) - 1
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(n for e in extras if e != "vllm" for n in extras[e])]
    wanted = {re.match(r"[A-Za-z0-9-]+", need)[0].lower() for need in asked} - {"raybatch"}
    assert wanted - set(names) == set()
