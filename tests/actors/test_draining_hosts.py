"""A host that Ray drains, as before the cloud takes it back: its engine leaves before it ends."""

import asyncio
import time

import pytest
import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from raybatch.actors.coordinator import rebalancer
from raybatch.backends.fake import fake_tokens
from raybatch.records.types import Sampling
from tests.actors.pools import handle_of, prompts_of, table_of, tokens_of
from tests.clusters import end_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def two_hosts():
    """A cluster with a host for each of two engines, beside that of the driver."""
    end_ray()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    hosts = [cluster.add_node(num_cpus=1, resources={"engine": 1}) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    yield hosts
    end_ray()
    cluster.shutdown()


def drain(node_id):
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + 600))
    is_accepted, why = client.drain_node(node_id, reason, "the cloud takes it back", deadline_ms)
    assert is_accepted, why


def test_rows_of_an_engine_on_a_host_that_is_drained_go_on_elsewhere(two_hosts):
    sampling, prompts = Sampling(max_tokens=4500), prompts_of(24)
    handle = handle_of(pool={"resources": {"engine": 1}}, step_s=0.01, max_num_seqs=32)

    async def run():
        job = asyncio.create_task(handle.generate(table_of(prompts), (sampling,)))
        while len(handle.state().pids) < 2:
            await asyncio.sleep(0.05)
        drain(two_hosts[0].node_id)
        while len(handle.state().pids) == 2:
            await asyncio.sleep(0.05)
        assert not job.done()
        return await job

    assert rebalancer._ASK_EVERY_S < 4500 * 0.01
    results = asyncio.run(run())
    expected = [fake_tokens(p, i, sampling).tolist() for i, p in enumerate(prompts)]
    assert expected == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())
    stats = handle.stats()
    # another one waits for a host that may come
    assert (stats.num_replicas, stats.num_ready, stats.restarts) == (2, 1, 0)
