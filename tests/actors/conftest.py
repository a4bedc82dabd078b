"""The cluster that all tests of the actors share, and pools on it."""

import pytest

from tests.actors.pools import handle_of
from tests.clusters import local_ray, share_ray


@pytest.fixture(scope="package")
def warm_pools():
    """Keep the pools of this package warm from one module to the next."""
    with local_ray():
        yield


@pytest.fixture
def ray_cluster(warm_pools):
    """The cluster, also after a test that used a separate one."""
    share_ray()


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
