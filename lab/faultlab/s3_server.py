"""An S3 endpoint on this host, as a separate process, for tests and for `raybatch bench faults`.

The server is moto's. It keeps objects in memory and ends with the process that started it.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from raybatch.errors import MissingDependency

REGION = "us-east-1"

# it listens until no process holds the other end of its standard input
_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


def has_moto(python: str = sys.executable) -> bool:
    """Return whether an interpreter can import moto's server."""
    command = [python, "-c", "import moto.server"]
    try:
        return not subprocess.run(command, capture_output=True, check=False).returncode
    except OSError:  # no such program
        return False


@contextmanager
def s3_server(python: str = sys.executable) -> Iterator[str]:
    """Run an S3 server on a free port of the loopback interface and yield its address.

    Raises:
        MissingDependency: it has none.
    """
    process = subprocess.Popen(
        [python, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None, "it was asked for"
    assert process.stdout is not None, "it was asked for"
    try:
        words = process.stdout.readline().split()
        if len(words) != 2:
            raise MissingDependency(
                f"{python} cannot serve S3; install moto there: pip install 'moto[s3]' flask "
                "flask-cors"
            )
        yield f"http://{words[0]}:{words[1]}"
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def s3_variables(endpoint: str) -> Mapping[str, str]:
    """Return the environment in which s3fs talks to an endpoint of this host."""
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
