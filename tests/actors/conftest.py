"""One small local Ray cluster for all tests of the actors, and pools on it."""

import os

import pytest
import ray

from raybatch.actors.pool import release_pools
from tests.actors.pools import handle_of


@pytest.fixture(scope="package")
def ray_cluster():
    # not of the session: the tests of other packages count on a cluster that nobody holds
    # by default Ray starts workers with nice 15, and they starve on a busy machine
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        namespace="tests-actors",
    )
    yield
    release_pools()
    ray.shutdown()
    del os.environ["RAY_worker_niceness"]  # noqa: SIM112


@pytest.fixture
def shared():
    """The pool without options; warm for all tests that need no other."""
    return handle_of()


@pytest.fixture
def own():
    """Makes a pool that ends with its test."""
    handles = []

    def make(**options):
        handles.append(handle_of(**options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.shutdown()
