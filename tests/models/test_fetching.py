"""A host fetches a model once, also if several processes need it or one is killed."""

import errno
import hashlib
import itertools
import multiprocessing
import random
import shutil
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from raybatch.errors import ConfigError, UnreachableError
from raybatch.models import store
from raybatch.models.source import resolve_config, resolve_model
from raybatch.models.store import RANGE_THREADS, StoredFile, fetch_files
from tests.models import slow_store
from tests.models.slow_store import SlowFileSystem, read_log

pytestmark = [pytest.mark.fetch, pytest.mark.usefixtures("own_cache")]

_PROCESSES = 8


@pytest.fixture
def bucket(tmp_path) -> Path:
    """A model with two files of weights, a hundred ranges in total."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    numbers = np.random.default_rng(0)
    for name in ("a", "b"):
        save_file({name: numbers.random(400_000)}, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that start in milliseconds, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.models.slow_store"])
    return context


@pytest.fixture
def start(processes, bucket, own_cache):
    """Start processes that fetch the model; those that still run at the end are killed."""
    started = []

    def start_one() -> ForkServerProcess:
        process = processes.Process(
            target=slow_store.fetch_model, args=(f"slow://{bucket}", str(own_cache))
        )
        process.start()
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.join()


def sums(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def the_copy(own_cache: Path) -> Path:
    (folder,) = (own_cache / "models").iterdir()
    return folder


def test_processes_that_are_killed_at_random_leave_one_whole_copy(start, bucket, own_cache):
    chance = random.Random(5)
    running = [start() for _ in range(_PROCESSES)]
    killed = set()
    while running:
        time.sleep(0.01)
        working = {process for process, *_ in read_log(bucket)[-RANGE_THREADS:]}
        if working and len(killed) < 20 and chance.random() < 0.3:
            victim = chance.choice([p for p in running if p.pid in working] or running)
            victim.kill()
            victim.join()
            running.remove(victim)
            killed.add(victim.pid)
            running.append(start())
        for process in [each for each in running if not each.is_alive()]:
            running.remove(process)
            assert 0 == process.exitcode
    assert sums(bucket) == sums(the_copy(own_cache))
    assert 10 <= len(killed)
    givers = defaultdict(list)
    for process, name, begin, _ in read_log(bucket):
        givers[name, begin].append(process)
    lost = Counter(process for all_givers in givers.values() for process in all_givers[:-1])
    assert lost.keys() <= killed
    assert max(lost.values(), default=0) <= RANGE_THREADS


def test_nothing_is_fetched_twice_if_no_process_is_killed(start, bucket, own_cache):
    running = [start() for _ in range(_PROCESSES)]
    for process in running:
        process.join()
    assert [0] * _PROCESSES == [process.exitcode for process in running]
    ranges = [(name, begin) for _, name, begin, _ in read_log(bucket)]
    assert sorted(set(ranges)) == sorted(ranges)
    assert sums(bucket) == sums(the_copy(own_cache))


@pytest.fixture
def uri(bucket, monkeypatch) -> str:
    monkeypatch.setattr(slow_store, "OPEN_S", 0.0)
    monkeypatch.setattr(store, "RANGE_BYTES", slow_store.RANGE_BYTES)
    return f"slow://{bucket}"


def test_a_file_that_is_finished_before_its_lock_is_acquired_is_not_fetched_again(
    uri, bucket, monkeypatch
):
    try_lock, first = store._try_lock, threading.Lock()

    def late(fd):
        if first.acquire(blocking=False):
            resolve_model(uri)
        return try_lock(fd)

    monkeypatch.setattr(store, "_try_lock", late)
    folder = resolve_model(uri)
    assert sums(bucket) == sums(folder)
    assert len(read_log(bucket)) == len({line[1:3] for line in read_log(bucket)})


def test_an_error_of_one_leaves_its_files_to_the_next(uri, bucket, monkeypatch):
    give, num_left = slow_store.given, itertools.count(30, -1)

    def fail(folder, fact):
        if next(num_left) <= 0:
            raise OSError("the network is away")
        give(folder, fact)

    monkeypatch.setattr(slow_store, "given", fail)
    with pytest.raises(
        UnreachableError, match=r"could not download .*: OSError: the network is away"
    ):
        resolve_model(uri)
    num_given = len(read_log(bucket))
    monkeypatch.setattr(slow_store, "given", give)
    assert sums(bucket) == sums(resolve_model(uri))
    assert 20 < num_given
    assert len(read_log(bucket)) == len({line[1:3] for line in read_log(bucket)})


def test_a_range_that_is_cut_is_refused(uri, monkeypatch):
    whole = SlowFileSystem.cat_file
    cut = lambda *args, **kwargs: whole(*args, **kwargs)[:-1]  # noqa: E731
    monkeypatch.setattr(SlowFileSystem, "cat_file", cut)
    with pytest.raises(UnreachableError, match=r"returned \d+ bytes instead of \d+"):
        resolve_model(uri)


def test_a_full_disk_is_reported_before_anything_is_fetched(uri, bucket, own_cache, monkeypatch):
    usage = shutil.disk_usage(bucket)._replace(free=1_000_000)
    resolve_config(uri)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = rf"needs 6\.4 MB more in {own_cache}/models/bucket-\w+, but only 1\.0 MB are free"
    with pytest.raises(ConfigError, match=message):
        resolve_model(uri)
    assert ["config.json"] == [name for _, name, *_ in read_log(bucket)]


def test_a_disk_that_fills_up_meanwhile_is_reported(uri, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    with pytest.raises(ConfigError, match=r"needs 0\.0 MB more in .*RAYBATCH_CACHE_DIR"):
        resolve_config(uri)


def test_a_file_system_without_locks_is_reported(uri, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match=r"does not support locks .*; set RAYBATCH_CACHE_DIR"):
        resolve_config(uri)


def test_bytes_that_are_not_those_of_the_checksum_are_dropped(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/sums/a", b"right")
    right = hashlib.md5(b"right").digest()
    wrong = {"a": StoredFile(path="/sums/a", size=5, md5=bytes(16))}
    with pytest.raises(UnreachableError, match="was damaged in transfer"):
        fetch_files(memory, wrong, tmp_path, what="it")
    assert not (tmp_path / "a").exists()
    assert 5 == fetch_files(memory, {"a": replace(wrong["a"], md5=right)}, tmp_path, what="it")
    assert b"right" == (tmp_path / "a").read_bytes()


def test_an_empty_file_exists(tmp_path):
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/empty/a", b"")
    files = {"a": StoredFile(path="/empty/a", size=0)}
    assert 0 == fetch_files(memory, files, tmp_path, what="it")
    assert ["a"] == [path.name for path in tmp_path.iterdir()]


def test_weights_are_fetched_to_the_folder_of_a_config(uri, bucket):
    folder = resolve_config(uri)
    assert ["config.json"] == [path.name for path in folder.iterdir()]
    assert folder == resolve_model(uri)
    assert sums(bucket) == sums(folder)
