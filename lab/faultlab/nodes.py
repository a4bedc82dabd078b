"""Three Ray nodes on this host, in a separate process, one of which can be lost.

python -m faultlab.nodes TEMP_DIR    prints its address, then follows lines: lose, add
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from faultlab.drivers import kill_family

_NUM_WORKERS = 2
_OBJECT_STORE_BYTES = 100 << 20
# a lost node is noticed after some seconds, not after half a minute
_HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class Nodes:
    """The nodes, from outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def lose(self) -> None:
        """End a worker node as a crash does, with everything that runs there."""
        self._ask("lose")

    def add(self) -> None:
        """Start a worker node."""
        self._ask("add")

    def _ask(self, command: str) -> None:
        assert self._process.stdin is not None, "it was asked for"
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None, "it was asked for"
        for line in self._process.stdout:
            if line.startswith("nodes: "):
                return line.removeprefix("nodes: ").strip()
        raise RuntimeError("the nodes have ended")


@contextmanager
def ray_nodes(folder: Path, variables: dict[str, str]) -> Iterator[Nodes]:
    """Run a head and two worker nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "nodes.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "faultlab.nodes", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=variables | _HEALTH,
            text=True,
            start_new_session=True,
        )
    try:
        yield Nodes(process)
    finally:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        kill_family(family)
        process.communicate()


def _say(text: str) -> None:
    sys.stdout.write(f"nodes: {text}\n")
    sys.stdout.flush()


def main(temp_dir: str) -> None:
    """Hold the nodes until standard input ends."""
    from ray.cluster_utils import Cluster  # reads the environment when it is loaded

    kind = {"num_cpus": 2, "object_store_memory": _OBJECT_STORE_BYTES}
    head = {**kind, "include_dashboard": False, "temp_dir": temp_dir}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    workers = [cluster.add_node(**kind) for _ in range(_NUM_WORKERS)]
    cluster.wait_for_nodes()
    _say(cluster.address)
    for line in sys.stdin:
        if line.strip() == "lose" and workers:
            cluster.remove_node(workers.pop(0), allow_graceful=False)
        elif line.strip() == "add":
            workers.append(cluster.add_node(**kind))
        _say("done")
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
