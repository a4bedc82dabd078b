"""Replicas that share weights start and end together, and no row is lost or changed by it."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from raybatch.actors.executors.local_pools import plan_local_placement
from raybatch.actors.installed_extensions import extensions_of
from raybatch.actors.replicas.placement import ClusterView, plan_placement
from raybatch.backends.choice import check_pool
from raybatch.config import EngineConfig
from raybatch.errors import ConfigError, ReplicaError
from raybatch.records.types import Sampling
from tests.actors.pools import Background, generate, handle_of, table_of, tokens_of, wait_until
from tests.extensions.sharing.share_pools import (
    Repeated,
    has_restarted,
    pools_of,
    prompts_of,
    spec_of,
    tokens_of_one,
    unique,
)
from tests.tiers import some

NUM_TOKENS = 24
# of a call, and of one that is made again and again until the test has seen what it waits for
NUM_ROWS, FEW_ROWS = 120, 40
SAMPLING = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("shared_cache", "warm_processes")


@pytest.fixture
def pools(share_model):
    """Makes pools of the native engine that end with their test."""
    with pools_of(share_model, kv_cache_bytes=1 << 20) as make:
        yield make


@pytest.fixture(scope="module")
def expected(share_model):
    return tokens_of_one(share_model, prompts_of(NUM_ROWS), SAMPLING, kv_cache_bytes=1 << 20)


@pytest.mark.parametrize("size", some([2, 4]))
def test_rows_are_those_of_replicas_that_have_all_weights(pools, expected, size):
    handle = pools(pool={"replicas": size, "share_group": size})
    results = generate(handle, table_of(prompts_of(NUM_ROWS)), (SAMPLING,))
    assert expected == tokens_of(results)
    stats = handle.stats()
    assert len(stats.replicas) == size
    assert all(replica.num_weight_copies > 0 for replica in stats.replicas)
    assert sum(replica.num_failed_copies for replica in stats.replicas) == 0


def mapped(pid):
    """The segments that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:raybatch-weights" in line}


@pytest.mark.parametrize("size", some([2, 4]))
def test_a_killed_member_ends_its_group_and_no_row_is_lost(pools, expected, size):
    handle = pools(pool={"replicas": size, "share_group": size})
    job = Repeated(handle, prompts_of(FEW_ROWS), SAMPLING)
    wait_until(lambda: handle.stats().rows_done >= 8 and len(handle.state().pids) == size)
    before = handle.state().pids
    # each has its own and those of the others
    assert {len(mapped(pid)) for pid in before} == {size}
    os.kill(before[-1], signal.SIGKILL)
    wait_until(lambda: has_restarted(handle, before))
    assert [expected[:FEW_ROWS]] == unique(job.end())
    assert handle.stats().restarts == size
    assert {len(mapped(pid)) for pid in handle.state().pids} == {size}
    handle.shutdown()
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith("raybatch-")]


@pytest.mark.slow
def test_another_group_goes_on(pools, expected):
    handle = pools(pool={"replicas": 4, "share_group": 2})
    job = Repeated(handle, prompts_of(FEW_ROWS), SAMPLING)
    wait_until(lambda: handle.stats().rows_done >= 8 and len(handle.state().pids) == 4)
    before = set(handle.state().pids)
    dead = min(before)
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: handle.stats().restarts == 2 and len(handle.state().pids) == 4)
    assert [expected[:FEW_ROWS]] == unique(job.end())
    assert len(before & set(handle.state().pids)) == 2


@pytest.mark.slow
def test_a_group_that_rested_starts_again(pools, expected):
    handle = pools(pool={"replicas": 2, "share_group": 2, "idle_release_s": 0.2})
    for _ in range(2):
        results = generate(handle, table_of(prompts_of(FEW_ROWS)), (SAMPLING,))
        assert expected[:FEW_ROWS] == tokens_of(results)
        wait_until(lambda: not handle.state().pids)
    assert handle.stats().restarts == 0


@pytest.mark.slow
def test_an_engine_that_leaves_takes_its_group_along(pools, expected):
    handle = pools(pool={"replicas": 4, "share_group": 2})
    job = Background(handle, prompts_of(NUM_ROWS), sampling=SAMPLING)
    wait_until(lambda: handle.stats().rows_done >= 8 and len(handle.state().pids) == 4)
    before = set(handle.state().pids)
    os.kill(min(before), signal.SIGTERM)
    results = job.join()
    assert expected == tokens_of(results)
    assert {1} == set(results["attempts"].to_pylist())
    wait_until(lambda: len(before & set(handle.state().pids)) == 2)


@pytest.mark.ray
@pytest.mark.slow
def test_groups_run_on_ray(pools, expected, ray_cluster):
    handle = pools(is_local=False, pool={"replicas": 2, "share_group": 2})
    job = Repeated(handle, prompts_of(FEW_ROWS), SAMPLING)
    wait_until(lambda: handle.stats().rows_done >= 8 and len(handle.state().pids) == 2)
    before = handle.state().pids
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: has_restarted(handle, before))
    assert [expected[:FEW_ROWS]] == unique(job.end())


def test_a_group_that_cannot_start_fails_the_pool_with_the_cause(pools):
    handle = pools(max_model_len=999_999, pool={"replicas": 2, "share_group": 2})
    with pytest.raises(ReplicaError, match="max_model_len"):
        generate(handle, table_of(prompts_of(4)), (SAMPLING,))


@pytest.mark.parametrize(
    ("pool", "engine", "reported"),
    [
        ({"replicas": 3, "share_group": 2}, {"weights": "shared"}, "multiple of 2, such as 2"),
        ({"max_replicas": 4, "share_group": 2}, {"weights": "shared"}, "set pool.replicas"),
        ({"replicas": 2, "share_group": 2}, {}, "set engine.weights='shared'"),
        ({"replicas": 2}, {"weights": "shared"}, "needs pool.share_group"),
        ({"replicas": 2, "share_group": 2}, {"weights": "auto"}, "chooses groups itself"),
    ],
)
def test_options_that_make_no_groups_are_refused(pool, engine, reported):
    spec = spec_of("none", pool=pool, **{"weights": "replicated"} | engine)

    def check(place):
        check_pool(spec.pool, spec.backend, spec.engine)
        place(spec)

    for place in (plan_local_placement, partial(plan_placement, cluster=ClusterView())):
        with pytest.raises(ConfigError, match=reported):
            check(place)


@pytest.mark.parametrize("name", ["device_weight_bytes", "kv_offload", "cuda_graphs"])
def test_what_shared_weights_cannot_be_combined_with_is_refused_by_name(name):
    value = {"device_weight_bytes": 10, "kv_offload": True, "cuda_graphs": True}[name]
    with pytest.raises(ConfigError, match=rf"engine\.{name}=.* engine\.weights='shared'"):
        EngineConfig(weights="shared", **{name: value})


def test_engines_that_share_nothing_have_no_group():
    spec = handle_of(is_local=True).spec
    assert spec.pool.share_group is None
    assert () == extensions_of(spec, plan_local_placement(spec))
