"""A cluster of this host alone whose autoscaler adds hosts with pretended GPUs, and removes them.

Ray's own `AutoscalingCluster` ends every Ray of the machine first, and its configuration is not in
the wheel; this one starts a head with Ray's fake provider and ends its own processes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

from tests.clusters import end_ray, make_data_context

_HEAD_ID = "f" * 51 + "00000"
_START_TIMEOUT_S = 60.0
# other clusters may have those that Ray takes
_OTHER_PORTS = ("ray-client-server", "dashboard-agent-listen", "metrics-export")
_VARIABLES = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_AUTH_MODE": "disabled",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "5",
}
# what a configuration has to have
_NOTHING = (
    *("setup_commands", "initialization_commands", "head_setup_commands", "rsync_filter"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
    "rsync_exclude",
)


@contextmanager
def autoscaling_ray(worker: dict[str, float], *, max_workers: int) -> Iterator[int]:
    """Connect to a head with two CPUs that may get hosts with such resources; yields its pid."""
    end_ray()
    # socket paths must stay short, pytest's folders are not
    with tempfile.TemporaryDirectory(prefix="rb", ignore_cleanup_errors=True) as folder:
        address = f"{ray.util.get_node_ip_address()}:{_free_port()}"
        config = Path(folder, "cluster.json")
        config.write_text(json.dumps(_config(address, worker, max_workers)))
        head = _start(address, config, folder)
        try:
            _wait_for(address, head, Path(folder, "log"))
            make_data_context()
            ray.init(address=address, log_to_driver=False)
            yield head.pid
        finally:
            end_ray()
            _end(head)


def raylets(head: int) -> list[psutil.Process]:
    """Return the raylets of the hosts that the autoscaler has added, oldest first."""
    monitors = [p for p in psutil.Process(head).children() if "monitor.py" in " ".join(p.cmdline())]
    found = [p for m in monitors for p in m.children(recursive=True) if p.name() == "raylet"]
    return sorted(found, key=psutil.Process.create_time)


def _config(address: str, worker: dict[str, float], max_workers: int) -> dict[str, Any]:
    head = {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0}
    host = {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": max_workers}
    return {
        **{name: [] for name in _NOTHING},
        "cluster_name": "test",
        "max_workers": max_workers,
        "idle_timeout_minutes": 10,
        "upscaling_speed": 10.0,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "head_node_id": _HEAD_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "available_node_types": {"ray.head.default": head, "gpu": host},
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
    }


def _start(address: str, config: Path, folder: str) -> subprocess.Popen[bytes]:
    options = {
        "num-cpus": 2,
        "num-gpus": 0,
        "port": address.rpartition(":")[2],
        **{f"{name}-port": _free_port() for name in _OTHER_PORTS},
        "object-store-memory": 200 << 20,
        "include-dashboard": "false",
        "temp-dir": folder,
        "autoscaling-config": config,
    }
    with Path(folder, "log").open("wb") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                "--disable-usage-stats",
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            env={**os.environ, **_VARIABLES},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for(address: str, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s, (host, _, port) = time.monotonic() + _START_TIMEOUT_S, address.rpartition(":")
    while time.monotonic() < deadline_s:
        assert head.poll() is None, log.read_text()[-3000:]
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.2)
    raise TimeoutError(f"no answer from {address} within {_START_TIMEOUT_S} s")


def _end(head: subprocess.Popen[bytes]) -> None:
    family = [] if head.poll() is not None else psutil.Process(head.pid).children(recursive=True)
    head.send_signal(signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with suppress(subprocess.TimeoutExpired):
        head.wait(timeout=5)
    head.kill()
    head.wait()
