"""The cluster of tests that run processors of ray.data.llm."""

import pytest


@pytest.fixture(scope="module")
def wide_cluster():
    """Ray with CPUs for all actors of ray.data.llm, each of which reserves its own."""
    # slow to load, and most tests need no Ray
    from tests.clusters import own_ray

    with own_ray(num_cpus=16):
        yield
