import pytest

from raybatch.actors.crew_plan import CrewPlan, check_cluster, check_hosts, plan_crew
from raybatch.actors.records import PoolSpec
from raybatch.backends.options import check_share
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.stages.options import build_stage_config


def test_an_engine_fits_the_largest_host():
    check_hosts(4, [2, 4])


@pytest.mark.parametrize("hosts", [[], [2, 4]])
def test_an_engine_over_several_hosts_is_refused_with_the_way_out(hosts):
    with pytest.raises(ConfigError, match=r"asks for 8 GPUs .*distributed_executor_backend='ray'"):
        check_hosts(8, hosts)


def test_ranks_that_are_actors_may_take_the_gpus_of_all_hosts():
    check_cluster(6, [2, 4])
    with pytest.raises(ConfigError, match="asks for 8 GPUs and the cluster has 6"):
        check_cluster(8, [2, 4])


def spec_of(pool, **engine_kwargs):
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": engine_kwargs})
    return PoolSpec(model="none", backend=backend, engine=EngineConfig(), pool=pool)


@pytest.fixture
def gpus(monkeypatch):
    """Ray says that there are eight GPUs on two hosts."""
    hosts = [{"Alive": True, "Resources": {"GPU": 4.0, "CPU": 8.0}}] * 2
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": 8.0, "CPU": 16.0})
    monkeypatch.setattr("ray.nodes", lambda: hosts)


def test_each_rank_that_is_an_actor_takes_a_gpu_and_the_first_what_else_is_asked_for(gpus):
    pool = PoolConfig(accelerator_type="H100", num_cpus_per_replica=2, resources={"fast": 1})
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    plan = plan_crew(spec_of(pool, tensor_parallel_size=2, **options))

    rank = {"GPU": 1.0, "accelerator_type:H100": 0.001}
    assert plan.bundles == ({**rank, "CPU": 2, "fast": 1}, rank, rank, rank)
    assert plan.num_replicas == 2
    assert plan.asks_for() == "2 CPUs and 4.0 GPUs in a placement group of 4 bundles"


def test_given_bundles_are_taken_as_they_are(gpus):
    bundles = [{"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    spec = spec_of(
        PoolConfig(bundles=bundles), tensor_parallel_size=2, distributed_executor_backend="ray"
    )
    assert plan_crew(spec).bundles == tuple(bundles)


def test_given_bundles_with_a_gpu_lie_on_hosts_with_the_accelerator(gpus):
    bundles = [{"CPU": 1, "GPU": 1}, {"GPU": 1, "accelerator_type:H100": 0.5}, {"CPU": 1}]
    spec = spec_of(
        PoolConfig(bundles=bundles, accelerator_type="H100"),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    of_host = {"accelerator_type:H100": 0.001}
    assert plan_crew(spec).bundles == (bundles[0] | of_host, *bundles[1:])


def test_all_that_the_bundles_name_is_asked_for():
    bundles = ({"GPU": 1.0, "CPU": 2, "fast": 1}, {"GPU": 1.0, "fast": 2})
    plan = CrewPlan(num_replicas=1, num_cpus=0, num_gpus=2, num_engines_on_host=1, bundles=bundles)
    assert plan.total() == {"CPU": 2, "GPU": 2, "fast": 3}


@pytest.mark.parametrize(
    ("kwargs", "engine"),
    [({"gpu_memory_utilization": 0.45}, {}), ({}, {"kv_cache_bytes": 1 << 30})],
    ids=["share of the memory", "bytes"],
)
def test_engines_share_a_gpu_where_their_memory_is_bounded(kwargs, engine):
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": kwargs})
    check_share(0.5, backend, EngineConfig(**engine))
    with pytest.raises(ConfigError, match="gpu_memory_utilization, or the first takes all"):
        check_share(0.5, BackendConfig(kind="vllm"), EngineConfig())


def test_engines_that_share_a_gpu_without_a_bound_are_refused_when_a_stage_is_made(tmp_path):
    with pytest.raises(ConfigError, match=r"an engine has 0\.5 of a GPU"):
        build_stage_config(
            "demo", {"prompt": "{a}", "pool": {"num_gpus_per_replica": 0.5}}, where="test"
        )


def test_gpus_of_a_replica_are_refused_where_each_rank_takes_one(gpus):
    spec = spec_of(
        PoolConfig(num_gpus_per_replica=1),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )
    with pytest.raises(ConfigError, match=r"num_gpus_per_replica=1 has no effect .* 2 ranks"):
        plan_crew(spec)


def test_ranks_that_are_processes_need_no_group(gpus):
    plan = plan_crew(spec_of(PoolConfig(), tensor_parallel_size=2))
    assert plan == CrewPlan(num_replicas=4, num_cpus=0, num_gpus=2, num_engines_on_host=2)


def test_bundles_without_ranks_that_take_them_are_refused_with_the_way_out(gpus):
    spec = spec_of(PoolConfig(bundles=[{"GPU": 1}]), tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"pool\.bundles is for .* num_gpus_per_replica"):
        plan_crew(spec)


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
    with pytest.raises(ConfigError, match=r"pool\.bundles is for engines"):
        build_stage_config("m", options, where="LLMStage")
