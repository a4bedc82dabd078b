"""Runs tests in a copy of the tree, each time in a process that has the heavy imports already.

Importing numpy, torch and Ray takes longer than most tests, so one process imports them and every
run is a fork of it. The package itself and its tests are imported again in each.
"""

import contextlib
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["WITHOUT_RAY", "WITH_RAY", "TestRun", "copy_tree", "import_heavy", "run_tests"]

WITH_RAY = "not gpu and not vllm and not slow and not exhaustive"
WITHOUT_RAY = f"{WITH_RAY} and not ray"

_NOT_COPIED = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "results", "build")
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class TestRun:
    """Result of one run of tests.

    Args:
        is_red: a test failed, pytest could not collect tests, or the run timed out.
        failed: tests that failed, and files that could not be collected; with `stop_at_first`
            only the first.
        is_timeout: the run timed out.
        seconds: seconds of the run.
        output: end of the output of pytest.
    """

    is_red: bool
    failed: tuple[str, ...]
    is_timeout: bool
    seconds: float
    output: str


def copy_tree(source: Path, target: Path) -> None:
    """Copy a checkout without its history, caches and build outputs."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)


def import_heavy(names: Iterable[str]) -> None:
    """Import those of the named modules that are installed, so that forked runs need not."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_tests(
    tree: Path,
    tests: Sequence[str],
    *,
    marks: str,
    deselected: Sequence[str] = (),
    stop_at_first: bool = True,
    timeout_s: float = 600.0,
    test_timeout_s: float = 60.0,
) -> TestRun:
    """Run tests of a tree in a separate process.

    Args:
        tree: root of the copy.
        tests: test files and folders below it; missing ones are left out.
        marks: expression of marks that selects tests, as for `pytest -m`.
        deselected: ids of tests that are not run.
        stop_at_first: end the run with the first failure.
        timeout_s: seconds after which the run is killed.
        test_timeout_s: seconds after which a test fails.
    """
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    existing = [test for test in tests if (tree / test.partition("::")[0]).exists()]
    if not existing:
        return TestRun(is_red=False, failed=(), is_timeout=False, seconds=0.0, output="")
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "-o", f"timeout={test_timeout_s}"]
    # plugins that the heavy imports have brought along
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += ["-x"] * stop_at_first + [f"--deselect={test}" for test in deselected]
    failures, log = tree.parent / "failed.txt", tree.parent / "output.txt"
    failures.write_text("")
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    child = os.fork()
    if not child:
        _run_in_child(tree, [*existing, *options], failures, log)
    code = _wait(child, started + timeout_s)
    failed = tuple(failures.read_text(encoding="utf-8").splitlines())
    return TestRun(
        # 5: none of the tests was chosen
        is_red=code not in (0, 5),
        failed=failed,
        is_timeout=code is None,
        seconds=time.monotonic() - started,
        output=log.read_text(encoding="utf-8", errors="replace")[-4000:],
    )


def _run_in_child(tree: Path, arguments: Sequence[str], failures: Path, log: Path) -> None:
    """Run pytest and end the process."""
    code = 3
    try:
        os.setsid()
        os.chdir(tree)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # the distributions beside raybatch
        folders = [tree, *(each.parent for each in sorted(tree.glob("*/pyproject.toml")))]
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        sys.path.insert(0, str(tree))
        code = int(pytest.main(list(arguments), plugins=[_FailureLog(failures)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _settle_hypothesis() -> None:
    """Have the same examples in every run, and no time spent on a smaller one that fails."""
    try:
        from hypothesis import Phase, settings
    except ImportError:
        return
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("planted", derandomize=True, database=None, phases=phases)
    settings.load_profile("planted")


class _FailureLog:
    """Notes what failed as soon as it has."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_configure(self) -> None:
        _settle_hypothesis()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid)

    def _note(self, name: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")


def _wait(child: int, until: float) -> int | None:
    """Return the exit code, None where the process was killed because its time ran out."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL_S)
    # processes that a test left running belong to the process group of its run
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)
