"""Engines that ask for GPUs before any host of the cluster has one."""

import pytest
import ray
from ray.cluster_utils import Cluster

from raybatch.actors.executors.ray_pools import reserve
from raybatch.actors.replicas.placement import cluster_now, plan_placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from tests.clusters import end_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def engine_class():
    """Return a class that travels by value: hosts of this cluster do not know the tests."""

    class Engine:
        def gpus(self):
            return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    return Engine


@pytest.fixture
def cpu_cluster():
    end_ray()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_an_engine_waits_for_the_first_host_with_its_gpu(cpu_cluster):
    pool = PoolConfig(replicas=8, accelerator_type="H100")
    spec = PoolSpec(model="m", backend=BackendConfig(), engine=EngineConfig(), pool=pool)
    plan = plan_placement(spec, cluster_now())
    assert (plan.num_replicas, plan.num_gpus) == (8, 1)
    requested = reserve(plan, pool, name="engine").start(engine_class()).actor.gpus()
    waiting, _ = ray.wait([requested], timeout=0.5)
    assert waiting == []

    cpu_cluster.add_node(num_cpus=1, num_gpus=1, resources={"accelerator_type:H100": 1})
    assert ray.get(requested, timeout=60) == ["0"]
    assert [host.num_gpus for host in cluster_now().hosts].count(1.0) == 1
