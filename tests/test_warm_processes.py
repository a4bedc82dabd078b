"""Engines and Ray workers of tests are forked, and find what a user's find at their start."""

import os
import socket
import sys
import time

import pytest
import ray

from raybatch.actors.executors import local_pools
from tests import clusters

pytestmark = [
    pytest.mark.usefixtures("warm_processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux"),
]


def folder_of(process, *, wanted):
    """Return the working folder of a process, which may be on its way to the one that is wanted."""
    end_s = time.monotonic() + 20
    while (found := os.readlink(f"/proc/{process.pid}/cwd")) != wanted and time.monotonic() < end_s:
        time.sleep(0.001)
    return found


def test_an_engine_starts_in_the_folder_of_its_driver(monkeypatch, tmp_path):
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        ours, theirs = socket.socketpair()
        with theirs:
            process = local_pools._spawn(theirs.fileno())
        with ours:
            assert str(folder) == folder_of(process, wanted=str(folder))
        # it ends with its driver's end of the socket
        process.wait()


@pytest.mark.ray
def test_workers_of_the_shared_cluster_are_forked_and_draw_other_ids(cluster):
    class Worker:
        def facts(self):
            return os.getppid(), ray.ObjectRef.from_random().hex(), "ray.data" in sys.modules

    workers = [ray.remote(Worker).options(num_cpus=0.01).remote() for _ in range(6)]
    parents, ids, have_loaded = zip(*ray.get([w.facts.remote() for w in workers]), strict=True)
    assert len(set(ids)) == 6
    # the first ones may be those that Ray starts with the cluster
    later = [parent for parent, has_loaded in zip(parents, have_loaded, strict=True) if has_loaded]
    assert clusters._warm._process.pid in later
