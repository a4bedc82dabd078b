"""Keeps internal messages of Ray off the terminal of a command; its log files have them."""

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

# the pool reports dead workers, and retried tasks are no news; the rest is C++: lines with file and
# number, and stacks of signals
NOISE = "|".join(
    (
        r"^A worker died or was killed while executing a task",
        r"^Task \S.* failed\. There are (infinite|\d+) retries remaining",
        r"^\[[-\d]+ [\d:,]+ [DIWEFC] \d+ \d+\]( \([^)]*\))? \S+\.(cc|h|cpp):\d+:",
        r"^\*\*\* SIG[A-Z]+ received",
        r"^PC: @",
        r"^ +@ +0x[0-9a-f]+",
    )
)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current standard error, such as that of a live display."""

    @property
    def stream(self) -> TextIO:
        """Return standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Ignore the stream."""


def skip_noise_of_workers() -> None:
    """Tell Ray which log lines of workers not to print; call it before Ray is imported."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", NOISE)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Filter messages of Ray's core from the standard error of this process.

    They go to the file descriptor, past `sys.stderr`, and would break a live display.
    """
    stderr = sys.stderr
    is_usual = False
    with suppress(OSError, ValueError, AttributeError):
        is_usual = stderr.fileno() == 2
    if not is_usual:
        yield
        return
    stderr.flush()
    ours, (reader, writer) = os.dup(2), os.pipe()
    sys.stderr = open(ours, "w", buffering=1, encoding=stderr.encoding, errors=stderr.errors)  # noqa: SIM115
    os.dup2(writer, 2)
    os.close(writer)
    thread = threading.Thread(target=_pass_on, args=(reader,), name="raybatch-stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        replaced, sys.stderr = sys.stderr, stderr
        replaced.flush()
        # closes the last end to write into, unless a child of this process has it
        os.dup2(ours, 2)
        thread.join(timeout=1.0)
        replaced.close()


def _pass_on(reader: int) -> None:
    noise = re.compile(NOISE)
    with os.fdopen(reader, "r", errors="backslashreplace", newline="\n") as lines:
        for line in lines:
            if not noise.search(line):
                sys.stderr.write(line)
                sys.stderr.flush()
