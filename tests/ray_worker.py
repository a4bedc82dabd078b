"""Stands in for Ray's script that starts a worker: asks the warm process of a cluster to fork one.

See `warm_ray.py`. It imports little, since it runs for each worker. A worker that the warm process
refuses, for its environment is another one, starts as Ray starts it.
"""

import json
import os
import socket
import sys

ADDRESS = "RAYBATCH_TEST_WARM_RAY"
MAX_BYTES = 1 << 17
_CONTEXT = "--serialized-runtime-env-context="
# of a worker that starts before there is a job
_NO_JOB = "ffffffff"


def main() -> None:
    """Start the worker of the arguments, see `ray/_private/workers/setup_worker.py`."""
    contexts = [a.removeprefix(_CONTEXT) for a in sys.argv if a.startswith(_CONTEXT)]
    context = json.loads(contexts[0]) if contexts else {}
    given = [a for a in sys.argv[1:] if not a.startswith((_CONTEXT, "--language="))]
    # options of Python may come before it
    place = next(number for number, one in enumerate(given) if one.endswith(".py"))
    is_plain = not (context.get("command_prefix") or context.get("override_worker_entrypoint"))
    is_plain &= place == 0
    is_plain &= context.get("py_executable", sys.executable) == sys.executable
    variables = context.get("env_vars", {})
    is_plain &= "PYTHONPATH" not in variables
    environment = {**os.environ, **variables}
    message = {"arguments": given, "environment": environment, "folder": os.getcwd()}
    if not is_plain or os.environ["RAY_JOB_ID"] == _NO_JOB or not _ask(message):
        setup = os.path.join(os.path.dirname(given[place]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, "-u", setup, *sys.argv[1:]])


def _ask(message: dict[str, object]) -> bool:
    """Ask the warm process for a worker; return whether it has forked one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        try:
            asking.connect(os.environ[ADDRESS])
            socket.send_fds(asking, [json.dumps(message).encode()], [1, 2])
            return bool(asking.recv(MAX_BYTES))
        except OSError:
            return False


if __name__ == "__main__":
    main()
