"""An engine of vLLM whose ranks run on two hosts of a Ray cluster, as actors in a group.

vLLM on a CPU refuses Ray, so the hosts of this cluster claim to have GPUs, and vLLM is patched to
use them. Its ranks compute on the CPU.
"""

import asyncio
import os
import signal

import numpy as np
import psutil
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from raybatch.actors.pool import PoolHandle, release_pools
from raybatch.actors.wire.columns import request_table
from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.records.types import Sampling
from tests.backends.vllm_engines import PROMPT, save_text_model
from tests.clusters import end_ray

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = {"dtype": "float32", "kv_cache_bytes": 4 << 20, "max_num_seqs": 4}
# every process of the pool runs it before it imports vLLM
_PRETEND = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def patched(module):
            execute(module)
            module.CpuPlatform.ray_device_key = "GPU"
            module.CpuPlatform.device_control_env_var = "CUDA_VISIBLE_DEVICES"

        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("hosts") / "model")


@pytest.fixture(scope="module")
def two_hosts():
    end_ray()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def handle(folder, two_hosts, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_PRETEND)
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    kwargs = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    spec = PoolSpec(
        model=str(folder),
        backend=BackendConfig(kind="vllm", options={"engine_kwargs": kwargs}),
        engine=EngineConfig(**ENGINE),
        pool=PoolConfig(runtime_env={"env_vars": {"PYTHONPATH": paths}}),
    )
    yield PoolHandle(spec)
    release_pools()


def groups(state):
    return [group for group in placement_group_table().values() if group["state"] == state]


def answers(handle):
    prompts = [np.array([*PROMPT, i], np.int32) for i in range(3)]
    table = request_table([str(i) for i in range(3)], prompts)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    result = asyncio.run(handle.generate(table, (sampling,)))
    batch = pa.Table.from_batches([result]) if isinstance(result, pa.RecordBatch) else result
    assert batch["error"].to_pylist() == [""] * 3
    return batch["token_ids"].to_pylist()


def ranks():
    found = psutil.process_iter(["cmdline"])  # None of a process that has just ended
    return [p for p in found if "RayWorkerProc" in " ".join(p.info["cmdline"] or ())]


def test_ranks_on_two_hosts_answer_as_one_engine_and_are_replaced_and_released(handle, folder):
    native = PoolHandle(
        PoolSpec(
            model=str(folder),
            backend=BackendConfig(kind="native"),
            engine=EngineConfig(**ENGINE, device="cpu"),
            pool=PoolConfig(replicas=1),
        )
    )
    expected = answers(native)

    assert answers(handle) == expected
    (group,) = groups("CREATED")
    assert len(set(group["bundles_to_node_id"].values())) == 2

    os.kill(ranks()[0].pid, signal.SIGKILL)
    assert answers(handle) == expected
    (second,) = groups("CREATED")
    assert second["placement_group_id"] != group["placement_group_id"]

    release_pools()
    assert not groups("CREATED")
