"""What installs an extra of this raybatch, and that no text names a package of an index instead.

The `raybatch` of PyPI is another project's, so its bare name must follow no `pip install`.
"""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from raybatch.installation import install_command, torch_command
from tests.distributions import DISTRIBUTIONS

ROOT = Path(__file__).parent.parent
IN_A_CLONE = "in a clone of raybatch, pip install '.[vllm]'"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "https://example.com/raybatch.git"
# " @ " says where a package comes from, so that no index is asked
BY_NAME = re.compile(
    r"(?:pip3?[\", ]+install|pipx (?:install|run)|(?:uv|poetry) add|uv tool|uv run --with|uvx|"
    r"\"pip\": \[)"
    r"(?:[^\n`|&;]|\\\n)*?[ '\"]raybatch(?! @ |\[[^\]]*\] @ |[\w/-]|\.\w)"
)
EXTRA_BY_NAME = re.compile(r"(?<![\w/])raybatch\[(?=[\w{])(?![^\]]*\] @ )")
# an extra made of others, which no index is asked for
SELF_REFERENCE = re.compile(r'^  "raybatch\[.*$', re.MULTILINE)


@pytest.fixture(autouse=True)
def activated(monkeypatch):
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that makes a `direct_url.json` that of the only raybatch here."""
    site = tmp_path / "site"
    info = site / "raybatch-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raybatch\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "path", [str(site)])

    def install(record, *, installer="pip"):
        text = record if isinstance(record, str) else json.dumps(record)
        (info / "direct_url.json").write_text(text)
        (info / "INSTALLER").write_text(f"{installer}\n")

    return install


@pytest.fixture
def clone(tmp_path):
    """A folder with a blank in its name."""
    path = tmp_path / "my clone"
    path.mkdir()
    return path


def test_an_editable_clone_is_named_by_its_path(installed, clone):
    installed({"url": clone.as_uri(), "dir_info": {"editable": True}})
    assert shlex.split(install_command("vllm")) == ["pip", "install", "-e", f"{clone}[vllm]"]


def test_a_clone_is_named_by_its_path(installed, clone):
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert install_command("s3") == f"pip install '{clone}[s3]'"


def test_a_wheel_is_named_by_its_url(installed, clone):
    wheel = clone / "raybatch-0.1.0-py3-none-any.whl"
    wheel.touch()
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert install_command("vllm") == f"pip install 'raybatch[vllm] @ {wheel.as_uri()}'"
    assert "my%20clone" in install_command("vllm")


def test_a_repository_is_named_with_the_commit_that_runs(installed):
    vcs = {"vcs": "git", "requested_revision": "main", "commit_id": COMMIT}
    installed({"url": REPOSITORY, "vcs_info": vcs})
    source = f"raybatch[vllm] @ git+{REPOSITORY}@{COMMIT}"
    assert install_command("vllm") == f"pip install '{source}'"
    installed({"url": REPOSITORY, "vcs_info": vcs, "subdirectory": "python"})
    assert install_command("vllm") == f"pip install '{source}#subdirectory=python'"


def test_what_uv_has_installed_is_extended_by_uv(installed, clone):
    installed({"url": clone.as_uri(), "dir_info": {"editable": True}}, installer="uv")
    assert install_command("cpu") == f"uv pip install -e '{clone}[cpu]'"


@pytest.mark.parametrize(
    "record",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        '{"url": 1, "dir_info": {}}',
        '{"url": "file:///not/there", "dir_info": {"editable": true}}',
        '{"url": "file:///not/there/raybatch-0.1.0-py3-none-any.whl", "archive_info": {}}',
        '{"url": "file:///a%00b", "dir_info": {}}',
        '{"url": "file:///", "dir_info": null}',
        '{"url": "https://example.com/raybatch.git", "vcs_info": {"vcs": "git"}}',
    ],
)
def test_a_source_that_is_unknown_or_gone_is_a_clone(installed, record):
    installed(record)
    assert install_command("vllm") == IN_A_CLONE


def test_an_installation_without_a_record_comes_from_a_clone(installed):
    assert install_command("vllm") == IN_A_CLONE


def test_a_package_that_is_not_installed_comes_from_a_clone(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert install_command("vllm") == IN_A_CLONE


def test_what_a_build_left_in_a_clone_hides_no_record(installed, clone, monkeypatch):
    installed({"url": clone.as_uri(), "dir_info": {}})
    left = clone / "raybatch.egg-info"
    left.mkdir()
    (left / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: raybatch\nVersion: 0.1.0\n")
    monkeypatch.setattr(sys, "path", [str(clone), *sys.path])
    assert install_command("cpu") == f"pip install '{clone}[cpu]'"


@pytest.mark.parametrize(
    "url",
    [
        "https://me:hunter2@example.com/raybatch.git",
        "https://hunter2@example.com/raybatch.git",
        "https://example.com/raybatch.git?token=hunter2",
    ],
)
def test_credentials_of_a_url_are_not_printed(installed, url):
    installed({"url": url, "vcs_info": {"vcs": "git", "commit_id": COMMIT}})
    assert install_command("vllm") == IN_A_CLONE


def test_an_environment_that_is_not_activated_is_named(installed, clone, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/my env/bin/python")
    monkeypatch.setattr(sys, "prefix", "/my env")
    monkeypatch.delenv("VIRTUAL_ENV")
    installed({"url": clone.as_uri(), "dir_info": {}})
    assert install_command("s3") == f"'/my env/bin/python' -m pip install '{clone}[s3]'"
    installed({"url": clone.as_uri(), "dir_info": {}}, installer="uv")
    expected = f"uv pip install --python '/my env/bin/python' '{clone}[s3]'"
    assert install_command("s3") == expected
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert install_command("s3") == f"uv pip install '{clone}[s3]'"


def test_torch_has_two_extras(installed, clone):
    installed({"url": clone.as_uri(), "dir_info": {}})
    expected = f"pip install '{clone}[cpu]', with gpu in place of cpu on a host with GPUs"
    assert torch_command() == expected


def texts_of_the_project():
    """Yield path and text of the files that belong to the project."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    if not paths:  # a copy without its history
        hidden = (path for path in ROOT.rglob("*") if path.is_file())
        paths = [p for p in hidden if not any(n[0] == "." for n in p.relative_to(ROOT).parts)]
    for path in paths:
        try:
            yield path, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):  # no text, or deleted and not committed
            continue


def test_no_text_installs_the_package_that_an_index_has():
    found = []
    for path, text in texts_of_the_project():
        # the examples below are what is looked for
        if path == Path(__file__):
            continue
        text = SELF_REFERENCE.sub("", text) if path.name == "pyproject.toml" else text
        for pattern in (BY_NAME, EXTRA_BY_NAME):
            found += [f"{path.relative_to(ROOT)}: {m[0]}" for m in pattern.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install raybatch",
        "python -m pip install --upgrade 'raybatch'",
        "pip install raybatch==0.1.0",
        'uv pip install -c constraints.txt "raybatch>=0.1"',
        "uv add raybatch",
        "pipx install raybatch.",
        "pipx run raybatch",
        "pip install --upgrade \\\n  raybatch",
        '["pip", "install", "raybatch"]',
        'runtime_env={"pip": ["raybatch"]}',
        "poetry add raybatch",
        "uv tool run raybatch",
        "uv run --with raybatch raybatch demo",
        "Install `raybatch[vllm]`",
        "pip install 'raybatch[vllm]'",
        "'raybatch[cpu]', or",
    ],
)
def test_a_bare_name_is_found(line):
    assert BY_NAME.search(line) or EXTRA_BY_NAME.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install '.[vllm]' && raybatch --version",
        "in a clone of raybatch, pip install '.[vllm]'",
        "pip install 'raybatch[vllm] @ file:///dist/raybatch-0.1.0-py3-none-any.whl'",
        "uv add 'raybatch @ git+https://example.com/raybatch.git'",
        "pip install 'dist/raybatch-0.1.0-py3-none-any.whl[cpu]'",
        "pip install -e '/src/raybatch[cpu]'",
        "pip install raybatch-0.1.0-py3-none-any.whl",
    ],
)
def test_what_names_its_source_is_no_bare_name(line):
    assert not BY_NAME.search(line)
    assert not EXTRA_BY_NAME.search(line)


# of modules that are called otherwise than their package, or that another package brings along
PACKAGES = {
    "PIL": "vllm",
    "aiohttp": "ray",
    "annotated_types": "pydantic",
    "huggingface_hub": "huggingface-hub",
    "lance": "pylance",
    "opentelemetry": "opentelemetry-sdk",
    "psutil": "vllm",
    "pydantic_core": "pydantic",
    "referencing": "jsonschema",
    "starlette": "ray",
    "yaml": "pyyaml",
}
# installed from this repository
OWN = {name.replace("-", "_") for name in DISTRIBUTIONS}


def imported(folder):
    """Yield the top names of all modules that the code of a folder imports."""
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (each.name.partition(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield str(node.module).partition(".")[0]


def requirements(folder="."):
    """Return what a project of this tree requires, by extra; "" has those of every installation."""
    path = ROOT / folder / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    required = {"": project["dependencies"], **project.get("optional-dependencies", {})}
    required.pop("dev", None)
    return {extra: {Requirement(line).name for line in lines} for extra, lines in required.items()}


@pytest.mark.parametrize("folder", DISTRIBUTIONS)
def test_every_package_that_is_imported_is_asked_for(folder):
    names = {PACKAGES.get(name, name) for name in set(imported(folder)) - OWN}
    required = requirements()
    if folder != "raybatch":
        # torch is there where engines run, by an extra of raybatch
        of_engines = required["cpu"] if folder == "raybatch-extensions" else set()
        own = {f"its {extra}": names for extra, names in requirements(folder).items()}
        required = {"": required[""] | of_engines, **own}
    assert names - set(sys.stdlib_module_names) <= set().union(*required.values())


def test_some_message_names_each_extra():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "raybatch").rglob("*.py")]
    named = re.findall(r"install_command\(['\"](\w+)['\"]\)", "".join(texts))
    # who has a dataset of Hugging Face has its library
    assert set(named) == set(requirements()) - {"", "hf"}


def test_what_extensions_of_engines_log_follows_the_level_of_raybatch():
    """Workers set the level of the logger `raybatch` alone."""
    logged = re.compile(r"getLogger\(([^)]*)\)")
    found = {
        name
        for path in (ROOT / "raybatch-extensions").rglob("*.py")
        for name in logged.findall(path.read_text(encoding="utf-8"))
    }
    assert found
    assert [name for name in found if not name.startswith('"raybatch.')] == []
