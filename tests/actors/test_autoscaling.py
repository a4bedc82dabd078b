"""A pool on a cluster that starts without a GPU: hosts come for engines, die and come again."""

import signal

import numpy as np
import pytest
import ray

from tests.actors.pools import (
    Background,
    expected_tokens,
    handle_of,
    prompts_of,
    tokens_of,
    wait_until,
)
from tests.autoscaling import autoscaling_ray, raylets

pytestmark = [
    pytest.mark.ray,
    pytest.mark.autoscale,
    pytest.mark.slow,
    # of Ray's own start
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.timeout(900),
]


def hosts_with_gpus(*, alive=True):
    # Ray keeps no resources of those that died
    nodes = [n for n in ray.nodes() if n["Alive"] == alive]
    return [n["NodeID"] for n in nodes if n["Resources"].get("GPU") or not alive]


def test_hosts_come_one_dies_another_comes_and_every_row_is_there_once():
    with autoscaling_ray(
        {"CPU": 1, "GPU": 1, "object_store_memory": 100 << 20}, max_workers=3
    ) as head:
        pool = {"replicas": 2, "num_gpus_per_replica": 1}
        handle = handle_of(pool=pool, step_s=0.05, max_num_seqs=2)
        assert hosts_with_gpus() == []
        prompts = prompts_of(600)
        job = Background(handle, prompts)
        wait_until(lambda: len(handle.state().pids) == 2)
        before = handle.stats().rows_done
        raylets(head)[0].send_signal(signal.SIGKILL)
        wait_until(lambda: len(handle.state().pids) == 1)
        wait_until(lambda: len(handle.state().pids) == 2)
        # the one that died among them
        assert [len(hosts_with_gpus(alive=alive)) for alive in (True, False)] == [2, 1]
        assert before < handle.stats().rows_done < len(prompts)

        results = job.join()
        assert expected_tokens(prompts) == tokens_of(results)
        stats = handle.stats()
        assert (stats.rows_done, stats.num_given_up) == (len(prompts), 0)
        assert np.array(results["attempts"]).max() > 1
        handle.shutdown()
