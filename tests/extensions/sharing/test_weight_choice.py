"""Jobs whose replicas share weights where that is known to pay, and why they do not elsewhere."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.actors.replicas.placement import ClusterView, HostView
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import VllmBuild
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.demo import CHECKPOINT_PATH
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.stages.feeder import LLMStage
from raybatch_extensions.sharing.choice import choose_weights
from raybatch_extensions.sharing.decode_times import GPU_KINDS
from tests.policy.paper_models import LLAMA_3_1_70B_CONFIG
from tests.tiers import some

LLAMA_70B = LLAMA_3_1_70B_CONFIG
LLAMA_8B = LLAMA_70B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}


@pytest.fixture
def folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def hosts(*gpus, kind="H200"):
    return ClusterView(
        hosts=tuple(HostView(num_gpus=number, kinds=frozenset([kind])) for number in gpus),
        vllm=VllmBuild("gpu"),
    )


def choose(model, cluster, *, kind="native", options=None, pool=None, is_local=False, **engine):
    spec = PoolSpec(
        model=model,
        backend=BackendConfig(kind=kind, options=options or {}),
        engine=EngineConfig(weights="auto", **engine),
        pool=PoolConfig(**(pool or {})),
    )
    return choose_weights(spec, cluster, is_local=is_local)


@pytest.mark.parametrize("kind", ["native", "vllm"])
def test_a_model_that_no_gpu_holds_is_shared_by_a_host(folder, kind):
    choice = choose(folder(LLAMA_70B), hosts(8, 8), kind=kind)
    assert choice.share_group == 8
    assert choice.why.startswith("replicated weights do not fit: weights need 141.1 GB of 120.9 GB")


def test_a_model_whose_jobs_end_no_sooner_is_replicated(folder):
    choice = choose(folder(LLAMA_8B), hosts(8))
    assert choice.share_group is None
    assert "at assumed rates of H200" in choice.why


def test_a_model_that_leaves_little_memory_is_shared_where_jobs_end_sooner(folder):
    # of the 30 GB of a GPU that are usable, weights take 24
    model = LLAMA_8B | {"num_hidden_layers": 50}
    choice = choose(folder(model), hosts(4, kind="A100-40G"))
    assert choice.share_group == 4
    assert " replicated, " in choice.why


def test_a_model_that_leaves_room_for_as_many_rows_as_a_batch_may_have_is_replicated(folder):
    model, cluster = folder(LLAMA_8B | {"num_hidden_layers": 50}), hosts(4, kind="A100-40G")
    choice = choose(model, cluster, max_num_seqs=4)
    assert choice.share_group is None
    assert " replicated, " in choice.why


def test_a_share_of_memory_is_that_of_the_engine(folder):
    def share(utilisation):
        kwargs = {"gpu_memory_utilization": utilisation}
        options = {"engine_kwargs": kwargs}
        return choose(folder(LLAMA_8B), hosts(8), kind="vllm", options=options).share_group

    assert (share(0.9), share(0.15)) == (None, 8)


@pytest.mark.parametrize(
    ("gpus", "replicas", "size"),
    some([((8, 4), 12, 4), ((8,), 7, 7), ((8,), 6, 6), ((8, 8), 8, 8)]),
)
def test_groups_are_as_large_as_hosts_and_replicas_allow(folder, gpus, replicas, size):
    pool = {"replicas": replicas}
    assert choose(folder(LLAMA_70B), hosts(*gpus), pool=pool).share_group == size


def test_a_model_that_leaves_memory_for_no_row_is_shared(folder):
    choice = choose(folder(LLAMA_8B | {"num_hidden_layers": 62}), hosts(4, kind="A100-40G"))
    assert choice.share_group == 4
    assert "replicated weights do not fit: KV memory for " in choice.why


@pytest.mark.parametrize(
    ("cluster", "reason", "options"),
    [
        (ClusterView(hosts=(HostView(num_cpus=8),)), "engines run on CPUs", {}),
        (ClusterView(), "no host with a GPU yet", {"device": "cuda"}),
        (hosts(8), "engines run on CPUs", {"is_local": True}),
        (
            hosts(1),
            "groups of two or more replicas on one host, which 1 replicas on hosts of 1 GPUs",
            {},
        ),
        (hosts(8, 5), "which 13 replicas on hosts of 5, 8 GPUs cannot form", {}),
        (hosts(8, kind="V100"), "does not know the GPU V100, only A100, A100-40G", {}),
        (hosts(4, 4), "7 replicas on hosts of 4 GPUs cannot form", {"pool": {"replicas": 7}}),
        (
            hosts(8),
            "must not change (pool.min_replicas",
            {"pool": {"min_replicas": 1, "max_replicas": 8}},
        ),
        (hosts(8), "does not support quantized weights", {"quantization": "int8"}),
        (hosts(8), "does not support a quantized KV cache", {"kv_cache_dtype": "int8"}),
        (hosts(8), "options fix the size of the KV cache", {"kv_cache_bytes": 10**9}),
        (
            hosts(8),
            "options fix the size of the KV cache",
            {"kind": "vllm", "options": {"engine_kwargs": {"num_gpu_blocks_override": 99}}},
        ),
        (hosts(8), "engine.kv_offload=True cannot be set with", {"kv_offload": True}),
        (hosts(8), "not of the transformers backend", {"kind": "transformers"}),
        (
            hosts(8),
            "tensor_parallel_size=2 spreads an engine over several",
            {"kind": "vllm", "options": {"engine_kwargs": {"tensor_parallel_size": 2}}},
        ),
        (
            hosts(8),
            "enforce_eager=False",
            {"kind": "vllm", "options": {"engine_kwargs": {"enforce_eager": False}}},
        ),
    ],
)
def test_replicas_hold_all_weights_and_the_reason_is_told(folder, cluster, reason, options):
    choice = choose(folder(LLAMA_70B), cluster, **options)
    assert choice.share_group is None
    assert reason in str(choice)
    assert str(choice).startswith("replicated: ")


def test_hosts_of_several_kinds_and_models_that_are_not_there_share_nothing(folder, tmp_path):
    mixed = ClusterView(
        hosts=tuple(HostView(num_gpus=8, kinds=frozenset([kind])) for kind in ("H100", "H200"))
    )
    assert "reports 2 kinds" in choose(folder(LLAMA_70B), mixed).why
    named = choose(folder(LLAMA_70B), mixed, pool={"accelerator_type": "H200"})
    assert named.share_group == 8
    assert "nowhere" in choose(str(tmp_path / "nowhere"), hosts(8)).why


def test_rates_are_shares_of_what_data_sheets_say():
    assert GPU_KINDS["H100"].rates.flops == pytest.approx(0.55 * 989e12)
    assert GPU_KINDS["H100"].memory_bytes == 80 * 10**9


@pytest.mark.usefixtures("locally", "cluster_where_marked")
@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_job_says_what_it_chose_and_runs(tmp_path, executor):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), source)
    stage = LLMStage(
        "demo", prompt="{text}", sampling={"max_tokens": 2}, engine={"weights": "auto"}
    )
    job = Job(source, tmp_path / "out", stage, executor=executor)
    explained = job.explain(measure=False)
    assert explained.weights.startswith("replicated: engines run on CPUs")
    assert explained.weights in str(explained)
    report = job.run()
    assert report.rows_out == 2
    assert report.plan.plan.weights == explained.weights


@pytest.mark.parametrize(("backend", "least"), [("native", 1), ("vllm", 3)])
def test_too_few_buffers_are_refused_before_anything_starts(tmp_path, backend, least):
    """Of the demo's model, whose blocks are cut; vLLM shares whole ones."""
    if least > 1:
        with pytest.raises(ConfigError, match=f"needs at least {least}"):
            explain("demo", tmp_path, backend, least - 1)
    assert explain("demo", tmp_path, backend, least).weights == "shared by 4 replicas"


def test_buffers_of_a_model_that_only_vllm_knows_are_left_to_it(tmp_path):
    model = shutil.copytree(CHECKPOINT_PATH, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    (model / "config.json").write_text(json.dumps(config))
    assert explain(str(model), tmp_path, "vllm", 4).weights == "shared by 4 replicas"
    with pytest.raises(ConfigError, match="Phi3ForCausalLM is not supported by the native"):
        explain(str(model), tmp_path, "native", 4)


def explain(model, folder, backend, weight_buffers):
    """Explain a job without Ray, of a group of four."""
    source = folder / "in.parquet"
    pq.write_table(pa.table({"text": ["a"]}), source)
    stage = LLMStage(
        model,
        prompt="{text}",
        backend=backend,
        engine={"weights": "shared", "weight_buffers": weight_buffers},
        pool={"replicas": 4, "share_group": 4},
    )
    return Job(source, folder / "out", stage, executor="local").explain(measure=False)


def test_a_job_that_is_to_be_simulated_says_what_simulates_it_where_that_is_missing(
    folder, monkeypatch
):
    monkeypatch.setattr("raybatch_extensions.sharing.choice.pool_extension", lambda name: None)
    with pytest.raises(ConfigError, match=r'engine\.weights="auto".* -e \./lab.*shared'):
        choose(folder(LLAMA_70B), hosts(8, 8))
    # what needs no simulation is decided as before
    assert choose(folder(LLAMA_70B), hosts(0)).share_group is None
