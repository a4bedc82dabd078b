"""Replicas of vLLM that share feed-forward weights: refused options, and engines in processes."""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from raybatch.backends.registry import check_options
from raybatch.backends.vllm.args import vllm_options
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, RankError
from raybatch.records.share import ShareLink, ShareRank
from raybatch.records.types import Sampling
from tests.actors.pools import wait_until
from tests.engine.tiny_models import build
from tests.extensions.sharing.share_pools import (
    Repeated,
    has_restarted,
    pools_of,
    tokens_of_one,
    unique,
)
from tests.extensions.sharing.test_shared_modules import made
from tests.extensions.sharing.vllm_group import ENGINE, backend_of, outcomes_of
from tests.stages.support import make_tokenizer

NUM_LAYERS = 6
SHARED = EngineConfig(weights="shared")
SAMPLING = Sampling(max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 spreads an engine over several"),
        ({"pipeline_parallel_size": 2}, "one that shares weights has one; leave it out, or engine"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 spreads"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2 spreads"),
        ({"distributed_executor_backend": "mp"}, "which have no link to the other replicas"),
        ({"enforce_eager": False}, "enforce_eager=False captures steps"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 keeps weights elsewhere"),
        ({"offload_group_size": 4}, "offload_group_size=4 keeps weights"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode=True keeps weights"),
        ({"enable_lora": True}, "enable_lora=True puts adapters around"),
        ({"quantization": "fp8"}, "quantization='fp8' changes the layout of loaded weights"),
        ({"enable_dbo": True}, "computes two halves of a step at once"),
        ({"enable_eplb": True}, "moves experts"),
        ({"speculative_config": {"method": "ngram"}}, "has a second model"),
        ({"load_format": "tensorizer"}, "load_format='tensorizer' loads weights its own way"),
    ],
)
def test_an_option_that_shared_weights_exclude_is_refused_by_name(option, message):
    with pytest.raises(ConfigError, match=message):
        vllm_options(backend_of(**option), SHARED)
    # without shared weights the option is accepted
    vllm_options(backend_of(**option), EngineConfig())


def test_options_with_their_effective_value_are_accepted():
    kwargs = {
        "tensor_parallel_size": 1,
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "cpu_offload_gb": 0,
        "load_format": "safetensors",
        "enable_lora": False,
    }
    vllm_options(backend_of(**kwargs), SHARED)


def test_slots_are_an_option_of_vllm_where_weights_are_shared():
    engine = EngineConfig(weights="shared", device_weight_bytes="auto", weight_buffers=3)
    vllm_options(backend_of(), engine)
    with pytest.raises(ConfigError, match=r"weight_buffers are options of the native engine"):
        vllm_options(backend_of(), EngineConfig(weight_buffers=3))


@pytest.mark.parametrize("kind", ["transformers"])
def test_other_backends_share_no_weights(kind):
    with pytest.raises(ConfigError, match=f"engine.weights .* not of the {kind} backend"):
        check_options(BackendConfig(kind=kind), SHARED)


def save(folder, kind="qwen3", **config):
    make_tokenizer(folder, has_chat_template=False)
    build(kind, vocab_size=260, num_hidden_layers=NUM_LAYERS, **config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("shared") / "model")


@pytest.fixture(scope="module")
def expected(folder):
    """Return the tokens of an engine of vLLM with all weights."""
    return outcomes_of(folder, 1, [0])[0]["tokens"]


def alone(text):
    raise RankError("another replica of the group has ended")


def start_alone(folder, **options):
    from raybatch.backends.vllm.start import start_inner

    config = EngineConfig(**ENGINE | {"weights": "shared"} | options)
    return start_inner(folder, backend_of(), config, link=ShareLink(ShareRank(0, 2), alone))


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("size", "order"), [(2, [1, 0]), pytest.param(3, [2, 0, 1], marks=pytest.mark.slow)]
)
def test_engines_that_share_weights_answer_as_one_that_has_them_all(folder, expected, size, order):
    outcomes = outcomes_of(folder, size, order)
    # the first engine ends while the idle others own most of the weights
    assert [outcomes[rank]["tokens"] for rank in order] == [expected] * size
    whole = 0
    for rank, outcome in outcomes.items():
        held = {n: size for n, size in outcome["matrices"].items() if size}
        layers = {int(name.split(".layers.")[1].split(".")[0]) for name in held}
        assert layers == set(range(rank, NUM_LAYERS, size))
        assert len(held) == 2 * len(layers)
        assert outcome["restarts"] == 0
        assert "to the device: RuntimeError: the link" in outcome["failure"]
        assert outcome["copies"] >= NUM_LAYERS - len(layers)
        whole += sum(held.values())
        assert outcome["segment"] >= 4 * sum(held.values())
    # each weight is once in the group
    config = json.loads(Path(folder, "config.json").read_text())
    assert whole == NUM_LAYERS * 3 * config["hidden_size"] * config["intermediate_size"]


@pytest.mark.vllm
def test_experts_are_refused_on_a_cpu_as_its_kernels_change_their_layout(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    folder = save(tmp_path / "moe", "qwen3-moe", **sizes)
    with pytest.raises(ConfigError, match="CPU kernels of vLLM change the layout of experts"):
        start_alone(folder)


@pytest.mark.vllm
def test_an_engine_whose_group_ends_while_it_loads_does_not_start(folder):
    with pytest.raises(RankError, match="another replica of the group has ended"):
        start_alone(folder)


@pytest.mark.vllm
def test_too_few_slots_are_refused_while_the_model_is_made(folder):
    from raybatch.backends.vllm.start import start_inner

    link = ShareLink(ShareRank(0, 4), alone)
    config = EngineConfig(**ENGINE, weights="shared", weight_buffers=1)
    with pytest.raises(ConfigError, match=r"weight_buffers is 1, .* needs at least 3"):
        start_inner(folder, backend_of(), config, link=link)


@pytest.mark.vllm
def test_a_checkpoint_that_is_quantized_is_refused(tmp_path):
    folder = save(tmp_path / "model")
    path = Path(folder, "config.json")
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantized}))
    with pytest.raises(ConfigError, match=r"quantized models.*'fp8'"):
        start_alone(folder, dtype="bfloat16")


@pytest.mark.vllm
def test_a_model_of_two_stacks_of_layers_or_none_is_refused():
    from raybatch.backends.vllm.versions import adapter
    from raybatch_extensions.sharing.vllm import VllmShare

    share = VllmShare(ShareLink(ShareRank(0, 2), alone), SHARED, adapter())
    with pytest.raises(ConfigError, match=r"engine\.weights='shared': vLLM creates the layers"):
        share.finish("model")
    assert len(share.take(made("dense"))) > 1
    with pytest.raises(ConfigError, match="more than one stack of layers"):
        share.take(made("dense"))


@pytest.mark.vllm
def test_vllm_uses_the_given_device(folder):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from raybatch.backends.vllm.versions import adapter
    from raybatch_extensions.sharing.vllm import VllmShare

    link = ShareLink(ShareRank(0, 2), alone)
    share = VllmShare(link, EngineConfig(device="cuda:3", weights="shared"), adapter())
    config = EngineArgs(folder, **share.arguments({"dtype": "float32"})).create_engine_config()
    share.settle(config)
    *_, local_rank = UniProcExecutor._distributed_args(SimpleNamespace(vllm_config=config))
    assert local_rank == 3
    modes = config.compilation_config.mode, config.compilation_config.cudagraph_mode
    assert [mode.name for mode in modes] == ["NONE", "NONE"]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_group_of_a_pool_restarts_as_one_and_no_row_is_lost(folder):
    prompts = [np.array([i % 40, 7, 3], np.int32) for i in range(60)]
    options = {"block_size_tokens": 32, "kv_cache_bytes": 4 << 20}
    expected = tokens_of_one(folder, prompts, SAMPLING, **options)
    with pools_of(folder, kind="vllm", **options) as make:
        pool = make(pool={"replicas": 2, "share_group": 2})
        job = Repeated(pool, prompts, SAMPLING)

        def num_copying():
            return sum(replica.num_weight_copies > 0 for replica in pool.stats().replicas)

        wait_until(lambda: pool.stats().rows_done >= 4 and num_copying() == 2, timeout_s=200)
        before = pool.state().pids
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: has_restarted(pool, before), timeout_s=200)
        assert [expected] == unique(job.end())
        assert pool.stats().restarts == 2


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_engines_on_a_gpu_answer_as_one_that_has_all_weights(tmp_path, kind):
    # heads that kernels of GPUs know; both engines are on the same GPU
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    folder = save(tmp_path / "model", kind, **sizes)
    kwargs = {"enforce_eager": True, "gpu_memory_utilization": 0.3, "moe_backend": "triton"}
    options = {"dtype": "bfloat16", "kv_cache_bytes": 64 << 20}
    (whole,) = outcomes_of(folder, 1, [0], kwargs, **options).values()
    outcomes = outcomes_of(folder, 2, [1, 0], kwargs, **options)
    assert [outcome["tokens"] for outcome in outcomes.values()] == [whole["tokens"]] * 2
    assert all(outcome["copies"] for outcome in outcomes.values())
