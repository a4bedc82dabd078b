"""Jobs on Ray whose engines are vLLM's."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

from raybatch import Job, LLMStage, build_processor, vLLMEngineProcessorConfig
from raybatch.actors.pool import PoolHandle
from raybatch.errors import ReplicaError
from tests.backends.lora import merge_adapter, write_adapter
from tests.backends.vllm_engines import BLOCK_TOKENS, save_text_model

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.usefixtures("cluster"),
]

NUM_GROUPS = 6
ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "kv_cache_bytes": 8 << 20,
    "block_size_tokens": BLOCK_TOKENS,
    "max_num_seqs": 8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("jobs") / "model")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Documents of two blocks, six questions each, in an order that separates them."""
    documents = [chr(65 + g) * (2 * BLOCK_TOKENS) for g in range(NUM_GROUPS)]
    rows = [
        {"id": i, "document": documents[i % NUM_GROUPS], "question": f"q{i}"} for i in range(36)
    ]
    folder = tmp_path_factory.mktemp("source")
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return folder


def stage_of(model, backend, *, max_tokens=12, **pool):
    return LLMStage(
        str(model),
        prompt="{document}{question}",
        sampling={"max_tokens": max_tokens, "ignore_eos": True},
        id_column="id",
        backend=backend,
        engine=ENGINE,
        pool={"replicas": 1, **pool},
    )


def rows_in(sink):
    columns = ["id", "generated_tokens", "finish_reason", "num_cached_tokens", "attempts"]
    table = pq.read_table(sink / "data", columns=[*columns, "__inference_error__"])
    return {row.pop("id"): row for row in table.to_pylist()}


@pytest.fixture(scope="module")
def answered(model, source, tmp_path_factory):
    sink = tmp_path_factory.mktemp("answers") / "out"
    report = Job(source, sink, stage_of(model, "vllm")).run()
    return report, rows_in(sink)


def test_greedy_rows_are_those_of_the_native_engine(model, source, answered, tmp_path):
    Job(source, tmp_path / "out", stage_of(model, "native")).run()
    expected = {i: row["generated_tokens"] for i, row in rows_in(tmp_path / "out").items()}
    assert expected == {i: row["generated_tokens"] for i, row in answered[1].items()}


def test_every_row_but_the_first_of_a_group_finds_its_prefix(answered):
    cached = sorted(row["num_cached_tokens"] for row in answered[1].values())
    assert cached == [0] * NUM_GROUPS + [2 * BLOCK_TOKENS] * (36 - NUM_GROUPS)


def test_engines_stay_warm_between_runs(model, source, answered, tmp_path):
    stage = stage_of(model, "vllm")
    (before,) = stage.pool.state().pids
    Job(source, tmp_path / "out", stage).run()
    assert stage.pool.state().pids == (before,)


def test_an_engine_killed_in_the_run_costs_no_row(model, source, answered, tmp_path):
    stage = stage_of(model, "vllm", max_tokens=200)
    pool: PoolHandle = stage.pool
    killed = threading.Event()

    def kill() -> None:
        while not any(replica.num_running for replica in pool.stats().replicas):
            time.sleep(0.05)
        os.kill(pool.state().pids[0], signal.SIGKILL)
        killed.set()

    killer = threading.Thread(target=kill)
    pool.start()
    killer.start()
    Job(source, tmp_path / "out", stage).run()
    killer.join()
    rows = rows_in(tmp_path / "out")
    assert killed.is_set()
    assert max(row["attempts"] for row in rows.values()) > 1
    assert {row["__inference_error__"] for row in rows.values()} == {""}
    short = {i: row["generated_tokens"][:12] for i, row in rows.items()}
    assert short == {i: row["generated_tokens"] for i, row in answered[1].items()}


def test_options_that_vllm_refuses_end_the_job_with_its_words(model, source, tmp_path):
    backend = {"kind": "vllm", "options": {"engine_kwargs": {"quantization": "fp0"}}}
    stage = stage_of(model, backend, max_start_failures=1)
    with pytest.raises(ReplicaError, match="fp0"):
        Job(source, tmp_path / "out", stage).run()


def test_a_processor_runs_vllm_with_its_own_options(model, answered):
    config = vLLMEngineProcessorConfig(
        model_source=str(model),
        engine_kwargs={
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 4,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": 4 << 20,
            "enforce_eager": True,
        },
        concurrency=1,
        backend="vllm",
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": row["text"],
            "sampling_params": {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True},
        },
        postprocess=lambda row: {"text": row["text"], "tokens": row["generated_tokens"]},
    )
    rows = processor(ray.data.from_items([{"text": "abc"}, {"text": "abd"}])).take_all()
    assert {row["text"]: len(row["tokens"]) for row in rows} == {"abc": 5, "abd": 5}
    processor.get_stage_by_name("LLMStage").pool.shutdown()


def transformers_model(folder, adapter=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        merge_adapter(model, adapter)
    return model


def test_vectors_are_the_states_of_the_last_tokens_in_transformers(model, source, tmp_path):
    stage = LLMStage(
        str(model),
        task="embed",
        prompt="{document}{question}",
        id_column="id",
        backend="vllm",
        engine=ENGINE,
    )
    report = Job(source, tmp_path / "out", stage).run()
    rows = pq.read_table(tmp_path / "out" / "data").to_pylist()
    assert (len(rows), report.rows_failed, report.generated_tokens) == (36, 0, 0)
    reference = transformers_model(model).model
    for row in rows[:6]:
        ids = torch.tensor([list((row["document"] + row["question"]).encode())])
        with torch.no_grad():
            state = reference(ids).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state, dim=0)
        np.testing.assert_allclose(expected.numpy(), row["embeddings"], rtol=1e-3, atol=1e-4)


def test_rows_of_a_job_are_answered_by_the_adapters_that_they_name(model, tmp_path):
    names = [None, "one", "two", "three"]
    for seed, name in enumerate(names[1:]):
        write_adapter(tmp_path / "adapters" / name, seed)
    rows = [{"id": i, "text": f"row {i // 4}", "adapter": names[i % 4]} for i in range(24)]
    rows.append({"id": 24, "text": "row", "adapter": "none"})
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in" / "a.parquet")
    options = {"engine_kwargs": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}}
    stage = LLMStage(
        str(model),
        prompt="{text}",
        sampling={"max_tokens": 6, "ignore_eos": True},
        id_column="id",
        lora_column="adapter",
        lora_path=str(tmp_path / "adapters"),
        backend={"kind": "vllm", "options": options},
        engine=ENGINE,
    )
    Job(tmp_path / "in", tmp_path / "out", stage).run()
    found = rows_in(tmp_path / "out")
    assert found.pop(24)["__inference_error__"].startswith("UnknownAdapter: no adapter in")
    assert {row["__inference_error__"] for row in found.values()} == {""}
    for name in names:
        reference = transformers_model(model, name and tmp_path / "adapters" / name)
        for row in rows[:24]:
            if row["adapter"] == name:
                ids = torch.tensor([list(row["text"].encode())])
                message = reference.generate(
                    ids, min_new_tokens=6, max_new_tokens=6, do_sample=False, eos_token_id=None
                )
                assert message[0, ids.shape[1] :].tolist() == found[row["id"]]["generated_tokens"]
