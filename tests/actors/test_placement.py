from dataclasses import replace

import pytest

from raybatch.actors.replicas.placement import (
    ClusterView,
    HostView,
    Placement,
    gpu_warnings,
    most_on_a_host,
    plan_placement,
    requested_of_ray,
    settled,
)
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import VllmBuild, check_share
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.rows.options import build_stage_config


def spec_of(pool, **engine_kwargs):
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": engine_kwargs})
    return PoolSpec(model="none", backend=backend, engine=EngineConfig(), pool=pool)


# eight GPUs on two hosts, and a cluster that has none yet
H100_HOST = HostView(num_gpus=4, num_cpus=8, kinds=frozenset({"H100"}))
GPUS = ClusterView(hosts=(H100_HOST, H100_HOST), cores_of_driver=4)
CPUS = ClusterView(hosts=(HostView(num_cpus=8), HostView()), cores_of_driver=4)


# six GPUs on two hosts
UNEVEN = ClusterView(hosts=(HostView(num_gpus=2, num_cpus=8), HostView(num_gpus=4, num_cpus=8)))


def test_an_engine_fits_the_largest_host():
    assert plan_placement(spec_of(PoolConfig(), tensor_parallel_size=4), UNEVEN).num_gpus == 4


def test_an_engine_over_several_hosts_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .*distributed_executor_backend='ray'"):
        plan_placement(spec_of(PoolConfig(), tensor_parallel_size=8), UNEVEN)


def test_ranks_that_are_actors_may_take_the_gpus_of_all_hosts():
    options = {"distributed_executor_backend": "ray"}
    assert plan_placement(spec_of(PoolConfig(), tensor_parallel_size=6, **options), UNEVEN).bundles
    with pytest.raises(ConfigError, match="needs 8 GPUs and the cluster has 6"):
        plan_placement(spec_of(PoolConfig(), tensor_parallel_size=8, **options), UNEVEN)


def test_each_rank_that_is_an_actor_takes_a_gpu_and_the_first_what_else_is_asked_for():
    pool = PoolConfig(accelerator_type="H100", num_cpus_per_replica=2, resources={"fast": 1})
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    plan = plan_placement(spec_of(pool, tensor_parallel_size=2, **options), GPUS)

    rank = {"GPU": 1.0, "accelerator_type:H100": 0.001}
    assert plan.bundles == ({**rank, "CPU": 2, "fast": 1}, rank, rank, rank)
    assert plan.num_replicas == 2
    assert (
        requested_of_ray(plan, PoolConfig())
        == "2 CPUs and 4 GPUs in a placement group of 4 bundles"
    )


def test_given_bundles_are_taken_as_they_are():
    bundles = [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    spec = spec_of(
        PoolConfig(bundles=bundles), tensor_parallel_size=2, distributed_executor_backend="ray"
    )
    assert plan_placement(spec, GPUS).bundles == tuple(bundles)


def test_given_bundles_with_a_gpu_lie_on_hosts_with_the_accelerator():
    bundles = [{"CPU": 1, "GPU": 1}, {"GPU": 1, "accelerator_type:H100": 0.5}, {"CPU": 1}]
    spec = spec_of(
        PoolConfig(bundles=bundles, accelerator_type="H100"),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    of_host = {"accelerator_type:H100": 0.001}
    assert plan_placement(spec, GPUS).bundles == (bundles[0] | of_host, *bundles[1:])


def test_all_that_the_bundles_name_is_asked_for():
    bundles = ({"GPU": 1.0, "CPU": 2, "fast": 1}, {"GPU": 1.0, "fast": 2})
    plan = Placement(num_replicas=1, num_cpus=0, num_gpus=2, num_engines_on_host=1, bundles=bundles)
    assert plan.total() == {"CPU": 2, "GPU": 2, "fast": 3}


@pytest.mark.parametrize(
    ("kwargs", "engine"),
    [({"gpu_memory_utilization": 0.45}, {}), ({}, {"kv_cache_bytes": 1 << 30})],
    ids=["share of the memory", "bytes"],
)
def test_engines_share_a_gpu_where_their_memory_is_bounded(kwargs, engine):
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": kwargs})
    check_share(0.5, backend, EngineConfig(**engine))
    with pytest.raises(ConfigError, match=r"engine_kwargs\.gpu_memory_utilization"):
        check_share(0.5, BackendConfig(kind="vllm"), EngineConfig())


def test_engines_that_share_a_gpu_without_a_bound_are_refused_when_a_stage_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"an engine has 0\.5 of a GPU"):
        build_stage_config(
            "demo", {"prompt": "{a}", "pool": {"num_gpus_per_replica": 0.5}}, where="test"
        )


def test_gpus_of_a_replica_are_refused_where_each_rank_takes_one():
    spec = spec_of(
        PoolConfig(num_gpus_per_replica=1),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    with pytest.raises(ConfigError, match=r"num_gpus_per_replica=1 has no effect .* 2 ranks"):
        plan_placement(spec, GPUS)


def test_ranks_that_are_processes_need_no_group():
    plan = plan_placement(spec_of(PoolConfig(), tensor_parallel_size=2), GPUS)
    assert plan == Placement(num_replicas=4, num_cpus=0, num_gpus=2, num_engines_on_host=2)


def test_bundles_without_ranks_that_take_them_are_refused_with_the_way_out():
    spec = spec_of(PoolConfig(bundles=[{"GPU": 1}]), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"pool\.bundles .* num_gpus_per_replica"):
        plan_placement(spec, GPUS)


@pytest.mark.parametrize("bundles", [[], {"GPU": 1}, [{}], [{"GPU": 0}], [{"GPU": "1"}]])
def test_bundles_that_are_none_are_refused(bundles):
    with pytest.raises(ConfigError, match=r"pool\.bundles"):
        PoolConfig(bundles=bundles)


@pytest.mark.parametrize(
    "option",
    [{"num_cpus_per_replica": 1}, {"num_gpus_per_replica": 0}, {"resources": {"fast": 1}}],
    ids=lambda option: next(iter(option)),
)
def test_what_bundles_say_is_refused_beside_them(option):
    with pytest.raises(ConfigError, match=rf"pool\.{next(iter(option))}=.* into a bundle"):
        PoolConfig(bundles=[{"GPU": 1}], **option)


def test_a_stage_tells_options_of_its_pool_that_say_nothing_of_its_engines():
    options = {"pool": {"bundles": [{"GPU": 1}]}, "backend": "vllm"}
    with pytest.raises(ConfigError, match=r"pool\.bundles needs"):
        build_stage_config("m", options, where="LLMStage")


def placement_of(cluster, kind, pool, device="auto"):
    """Return replicas, GPUs of each, and engines on a host."""
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind=kind),
        engine=EngineConfig(device=device),
        pool=PoolConfig(**pool),
    )
    plan = plan_placement(spec, cluster)
    return plan.num_replicas, plan.num_gpus, plan.num_engines_on_host


@pytest.mark.parametrize(
    ("kind", "pool", "device", "expected"),
    [
        ("auto", {}, "auto", (8, 1, 4)),
        ("auto", {}, "cpu", (4, 0, 2)),
        ("vllm", {}, "auto", (8, 1, 4)),
        ("vllm", {"replicas": 2}, "auto", (2, 1, 1)),
        ("native", {"num_gpus_per_replica": 2}, "auto", (4, 2, 2)),
        ("native", {"num_gpus_per_replica": 0}, "auto", (4, 0, 2)),
        ("fake", {"accelerator_type": "H100"}, "auto", (4, 0, 2)),
        ("openai", {}, "auto", (1, 0, 1)),
    ],
)
def test_a_crew_on_gpus(kind, pool, device, expected):
    assert placement_of(GPUS, kind, pool, device) == expected


@pytest.mark.parametrize(
    ("kind", "pool", "device", "expected"),
    [
        ("auto", {}, "auto", (4, 0, 4)),
        ("auto", {"replicas": 8}, "auto", (8, 0, 8)),
        ("auto", {"replicas": 8, "accelerator_type": "H100"}, "auto", (8, 1, 8)),
        ("native", {"accelerator_type": "L4"}, "auto", (1, 1, 1)),
        ("native", {"accelerator_type": "TPU-V4", "replicas": 2}, "auto", (2, 0, 2)),
        ("native", {"num_gpus_per_replica": 2, "replicas": 3}, "auto", (3, 2, 3)),
        ("native", {"replicas": 2}, "cuda", (2, 1, 2)),
        ("vllm", {}, "auto", (4, 0, 4)),
        ("vllm", {"replicas": 8}, "auto", (8, 1, 8)),
        ("vllm", {"replicas": 8}, "cpu", (8, 0, 8)),
        ("vllm", {"replicas": 8, "accelerator_type": "H100"}, "cpu", (8, 0, 8)),
        ("fake", {"replicas": 8, "accelerator_type": "H100"}, "auto", (8, 0, 8)),
    ],
)
def test_options_that_mean_gpus_ask_for_them_where_there_are_none_yet(kind, pool, device, expected):
    assert placement_of(CPUS, kind, pool, device) == expected


def test_a_driver_with_a_vllm_for_cpus_asks_for_no_gpus():
    cluster = replace(CPUS, vllm=VllmBuild("cpu"))
    assert placement_of(cluster, "vllm", {"replicas": 2}) == (2, 0, 2)
    assert placement_of(cluster, "vllm", {"replicas": 2, "accelerator_type": "L4"}) == (2, 1, 2)


@pytest.mark.parametrize(("weights", "kind"), [("replicated", "vllm"), ("shared", "native")])
def test_weights_that_are_shared_are_no_reason_for_vllm(weights, kind):
    group = None if weights == "replicated" else 2
    pool = PoolConfig(replicas=2, share_group=group)
    engine = EngineConfig(weights=weights)
    spec = PoolSpec(model="m", backend=BackendConfig(), engine=engine, pool=pool)
    found, _ = settled(spec, GPUS, vllm=lambda: VllmBuild("gpu"))
    assert found.backend.kind == kind


def test_a_group_asks_for_what_one_host_has():
    pool = PoolConfig(replicas=4, share_group=4, num_cpus_per_replica=3, num_gpus_per_replica=0)
    engine = EngineConfig(weights="shared", device="cpu")
    spec = PoolSpec(model="m", backend=BackendConfig(kind="native"), engine=engine, pool=pool)
    with pytest.raises(ConfigError, match=r"needs 12 CPUs on one host, .* has 8"):
        plan_placement(spec, CPUS)
    fits = replace(spec, pool=replace(pool, num_cpus_per_replica=2))
    assert plan_placement(fits, CPUS).num_replicas == 4
    # hosts are still to come
    assert plan_placement(spec, ClusterView()).num_replicas == 4


def test_hosts_to_come_may_have_the_gpus_of_a_large_engine():
    plan = plan_placement(spec_of(PoolConfig(replicas=2), tensor_parallel_size=8), CPUS)
    assert (plan.num_replicas, plan.num_gpus) == (2, 8)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    assert len(plan_placement(spec_of(PoolConfig(), **ranks), CPUS).bundles) == 2


def warnings_of(cluster, kind, **pool):
    spec = PoolSpec(
        model="none",
        backend=BackendConfig(kind=kind),
        engine=EngineConfig(),
        pool=PoolConfig(**pool),
    )
    return gpu_warnings(spec, plan_placement(spec, cluster), cluster)


def test_a_pool_of_native_engines_on_gpus_tells_that_nobody_has_tried_it():
    (message,) = warnings_of(GPUS, "native")
    assert "the native engine is untested on GPUs" in message
    assert warnings_of(CPUS, "native") == warnings_of(GPUS, "vllm") == []


def test_a_pool_that_waits_for_hosts_with_gpus_says_so():
    (message,) = warnings_of(CPUS, "vllm", replicas=2, accelerator_type="H100")
    assert "each engine needs 0 CPUs and 1 GPUs, a host with H100" in message
    assert "engine.device='cpu'" in message


# eight GPUs of one kind on a host, two of another on a second
UNLIKE = ClusterView(
    hosts=(
        HostView(num_gpus=8, num_cpus=8, kinds=frozenset({"H100"})),
        HostView(num_gpus=2, num_cpus=8, kinds=frozenset({"L4"})),
        HostView(num_cpus=8),
    )
)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ({}, (10, 1, 8)),
        ({"accelerator_type": "H100"}, (8, 1, 8)),
        ({"accelerator_type": "L4"}, (2, 1, 2)),
        ({"accelerator_type": ["H100", "L4"]}, (10, 1, 8)),
        ({"accelerator_type": ["L4", "A100"]}, (2, 1, 2)),
        ({"accelerator_type": "A100"}, (1, 1, 1)),
        ({"replicas": 4}, (4, 1, 2)),
        ({"num_gpus_per_replica": 3}, (2, 3, 2)),
    ],
    ids=str,
)
def test_engines_are_as_many_as_hosts_of_their_kinds_hold(pool, expected):
    assert placement_of(UNLIKE, "native", pool) == expected


def test_engines_that_share_gpus_are_as_many_as_these_hold():
    pool = PoolConfig(num_gpus_per_replica=0.1)
    engine = EngineConfig(kv_cache_bytes=1 << 30)
    spec = PoolSpec(model="m", backend=BackendConfig(kind="native"), engine=engine, pool=pool)
    assert plan_placement(spec, UNLIKE).num_replicas == 100


@pytest.mark.parametrize(
    ("num_engines", "room", "expected"),
    [(4, [4, 4], 2), (9, [8, 1], 8), (3, [], 3), (5, [1, 1], 3), (1, [8, 8], 1), (6, [2, 4], 4)],
)
def test_engines_spread_over_hosts_as_far_as_there_is_room(num_engines, room, expected):
    assert most_on_a_host(num_engines, room) == expected


def test_a_pool_of_several_kinds_says_which():
    pool = PoolConfig(accelerator_type=["H100", "L4"])
    plan = Placement(num_replicas=1, num_cpus=0, num_gpus=1, num_engines_on_host=1)
    assert requested_of_ray(plan, pool) == "0 CPUs and 1 GPUs, a host with H100 or L4"
    (message,) = warnings_of(CPUS, "vllm", accelerator_type=["H100", "L4"])
    assert message.startswith("the cluster has no H100 or L4 now")


@pytest.mark.parametrize("kinds", ["", [], ["H100", ""]])
def test_kinds_without_a_name_are_refused(kinds):
    with pytest.raises(ConfigError, match=r"pool\.accelerator_type must be a name such as H100"):
        PoolConfig(accelerator_type=kinds)


@pytest.mark.parametrize(
    ("pool", "numbers"),
    [
        ({}, (4, None)),
        ({"replicas": 3}, (3, None)),
        ({"min_replicas": 2}, (4, 2)),
        ({"max_replicas": 3}, (3, 1)),
        ({"min_replicas": 6}, (6, 6)),
        ({"min_replicas": 2, "max_replicas": 9}, (9, 2)),
    ],
)
def test_a_pool_whose_number_may_change_begins_with_its_least(pool, numbers):
    plan = plan_placement(spec_of(PoolConfig(**pool), tensor_parallel_size=2), GPUS)
    assert (plan.num_replicas, plan.num_first) == numbers


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 .* max_replicas=2"),
        ({"min_replicas": 3, "replicas": 3}, "replicas=3 fixes it"),
        ({"max_replicas": 3, "replicas": 3}, "replicas=3 fixes it"),
        ({"max_replicas": 0}, "max_replicas"),
    ],
)
def test_numbers_of_engines_that_contradict_each_other_are_refused(pool, why):
    with pytest.raises(ConfigError, match=why):
        PoolConfig(**pool)
