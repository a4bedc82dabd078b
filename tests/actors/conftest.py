"""One small local Ray cluster for all tests of the actors."""

import pytest
import ray

from raybatch.actors.pool import release_pools


@pytest.fixture(scope="session")
def ray_cluster():
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        namespace="tests-actors",
    )
    yield
    release_pools()
    ray.shutdown()
