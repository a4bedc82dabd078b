"""What ray.data.llm gets wrong, shown right on engines of a small Ray cluster."""

from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from ray.exceptions import RayTaskError

from raybatch.actors.wire.columns import LOGPROBS_TYPE
from raybatch.llm import ProcessorConfig, build_processor, vLLMEngineProcessorConfig
from tests.compat.support import user
from tests.openai.endpoint.endpoint_server import EndpointServer, expected_text

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]

QUESTIONS = [{"id": i, "question": f"What is stated about item {i}?"} for i in range(3)]


def processor_of(**sampling):
    """Return a processor on the native engine with the demo model."""
    return build_processor(
        ProcessorConfig(
            model_source="demo",
            engine_kwargs={"kv_cache_memory_bytes": 32 << 20},
            concurrency=1,
            placement_group_config={"bundles": [{"CPU": 1}]},
            runtime_env={"env_vars": {"MOVED_FROM": "ray.data.llm"}},
        ),
        lambda row: {
            "prompt": row["question"],
            "sampling_params": {"temperature": 0.0, "max_tokens": 12, **sampling},
        },
    )


def run(processor):
    rows = processor(ray.data.from_items(QUESTIONS)).take_all()
    return {row["id"]: row for row in rows}


def engines_of(processor):
    return processor.get_stage_by_name("LLMStage").pool.state().pids


@pytest.fixture(scope="module")
def first(cluster):
    processor = processor_of()
    return run(processor), engines_of(processor)


def test_a_second_execution_finds_the_engines_warm(first):
    processor = processor_of()
    rows = run(processor)
    assert engines_of(processor) == first[1]
    assert rows[0]["generated_tokens"] == first[0][0]["generated_tokens"]


def test_the_environment_of_the_config_is_that_of_the_engines(first):
    (pid,) = first[1]
    assert b"\0MOVED_FROM=ray.data.llm\0" in Path(f"/proc/{pid}/environ").read_bytes()


def test_no_placement_group_is_made_for_one_host(first):
    groups = ray.util.placement_group_table().values()
    assert [group for group in groups if group["state"] != "REMOVED"] == []


def test_a_stop_string_is_cut_off(first):
    text = first[0][0]["generated_text"]
    middle = len(text) // 2
    stop = text[middle : middle + 2]
    row = run(processor_of(stop=[stop]))[0]
    assert row["generated_text"] == text[: text.index(stop)]
    assert row["finish_reason"] == "stop"


def test_log_probabilities_are_written_to_parquet(first, tmp_path):
    dataset = processor_of(logprobs=2)(ray.data.from_items(QUESTIONS))
    dataset.write_parquet(str(tmp_path / "out"))
    table = pq.read_table(tmp_path / "out")
    place = table.column("logprobs")[0].as_py()[0]
    assert table.schema.field("logprobs").type == LOGPROBS_TYPE
    assert place["token_ids"][0] == table.column("generated_tokens")[0].as_py()[0]
    assert max(place["logprobs"]) <= 0


def test_short_rows_do_not_wait_for_a_long_one(model):
    """In batches of two, each with one long row, all rows would take ten times forty steps."""
    processor = build_processor(
        ProcessorConfig(
            model_source=str(model),
            backend={"kind": "fake", "options": {"max_num_seqs": 2}},
            concurrency=1,
            batch_size=2,
            max_concurrent_batches=1,
        ),
        lambda row: {"sampling_params": {"max_tokens": 1 if row["id"] % 2 else 40}},
    )
    rows = [{"id": i, "prompt": f"{i}"} for i in range(20)]
    answered = processor(ray.data.from_items(rows)).take_all()
    (replica,) = processor.get_stage_by_name("LLMStage").stats().replicas
    assert sum(row["num_generated_tokens"] for row in answered) == 410
    assert replica.num_steps <= 205 + 40


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_engines_without_vllm_say_what_to_install_and_what_runs_without():
    config = vLLMEngineProcessorConfig(
        model_source="demo", concurrency=1, pool={"max_start_failures": 1}
    )
    processor = build_processor(config)
    with pytest.raises(RayTaskError, match=r"pip install .*\[vllm\]'.*backend='native'"):
        processor(ray.data.from_items([{"prompt": "a"}])).take_all()


def test_an_endpoint_takes_the_place_of_processors_of_requests():
    sampling = {"temperature": 0.0, "max_tokens": 3}
    with EndpointServer() as server:
        processor = build_processor(
            ProcessorConfig(
                model_source="served",
                backend={"kind": "openai", "options": {"base_url": server.url}},
            ),
            lambda row: {"messages": user(row["question"]), "sampling_params": sampling},
            lambda row: {**row, "answer": row["generated_text"]},
        )
        rows = run(processor)
    body = {"messages": user(QUESTIONS[0]["question"]), **sampling}
    assert rows[0]["answer"] == expected_text(body)
    assert (rows[0]["prompt"], rows[0]["prompt_token_ids"]) == (None, None)
    assert rows[0]["__inference_error__"] == ""
