"""Ray's messages about itself, kept off the terminal of a command; its log files have them."""

import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

# The pool reports a worker that died, with the rows that it had; a task that is tried again tells
# nothing. The rest is C++: lines with file and number, and the stack of a signal.
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
    """Writes to whatever standard error is at that moment, such as a display that moves down."""

    @property
    def stream(self) -> TextIO:
        """Return standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Keep to standard error."""


def skip_noise_of_workers() -> None:
    """Tell Ray which lines of its processes not to print; to be called before Ray is imported."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", NOISE)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Pass on what this process writes to standard error, except what Ray's core writes.

    That goes to the file descriptor, past `sys.stderr`, into the middle of a display.
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
