"""Pools on hosts with pretended GPUs of several kinds, and several engines on a host or a GPU."""

import pytest
import ray
from ray.cluster_utils import Cluster

from raybatch.actors.executors.ray_pools import RayRuntime, reserve
from raybatch.actors.pool import PoolHandle
from raybatch.actors.replicas.placement import cluster_now, plan_placement
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from tests.actors.pools import SAMPLING, expected_tokens, generate, prompts_of, table_of, tokens_of
from tests.clusters import end_ray

pytestmark = [pytest.mark.ray, pytest.mark.autoscale, pytest.mark.slow]


def add_host(cluster, kind, num_gpus):
    cluster.add_node(
        num_cpus=1,
        num_gpus=num_gpus,
        resources={f"accelerator_type:{kind}": 1},
        labels={"ray.io/accelerator-type": kind},
        object_store_memory=100 << 20,
    )


@pytest.fixture(scope="module")
def unlike():
    end_ray()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    add_host(cluster, "H100", 2)
    add_host(cluster, "L4", 1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    end_ray()
    cluster.shutdown()


def spec_of(**pool):
    return PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake"),
        engine=EngineConfig(max_batched_tokens=64, kv_cache_bytes=1 << 20),
        pool=PoolConfig(**pool),
    )


@pytest.mark.parametrize(
    ("pool", "num_engines", "num_gpus_left"),
    [
        ({"num_gpus_per_replica": 1}, 3, 0),
        ({"num_gpus_per_replica": 1, "accelerator_type": ["L4", "H100"]}, 3, 0),
        ({"num_gpus_per_replica": 1, "accelerator_type": "H100"}, 2, 1),
        ({"num_gpus_per_replica": 1, "accelerator_type": ["L4", "A100"]}, 1, 2),
        ({"num_gpus_per_replica": 0.5, "accelerator_type": "L4"}, 2, 2),
    ],
    ids=str,
)
def test_engines_take_the_gpus_of_their_kinds_and_no_others(
    unlike, pool, num_engines, num_gpus_left
):
    handle = PoolHandle(spec_of(**pool))
    prompts = prompts_of(200)
    try:
        handle.start()
        results = generate(handle, table_of(prompts), (SAMPLING,))
        assert expected_tokens(prompts) == tokens_of(results)
        while handle.stats().num_ready < num_engines:
            pass
        assert handle.stats().num_replicas == num_engines
        assert ray.available_resources().get("GPU", 0) == num_gpus_left
    finally:
        handle.shutdown()


def where_class():
    """Return a class that travels by value: hosts of this cluster do not know the tests."""
    place = RayRuntime().place

    class Where:
        def host(self):
            return place().host

    return Where


def test_a_replica_says_on_which_host_and_kind_of_gpu_it_is(unlike):
    pool = PoolConfig(accelerator_type=["L4", "A100"], num_gpus_per_replica=1)
    plan = plan_placement(spec_of(accelerator_type="L4", num_gpus_per_replica=1), cluster_now())
    reserved = reserve(plan, pool, name="where").start(where_class())
    assert ray.get(reserved.actor.host()).endswith(" (L4)")
    reserved.end()


def test_an_engine_is_not_started_on_a_host_to_avoid(unlike):
    small = next(n["NodeID"] for n in ray.nodes() if "accelerator_type:L4" in n["Resources"])
    pool = PoolConfig(num_gpus_per_replica=1)
    plan = plan_placement(spec_of(num_gpus_per_replica=1), cluster_now())
    made = [reserve(plan, pool, name="x", avoid={small}).start(where_class()) for _ in range(2)]
    hosts = ray.get([each.actor.host() for each in made])
    assert [host.endswith(" (H100)") for host in hosts] == [True, True]
    for each in made:
        each.end()
