"""Ray's messages about its internals do not reach the terminal; all others do."""

import io
import logging
import re
import subprocess
import sys

import pytest

from raybatch.stages.quiet_ray import NOISE, StderrHandler

SAID = [
    "[2026-11-22 21:55:14,691 E 10306 10306] core_worker.cc:2465: Actor with class name: 'M'",
    "[2026-11-22 21:55:14,691 E 1 2] (raylet) node_manager.cc:1: lost",
    "*** SIGTERM received at time=1795384514 on cpu 1 ***",
    "PC: @     0x7f0c2a1b3e2e  (unknown)  epoll_wait",
    "    @     0x7f0c2a0d2520  (unknown)  (unknown)",
    "A worker died or was killed while executing a task by an unexpected system error. To",
    "Task MapWorker(MapBatches(UnitFeeder)).submit failed. There are infinite retries remaining,",
    "Task f failed. There are 3 retries remaining, so the task will be retried. Error: x",
]
NEEDED = [
    "restarting replica 0: ActorDiedError: The actor is dead",
    "[engine] model.cc: the compiler refuses this",
    "WARNING raybatch.actors.pool: 3 rows wait",
    "Fatal Python error: Segmentation fault",
    "4 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to",
    "Task failed. There is nothing to do",
    "",
]


@pytest.mark.parametrize("line", SAID)
def test_messages_about_ray_internals_are_noise(line):
    assert re.search(NOISE, line)


@pytest.mark.parametrize("line", NEEDED)
def test_messages_of_engines_and_python_are_no_noise(line):
    assert not re.search(NOISE, line)


PROGRAM = """
import os, sys, logging
from raybatch.stages.quiet_ray import StderrHandler, quiet_stderr
logging.basicConfig(handlers=[StderrHandler()], format="%(message)s")
with quiet_stderr():
    os.write(2, b"[2026-11-22 21:55:14,691 E 1 1] core_worker.cc:2465: noise\\nfrom a libr")
    print("from python", file=sys.stderr)
    logging.warning("from the log")
    os.write(2, "ary \\u00e9\\n".encode() + b"without an end")
print("afterwards", file=sys.stderr)
os.write(2, b"[2026-11-22 21:55:14,691 E 1 1] core_worker.cc:1: no longer minded\\n")
"""


def test_lines_of_other_libraries_come_through_and_those_of_ray_do_not():
    run = [sys.executable, "-c", PROGRAM]
    message = subprocess.run(run, capture_output=True, text=True, check=True).stderr
    during, _, after = message.partition("afterwards\n")
    for text in ("from python\n", "from the log\n", "from a library \u00e9\n", "without an end"):
        assert during.count(text) == 1
    assert "noise" not in during
    assert "no longer minded" in after


def test_a_log_line_goes_to_the_standard_error_of_the_moment(monkeypatch):
    handler, later = StderrHandler(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    handler.emit(logging.makeLogRecord({"msg": "moved"}))
    assert later.getvalue() == "moved\n"


def test_the_command_line_sets_rays_noise_filter_unless_it_is_set():
    program = (
        "import os, sys; sys.argv = ['raybatch', '--version']\n"
        "from raybatch.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: print('ray' in sys.modules, os.environ['RAY_DEDUP_LOGS_SKIP_REGEX'])"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.splitlines()[-1] == f"False {NOISE}"
