"""Compiled libraries on disk: keyed by their inputs, and loaded only from this user."""

import _ctypes
import os
import shutil
import subprocess
import threading
import time

import pytest

from raybatch.kernels.native import compiler as library_store
from raybatch.kernels.native.compiler import compile_library, find_or_build, library_name

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Libraries whose functions `answer` return different numbers."""
    folder, made = tmp_path_factory.mktemp("built"), {}
    for answer in (41, 42):
        source, made[answer] = folder / f"{answer}.c", folder / f"{answer}.so"
        source.write_text(f"int answer(void) {{ return {answer}; }}\n")
        command = [COMPILER, "-shared", "-fPIC", str(source), "-o", str(made[answer])]
        subprocess.run(command, check=True)
    return made


def answer_of(library):
    """Call a library and unload it, so that the next load reads the file."""
    answer = library.answer()
    _ctypes.dlclose(library._handle)
    return answer


class Builder:
    """Builds a library, and counts the builds."""

    def __init__(self, library):
        self.library, self.count = library, 0

    def __call__(self, path):
        self.count += 1
        time.sleep(0.02)
        shutil.copyfile(self.library, path)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def builder(libraries):
    return Builder(libraries[41])


@pytest.fixture
def other(libraries):
    """Build another library under the same name."""
    return Builder(libraries[42])


def test_a_cached_library_is_not_built_again(folder, builder, other):
    assert [answer_of(find_or_build(folder, "a.so", b)) for b in (builder, other)] == [41, 41]
    assert (builder.count, other.count) == (1, 0)
    assert {path.name for path in folder.iterdir()} == {"a.so", ".lock"}


def test_each_name_has_its_own_library(folder, builder, other):
    found = [find_or_build(folder, *one) for one in (("a.so", builder), ("b.so", other))]
    assert [answer_of(library) for library in found] == [41, 42]


@pytest.mark.parametrize("content", [b"", b"no library", None], ids=["empty", "text", "cut"])
def test_a_damaged_library_is_built_again(folder, builder, content):
    folder.mkdir(mode=0o700, parents=True)
    content = builder.library.read_bytes()[:200] if content is None else content
    (folder / "a.so").write_bytes(content)
    assert answer_of(find_or_build(folder, "a.so", builder)) == 41
    assert (folder / "a.so").read_bytes() == builder.library.read_bytes()


def test_processes_that_start_at_once_build_once(folder, builder):
    start, found = threading.Barrier(4), []

    def ask():
        start.wait()
        found.append(answer_of(find_or_build(folder, "a.so", builder)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [41] * 4
    assert builder.count == 1


def test_a_failed_build_leaves_no_library(folder, builder):
    def fail(path):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        find_or_build(folder, "a.so", fail)
    assert answer_of(find_or_build(folder, "a.so", builder)) == 41


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_a_folder_that_is_made_is_private_under_any_umask(folder, builder, other, umask):
    before = os.umask(umask)
    try:
        assert [answer_of(find_or_build(folder, "a.so", b)) for b in (builder, other)] == [41, 41]
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


def prepared(folder, library, mode=0o700):
    """Make a folder with a library of another user."""
    folder.mkdir(parents=True)
    folder.chmod(mode)
    shutil.copyfile(library, folder / "a.so")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_into_is_not_used(folder, builder, libraries, mode):
    prepared(folder, libraries[42], mode)
    assert answer_of(find_or_build(folder, "a.so", builder)) == 41
    assert (folder / "a.so").read_bytes() == libraries[42].read_bytes()


def test_a_folder_of_another_user_is_not_used(folder, builder, libraries, monkeypatch):
    prepared(folder, libraries[42])
    if os.getuid() == 0:
        os.chown(folder, 4711, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert answer_of(find_or_build(folder, "a.so", builder)) == 41


def test_a_link_to_a_folder_is_not_followed(folder, builder, libraries, tmp_path):
    prepared(tmp_path / "theirs", libraries[42])
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "theirs")
    assert answer_of(find_or_build(folder, "a.so", builder)) == 41


def test_a_host_without_a_place_for_libraries_builds_each_time(tmp_path, builder):
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert answer_of(find_or_build(tmp_path / "file" / "kernels", "a.so", builder)) == 41
    assert builder.count == 2


def test_a_read_only_folder_still_gives_a_library(folder, builder):
    folder.mkdir(mode=0o700, parents=True)
    # a folder that is not empty cannot be replaced
    (folder / "a.so" / "in").mkdir(parents=True)
    (folder / ".lock").mkdir()
    assert answer_of(find_or_build(folder, "a.so", builder)) == 41


def test_without_a_name_nothing_is_cached(folder, builder):
    assert answer_of(find_or_build(folder, None, builder)) == 41
    assert not folder.exists()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "kernel.c"
    path.write_text("int x;")
    return path


def cpu_info(*lines):
    """Return the text of /proc/cpuinfo of two cores."""
    core = "".join(f"{line}\n" for line in lines)
    return f"processor : 0\n{core}\nprocessor : 1\n{core}"


def test_a_name_depends_on_the_command_the_files_and_the_processor(source, tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(library_store, "_CPU_INFO", info)
    info.write_text(cpu_info("model name : A", "flags : fpu avx2", "cpu MHz : 1000"))
    name = library_name(["cc", "-O3"], [source])
    assert name == library_name(["cc", "-O3"], [source])
    changed = [library_name(["cc", "-O2"], [source]), library_name(["cc-", "O3"], [source])]
    info.write_text(cpu_info("model name : A", "flags : fpu avx2 avx512f", "cpu MHz : 1000"))
    changed.append(library_name(["cc", "-O3"], [source]))
    info.write_text(cpu_info("model name : B", "flags : fpu avx2", "cpu MHz : 1000"))
    changed.append(library_name(["cc", "-O3"], [source]))
    info.write_text(cpu_info("model name : A", "flags : fpu avx2", "cpu MHz : 2000"))
    assert name == library_name(["cc", "-O3"], [source])
    source.write_text("int y;")
    changed.append(library_name(["cc", "-O3"], [source]))
    assert len({name, *changed}) == 6


@pytest.mark.parametrize("text", [None, "", "processor : 0\nBogoMIPS : 50\n"])
def test_a_host_of_unknown_processor_caches_nothing(source, tmp_path, monkeypatch, text):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(library_store, "_CPU_INFO", info)
    if text is not None:
        info.write_text(text)
    assert library_name(["cc"], [source]) is None


def test_a_source_is_compiled_once_on_a_host(tmp_path, monkeypatch):
    calls, compiler = tmp_path / "calls", tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    made = [compile_library("small_ops.c", {}) for _ in range(2)]
    assert None not in made
    assert sum("small_ops.c" in call for call in calls.read_text().splitlines()) == 1
    # other names are another library
    compile_library("small_ops.c", {"sqrtf": "fabsf"})
    assert sum("small_ops.c" in call for call in calls.read_text().splitlines()) == 2


def test_a_missing_compiler_is_logged_once_with_what_to_install(monkeypatch, caplog):
    monkeypatch.setattr(library_store, "_compiler", list)
    library_store._warn_of_no_compiler.cache_clear()
    assert compile_library("linears.c", {}) is compile_library("small_ops.c", {}) is None
    (message,) = caplog.messages
    assert "install" in message
