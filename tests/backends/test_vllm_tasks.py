"""Vectors, scores and adapters of vLLM behind the backend, beside those of vLLM alone."""

import os

import numpy as np
import pyarrow as pa
import pytest
import torch

from raybatch.actors.wire.columns import RequestReader
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig, PlanConfig
from raybatch.planning.run import RowDescriber
from raybatch.records.payload import LORA
from raybatch.records.types import Request, Sampling
from raybatch.rows.options import build_stage_config
from tests.backends.lora import write_adapter
from tests.backends.vllm_engines import BLOCK_TOKENS
from tests.engine.tiny_models import build
from tests.stages.support import EOS, make_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# vLLM inside this process, also where nothing of ours has started it
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

TEXTS = ["a", "one text", "x" * 70, "x" * 70 + "y", "another, longer text " * 5]
PAIRS = [("what", "a text"), ("what", "x" * 50), ("who is it", "nobody"), ("x" * 40, "x" * 40)]
KWARGS = {"num_gpu_blocks_override": 64, "seed": 0}
KV_BYTES = 1 << 28
ENGINE = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "block_size_tokens": BLOCK_TOKENS,
    "kv_cache_bytes": KV_BYTES,
}
# an engine that is collected ends what all of this process share
OPEN_ENGINES = []


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    """A causal model as Qwen3-Embedding: a token at the end of each text."""
    folder = make_tokenizer(
        tmp_path_factory.mktemp("causal") / "m", frame=True, has_chat_template=False
    )
    build("qwen3", vocab_size=260).save_pretrained(folder)
    return folder


def classifier(folder, num_labels, *, has_types=True):
    import transformers

    make_tokenizer(folder, frame=True, has_types=has_types, has_chat_template=False)
    torch.manual_seed(num_labels)
    config = transformers.BertConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        num_labels=num_labels,
        pad_token_id=EOS,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifies(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("bert") / "three", 3)


@pytest.fixture(scope="module")
def crosses(tmp_path_factory):
    return classifier(tmp_path_factory.mktemp("bert") / "one", 1)


def run(model, backend, requests, config=None):
    """Completions by request, and the engine."""
    engine = create_backend(model, backend, config or EngineConfig(**ENGINE))
    OPEN_ENGINES.append(engine)
    engine.submit(requests)
    done = {}
    while engine.num_unfinished():
        done |= {c.request_id: c for c in engine.poll()}
    return done, engine


def ours(model, task, table, *, kwargs=None, **options):
    """Vectors of rows through stage and backend, as the engine actor drives it."""
    backend = {"kind": "vllm", "options": {"engine_kwargs": {**KWARGS, **(kwargs or {})}}}
    config = build_stage_config(
        str(model), {"task": task, "backend": backend, "engine": ENGINE} | options, where="test"
    )
    prepared, _ = RowDescriber(config, PlanConfig())(table)
    assert [p.error for p in prepared.prompts] == [""] * table.num_rows
    reader = RequestReader(prepared.requests, prepared.samplings)
    requests = reader.read(0, table.num_rows, 0)
    done, engine = run(config.model, config.backend, requests, config.engine)
    stats = engine.stats()
    assert [done[i].error for i in range(table.num_rows)] == [""] * table.num_rows
    return (
        [done[i].vector for i in range(table.num_rows)],
        [done[i].num_cached_tokens for i in range(table.num_rows)],
        stats,
    )


def theirs(model, **kwargs):
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=KV_BYTES,
        disable_log_stats=True,
        **KWARGS,
        **kwargs,
    )
    OPEN_ENGINES.append(llm)
    return llm


def assert_close(expected, found):
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-4, atol=1e-5)


def test_embeddings_are_those_of_vllm_alone(causal):
    expected = [
        o.outputs.embedding for o in theirs(causal, runner="pooling", convert="embed").embed(TEXTS)
    ]
    found, cached, stats = ours(causal, "embed", pa.table({"text": TEXTS}), prompt="{text}")
    assert_close(expected, found)
    assert (stats.generated_tokens, sum(cached) > 0) == (0, True)


def test_bare_embeddings_are_those_of_vllm_alone(causal):
    from vllm import PoolingParams

    params = PoolingParams(use_activation=False)
    outputs = theirs(causal, runner="pooling", convert="embed").embed(TEXTS, pooling_params=params)
    found, *_ = ours(
        causal, "embed", pa.table({"text": TEXTS}), prompt="{text}", pooling={"normalize": False}
    )
    assert_close([o.outputs.embedding for o in outputs], found)
    assert not np.allclose([np.linalg.norm(v) for v in found], 1)


def test_embeddings_of_means_share_no_prefix(causal):
    # a prefix that is cached has no states to take the mean of
    kwargs = {"pooler_config": {"pooling_type": "MEAN"}}
    found, cached, _ = ours(
        causal, "embed", pa.table({"text": TEXTS}), prompt="{text}", kwargs=kwargs
    )
    outputs = theirs(causal, runner="pooling", convert="embed", **kwargs).embed(TEXTS)
    assert_close([o.outputs.embedding for o in outputs], found)
    assert sum(cached) == 0


def test_a_prompt_may_fill_context_and_cache(causal):
    # vLLM keeps one block for itself
    engine = ENGINE | {"max_model_len": 2 * BLOCK_TOKENS}
    texts = ["x" * (2 * BLOCK_TOKENS - 2), "y" * (2 * BLOCK_TOKENS - 2)]
    found, *_ = ours(
        causal,
        "embed",
        pa.table({"text": texts}),
        prompt="{text}",
        kwargs={"num_gpu_blocks_override": 3},
        engine=engine,
    )
    assert len(found) == 2


def test_probabilities_are_those_of_vllm_alone(classifies):
    expected = [o.outputs.probs for o in theirs(classifies, runner="pooling").classify(TEXTS)]
    found, *_ = ours(classifies, "classify", pa.table({"text": TEXTS}), prompt="{text}")
    assert_close(expected, found)
    assert [len(vector) for vector in found] == [3] * len(TEXTS)


def pairs_table():
    queries, documents = zip(*PAIRS, strict=True)
    return pa.table({"query": queries, "document": documents})


@pytest.mark.parametrize("name", ["crosses", "causal"])
def test_scores_of_pairs_are_those_of_vllm_alone(name, request):
    model = request.getfixturevalue(name)
    queries, documents = (list(texts) for texts in zip(*PAIRS, strict=True))
    expected = [
        [o.outputs.score] for o in theirs(model, runner="pooling").score(queries, documents)
    ]
    found, *_ = ours(model, "score", pairs_table())
    assert_close(expected, found)
    assert len({float(vector[0]) for vector in found}) > 1


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        write_adapter(folder / name, seed)
    broken = folder / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 8, "target_modules": []}')
    return folder


LORA_KWARGS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def test_rows_are_answered_by_their_adapters_as_vllm_alone_does(causal, adapters):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    names = [None, "one", "two", "one", None, "two"]
    prompt = [1 + i for i in range(40)]
    llm = theirs(causal, **LORA_KWARGS)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    message = {}
    # without an adapter first: on a CPU vLLM alone answers such rows by the last adapter it loaded
    for i, name in enumerate((None, "one", "two")):
        adapter = None if name is None else LoRARequest(name, i, str(adapters / name))
        (output,) = llm.generate({"prompt_token_ids": prompt}, params, lora_request=adapter)
        message[name] = list(output.outputs[0].token_ids)
    done = with_adapters(causal, adapters, names, prompt)
    assert [c.error for c in done] == [""] * len(names)
    assert [message[name] for name in names] == [c.token_ids.tolist() for c in done]
    assert len({tuple(tokens) for tokens in message.values()}) == 3


def with_adapters(model, adapters, names, prompt):
    backend = BackendConfig(kind="vllm", options={"engine_kwargs": {**KWARGS, **LORA_KWARGS}})
    requests = [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=8, ignore_eos=True),
            payload={} if name is None else {LORA: str(adapters / name)},
        )
        for i, name in enumerate(names)
    ]
    done, _ = run(str(model), backend, requests)
    return [done[i] for i in range(len(names))]


def test_an_adapter_that_cannot_be_loaded_makes_error_rows_alone(causal, adapters):
    broken, missing, good = with_adapters(
        causal, adapters, ["broken", "missing", "one"], list(range(1, 9))
    )
    assert good.error == ""
    for completion in (broken, missing):
        assert completion.error.startswith("RequestRefused: the adapter ")
