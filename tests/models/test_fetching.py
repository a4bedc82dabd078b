"""A model comes to a host once, whoever asks at the same time and whoever is killed."""

import hashlib
import multiprocessing
import random
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raybatch.models.fetching import RANGE_THREADS
from tests.models import slow_store
from tests.models.slow_store import RANGE_BYTES, read_log

pytestmark = pytest.mark.fetch

_PROCESSES = 8


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket(tmp_path) -> Path:
    """A model of two files of weights, of a hundred ranges together."""
    folder = tmp_path / "bucket"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    numbers = np.random.default_rng(0)
    for name in ("a", "b"):
        save_file({name: numbers.random(400_000)}, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that start in milliseconds, from one that has imported everything."""
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
    num_kills = 0
    while running:
        time.sleep(0.01)
        working = {process for process, *_ in read_log(bucket)[-RANGE_THREADS:]}
        if working and num_kills < 20 and chance.random() < 0.3:
            victim = chance.choice([p for p in running if p.pid in working] or running)
            victim.kill()
            victim.join()
            running.remove(victim)
            num_kills += victim.exitcode != 0
            running.append(start())
        for process in [each for each in running if not each.is_alive()]:
            running.remove(process)
            assert 0 == process.exitcode
    assert 10 <= num_kills
    assert sums(bucket) == sums(the_copy(own_cache))
    total = sum(file.stat().st_size for file in bucket.iterdir())
    given = sum(num_bytes for *_, num_bytes in read_log(bucket))
    assert total <= given <= total + num_kills * RANGE_THREADS * RANGE_BYTES


def test_nothing_is_fetched_twice_where_nobody_is_killed(start, bucket, own_cache):
    running = [start() for _ in range(_PROCESSES)]
    for process in running:
        process.join()
    assert [0] * _PROCESSES == [process.exitcode for process in running]
    ranges = [(name, begin) for _, name, begin, _ in read_log(bucket)]
    assert sorted(set(ranges)) == sorted(ranges)
    assert sums(bucket) == sums(the_copy(own_cache))
