"""Ends the processes of an engine with the process that started them, however that one ends.

vLLM ends them where it is closed; after a kill they would stay, with the memory of their GPUs.
"""

import subprocess

import psutil

# how vLLM calls its processes
_TITLE = "VLLM::"
# nothing is ever written: the line ends with the process that holds its other end
_SCRIPT = f"""
read _
for pid in "$@"; do
  grep -q '^{_TITLE}' /proc/$pid/cmdline 2>/dev/null && kill -9 $pid
done
"""


class Guard:
    """Waits beside this process for its end; the processes of the engine have started."""

    def __init__(self) -> None:
        children = psutil.Process().children(recursive=True)
        pids = [str(child.pid) for child in children if child.name().startswith(_TITLE)]
        self._waiting = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "sh", *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # an interrupt of the terminal is not for it
            start_new_session=True,
        )

    def close(self) -> None:
        """Guard no more."""
        self._waiting.kill()
        self._waiting.communicate()
