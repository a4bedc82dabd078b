"""Models of the engine's tests, and the cluster of the actors' tests."""

from tests.actors.conftest import ray_cluster, warm_pools
from tests.engine.conftest import tiny_checkpoint

__all__ = ["ray_cluster", "tiny_checkpoint", "warm_pools"]
