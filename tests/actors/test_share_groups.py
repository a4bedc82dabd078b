"""Replicas that share weights start and end together, and no row is lost or changed by it."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from raybatch.actors.executors.local_pools import plan_local_placement
from raybatch.actors.pool import PoolHandle
from raybatch.actors.replicas.placement import ClusterView, plan_placement
from raybatch.actors.replicas.share_groups import ShareGroups
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import check_pool
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError, ReplicaError
from raybatch.records.types import Sampling
from tests.actors.pools import Background, generate, handle_of, table_of, tokens_of, wait_until
from tests.actors.pools import prompts_of as prompts_of_length_3
from tests.engine.tiny_models import build

NUM_TOKENS = 24
SAMPLING = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    build("qwen3", num_hidden_layers=5).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def pools(path):
    """Makes pools of the native engine that end with their test."""
    handles = []

    def make(*, replicas=2, share_group=None, is_local=True, idle_release_s=None, **engine):
        weights = "replicated" if share_group is None else "shared"
        spec = PoolSpec(
            model=str(path),
            backend=BackendConfig(kind="native"),
            engine=EngineConfig(
                device="cpu",
                dtype="float32",
                weights=weights,
                kv_cache_bytes=1 << 20,
                max_num_seqs=4,
                compile_kernels=False,
                **engine,
            ),
            pool=PoolConfig(
                replicas=replicas, share_group=share_group, idle_release_s=idle_release_s
            ),
        )
        handles.append(PoolHandle(spec, is_local=is_local))
        return handles[-1]

    yield make
    for handle in handles:
        handle.shutdown()


def prompts_of(num_rows):
    return [prompt % 40 for prompt in prompts_of_length_3(num_rows)]


@pytest.fixture(scope="module")
def expected(path, tmp_path_factory):
    spec = PoolSpec(
        model=str(path),
        backend=BackendConfig(kind="native"),
        engine=EngineConfig(device="cpu", dtype="float32", compile_kernels=False),
        pool=PoolConfig(replicas=1),
    )
    handle = PoolHandle(spec, is_local=True)
    try:
        return tokens_of(generate(handle, table_of(prompts_of(120)), (SAMPLING,)))
    finally:
        handle.shutdown()


class Call(Background):
    def _run(self):
        handle, prompts, client = self._args
        try:
            self.results = generate(handle, table_of(prompts), (SAMPLING,), client=client)
        except Exception as error:
            self.error = error


@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_those_of_replicas_that_have_all_weights(pools, expected, size):
    handle = pools(replicas=size, share_group=size)
    results = generate(handle, table_of(prompts_of(120)), (SAMPLING,))
    assert expected == tokens_of(results)
    stats = handle.stats()
    assert len(stats.replicas) == size
    assert all(replica.num_weight_copies > 0 for replica in stats.replicas)
    assert sum(replica.num_failed_copies for replica in stats.replicas) == 0


def mapped(pid):
    """The segments that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:raybatch-weights" in line}


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_member_ends_its_group_and_no_row_is_lost(pools, expected, size):
    handle = pools(replicas=size, share_group=size)
    job = Call(handle, prompts_of(120))
    wait_until(lambda: handle.stats().rows_done >= 8)
    before = handle.state().pids
    assert len(before) == size
    # each has its own and those of the others
    assert {len(mapped(pid)) for pid in before} == {size}
    os.kill(before[-1], signal.SIGKILL)
    results = job.join()
    assert expected == tokens_of(results)
    wait_until(lambda: len(handle.state().pids) == size)
    assert not set(before) & set(handle.state().pids)
    assert handle.stats().num_restarts == size
    assert {len(mapped(pid)) for pid in handle.state().pids} == {size}
    handle.shutdown()
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("raybatch-")]


def test_another_group_goes_on(pools, expected):
    handle = pools(replicas=4, share_group=2)
    job = Call(handle, prompts_of(120))
    wait_until(lambda: handle.stats().rows_done >= 8 and len(handle.state().pids) == 4)
    before = set(handle.state().pids)
    dead = min(before)
    os.kill(dead, signal.SIGKILL)
    assert expected == tokens_of(job.join())
    wait_until(lambda: len(handle.state().pids) == 4)
    assert len(before & set(handle.state().pids)) == 2
    assert handle.stats().num_restarts == 2


def test_a_group_that_rested_starts_again(pools, expected):
    handle = pools(replicas=2, share_group=2, idle_release_s=0.2)
    for _ in range(2):
        results = generate(handle, table_of(prompts_of(120)), (SAMPLING,))
        assert expected == tokens_of(results)
        wait_until(lambda: not handle.state().pids)
    assert handle.stats().num_restarts == 0


def test_an_engine_that_leaves_takes_its_group_along(pools, expected):
    handle = pools(replicas=4, share_group=2)
    job = Call(handle, prompts_of(120))
    wait_until(lambda: handle.stats().rows_done >= 8 and len(handle.state().pids) == 4)
    before = set(handle.state().pids)
    os.kill(min(before), signal.SIGTERM)
    results = job.join()
    assert expected == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())
    wait_until(lambda: len(before & set(handle.state().pids)) == 2)


@pytest.mark.ray
def test_groups_run_on_ray(pools, expected, ray_cluster):
    handle = pools(replicas=2, share_group=2, is_local=False)
    job = Call(handle, prompts_of(120))
    wait_until(lambda: handle.stats().rows_done >= 8)
    before = handle.state().pids
    os.kill(before[0], signal.SIGKILL)
    assert expected == tokens_of(job.join())
    wait_until(lambda: len(handle.state().pids) == 2)
    assert not set(before) & set(handle.state().pids)


def test_a_group_that_cannot_start_fails_the_pool_with_the_cause(pools):
    handle = pools(replicas=2, share_group=2, max_model_len=999_999)
    with pytest.raises(ReplicaError, match="max_model_len"):
        generate(handle, table_of(prompts_of(4)), (SAMPLING,))


@pytest.mark.parametrize(
    ("pool", "engine", "told"),
    [
        ({"replicas": 3, "share_group": 2}, {"weights": "shared"}, "multiple of it, such as 2"),
        ({"max_replicas": 4, "share_group": 2}, {"weights": "shared"}, "set pool.replicas"),
        ({"replicas": 2, "share_group": 2}, {}, "set engine.weights='shared'"),
        ({"replicas": 2}, {"weights": "shared"}, "set pool.share_group"),
    ],
)
def test_options_that_make_no_groups_are_refused(pool, engine, told):
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind="native"),
        engine=EngineConfig(device="cpu", **engine),
        pool=PoolConfig(**pool),
    )

    def check(place):
        check_pool(spec.pool, spec.backend, spec.engine)
        place(spec)

    for place in (plan_local_placement, partial(plan_placement, cluster=ClusterView())):
        with pytest.raises(ConfigError, match=told):
            check(place)


@pytest.mark.parametrize("name", ["device_weight_bytes", "kv_offload", "cuda_graphs"])
def test_what_shared_weights_cannot_be_combined_with_is_refused_by_name(name):
    value = {"device_weight_bytes": 10, "kv_offload": True, "cuda_graphs": True}[name]
    with pytest.raises(ConfigError, match=rf"engine\.{name}=.* engine\.weights='shared'"):
        EngineConfig(weights="shared", **{name: value})


def test_engines_that_share_nothing_have_no_group():
    assert ShareGroups(None).join(3) is None
    assert handle_of(is_local=True).spec.pool.share_group is None
