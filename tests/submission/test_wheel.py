"""The wheel that goes to a cluster: the code that runs here, without what it requires."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import raybatch
from raybatch.errors import ConfigError
from raybatch.submission.bundle import pack_wheel, repack_wheel

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


def install(wheel, folder):
    """Install as Ray does: with requirements, into a folder; there is no index to ask."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-compile", "--quiet"]
    done = subprocess.run(
        [*pip, str(wheel), f"--target={folder}"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def contents(wheel):
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_the_files_of_the_package(package, out):
    names = [name for name in contents(pack_wheel(package, out)) if ".dist-info/" not in name]
    assert sorted(names) == ["oak/__init__.py", "oak/leaf.txt"]


def test_wheel_of_this_package_installs_alone_and_is_imported_from_there(out, tmp_path):
    target = tmp_path / "target"
    install(pack_wheel(PACKAGE, out), target)
    code = "import raybatch; from raybatch.records.types import Sampling; print(raybatch.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(target / "raybatch" / "__init__.py"), done.stderr


def test_installed_package_packs_to_the_same_wheel_as_its_source_tree(package, out, tmp_path):
    from_tree = pack_wheel(package, out)
    install(from_tree, tmp_path / "target")
    again = tmp_path / "again"
    again.mkdir()
    from_installed = pack_wheel(tmp_path / "target" / "oak", again)
    assert (from_installed.name, from_installed.read_bytes()) == (
        from_tree.name,
        from_tree.read_bytes(),
    )


def test_changed_code_has_another_name(package, out):
    before = pack_wheel(package, out).name
    (package / "leaf.txt").write_text("lead")
    assert pack_wheel(package, out).name != before


def test_given_wheel_loses_its_requirements(out, tmp_path):
    wheel = repack_wheel(write_wheel(tmp_path / "oak-1.5-py3-none-any.whl"), out)
    about = contents(wheel)["oak-1.5.dist-info/METADATA"].decode()
    assert about == "Metadata-Version: 2.1\nName: oak\nVersion: 1.5\n"


def test_given_wheel_keeps_its_code_and_installs(out, tmp_path):
    wheel = repack_wheel(write_wheel(tmp_path / "oak-1.5-py3-none-any.whl"), out)
    install(wheel, tmp_path / "target")
    assert (tmp_path / "target" / "oak" / "__init__.py").read_text() == "COLOUR = 'green'\n"


def test_record_names_every_file(package, out):
    inside = contents(pack_wheel(package, out))
    (record,) = (data for name, data in inside.items() if name.endswith("/RECORD"))
    assert {line.split(",")[0] for line in record.decode().splitlines()} == set(inside)


def test_missing_wheel_is_named(out, tmp_path):
    with pytest.raises(ConfigError, match=r"--wheel .*none\.whl: not a wheel that can be read"):
        repack_wheel(tmp_path / "none.whl", out)


def test_zip_that_is_no_wheel_is_refused(out, tmp_path):
    path = tmp_path / "oak-1.5-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(ConfigError, match="not a wheel; build one"):
        repack_wheel(path, out)


def test_wheel_of_one_platform_is_refused(out, tmp_path):
    path = write_wheel(tmp_path / "oak-1.5-cp311-cp311-linux_x86_64.whl")
    with pytest.raises(ConfigError, match="put it into the image"):
        repack_wheel(path, out)


def test_package_without_a_folder_says_what_to_give(out, tmp_path):
    with pytest.raises(ConfigError, match="--wheel PATH"):
        pack_wheel(tmp_path / "packages.zip" / "oak", out)
