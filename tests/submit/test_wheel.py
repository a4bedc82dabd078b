"""The code that goes to a cluster: what runs here or is in a wheel, without what it requires."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

import raybatch
from raybatch.errors import ConfigError
from raybatch_submit.bundle import folders_of_distributions, folders_of_package, folders_of_wheel

PACKAGE = Path(raybatch.__file__).parent


@pytest.fixture
def package(tmp_path):
    """A small package with a cache of compiled files."""
    root = tmp_path / "tree" / "oak"
    (root / "__pycache__").mkdir(parents=True)
    (root / "__init__.py").write_text("COLOUR = 'green'\n")
    (root / "leaf.txt").write_text("leaf")
    (root / "__pycache__" / "x.pyc").write_text("compiled")
    return root


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def write_wheel(path, *, requires="ray"):
    """Write a wheel as a build backend does, with a requirement."""
    about = f"Metadata-Version: 2.1\nName: oak\nVersion: 1.5\nRequires-Dist: {requires}\n\nText\n"
    with ZipFile(path, "w") as archive:
        archive.writestr("oak/__init__.py", "COLOUR = 'green'\n")
        archive.writestr("oak-1.5.dist-info/METADATA", about)
        archive.writestr("oak-1.5.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("oak-1.5.dist-info/RECORD", "")
    return path


def uri_of(folder):
    """Return the name that Ray gives a folder of `py_modules`, by its content."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    return packaging.get_uri_for_directory(
        str(folder), include_gitignore=True, excludes=["__pycache__"]
    )


def test_the_code_and_its_version_are_folders(package, out):
    code, about = folders_of_package(package, out)
    assert (code, about.name) == (package, f"oak-{raybatch.__version__}.dist-info")


def test_hosts_import_this_package_in_this_version(out, tmp_path):
    code, about = folders_of_package(PACKAGE, out)
    imported = "import raybatch; from raybatch.records.types import Sampling"
    shown = "print(raybatch.__file__, raybatch.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", f"{imported}; {shown}"],
        # Ray puts the parents of all folders there
        env={"PYTHONPATH": f"{about.parent}:{code.parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    expected = f"{PACKAGE / '__init__.py'} {raybatch.__version__}"
    assert done.stdout.strip() == expected, done.stderr


def sent(about):
    """Return the version and the entry points of a distribution in a folder that Ray unpacks."""
    # Ray puts the parents of both folders on the path
    name = about.name.partition("-")[0]
    (found,) = metadata.distributions(name=name, path=[str(about.parent)])
    assert found.version == metadata.version(name)
    groups = ("raybatch.commands", "raybatch.tables")
    points = [point for point in found.entry_points if point.group not in groups]
    return {(point.group, point.name): point.load() for point in points}


def test_the_distribution_of_a_backend_is_sent_with_its_entry_points(out):
    code, about, *_ = folders_of_distributions("openai", out)
    assert (code / "endpoint" / "__init__.py").is_file()
    assert sent(about)["raybatch.backends", "openai"].kind == "openai"


def test_extensions_are_sent_with_their_entry_points(out):
    code, about = folders_of_distributions("native", out)
    assert (code / "sharing" / "library.py").is_file()
    names = {("raybatch.engine_extensions", "tp_groups"), ("raybatch.sharing", "sharing")}
    names |= {("raybatch.pool_extensions", name) for name in ("speculative", "tp_groups")}
    assert names == sent(about).keys()


def test_a_backend_of_this_package_is_sent_with_it_where_there_is_nothing_else(out, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert folders_of_distributions("native", out) == []


def test_compiled_files_do_not_change_what_is_sent(package, out):
    before = uri_of(package)
    (package / "__pycache__" / "x.pyc").write_text("other")
    assert uri_of(package) == before


def test_changed_code_has_another_name(package, out):
    before = uri_of(package)
    (package / "leaf.txt").write_text("lead")
    assert uri_of(package) != before


def test_given_wheel_is_its_folders(out, tmp_path):
    folders = folders_of_wheel(write_wheel(tmp_path / "oak-1.5-py3-none-any.whl"), out)
    assert [folder.name for folder in folders] == ["oak", "oak-1.5.dist-info"]
    assert (out / "oak" / "__init__.py").read_text() == "COLOUR = 'green'\n"


def test_missing_wheel_is_named(out, tmp_path):
    with pytest.raises(ConfigError, match=r"--wheel .*none\.whl: cannot read the wheel"):
        folders_of_wheel(tmp_path / "none.whl", out)


def test_zip_that_is_no_wheel_is_refused(out, tmp_path):
    path = tmp_path / "oak-1.5-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(ConfigError, match="not a wheel; build one"):
        folders_of_wheel(path, out)


def test_wheel_of_one_platform_is_refused(out, tmp_path):
    path = write_wheel(tmp_path / "oak-1.5-cp311-cp311-linux_x86_64.whl")
    with pytest.raises(ConfigError, match="install it in the image"):
        folders_of_wheel(path, out)


def test_package_without_a_folder_says_what_to_give(out, tmp_path):
    with pytest.raises(ConfigError, match="--wheel PATH"):
        folders_of_package(tmp_path / "packages.zip" / "oak", out)
