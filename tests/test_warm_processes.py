"""Engines of tests are forked, and find what a user's engine finds at its start."""

import os
import socket
import sys
import time

import pytest

from raybatch.actors.executors import local_pools

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
