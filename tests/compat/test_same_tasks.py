"""Vectors and adapters of ray.data.llm and of raybatch.llm, from the same vLLM."""

import numpy as np
import pytest
import ray

from raybatch.actors.pool import release_pools
from tests.backends.lora import write_adapter
from tests.compat.both import ENGINE, HERE, PLACED, THERE, compared, plain
from tests.engine.tiny_models import build
from tests.stages.support import make_tokenizer

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("wide_cluster"),
]

PLAIN = {"chat_template_stage": False, "concurrency": 1, "batch_size": 4}
# as the examples of ray.data.llm write them
SCRIPT = """
from {module} import build_processor, vLLMEngineProcessorConfig

processor = build_processor(vLLMEngineProcessorConfig(**config), preprocess)
answered = processor(ray.data.from_items(rows, override_num_blocks=1)).take_all()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small random model whose tokens are bytes."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tasks") / "model", has_chat_template=False)
    build("qwen3", vocab_size=260).save_pretrained(folder)
    return str(folder)


def answers(module, rows, preprocess, **config):
    """Return the rows that a module makes, in the order of their ids."""
    # ray.data.llm writes into what it is given
    config = PLACED | PLAIN | config | {"engine_kwargs": dict(config["engine_kwargs"])}
    names = {"config": config, "preprocess": preprocess, "rows": rows}
    names["ray"] = ray
    exec(SCRIPT.format(module=module), names)
    release_pools()
    return sorted(names["answered"], key=lambda row: row["id"])


def test_embeddings_are_the_same(model, kept):
    rows = [{"id": i, "prompt": f"text {i} " * (i + 1)} for i in range(6)]
    config = {"model_source": model, "task_type": "embed", "engine_kwargs": ENGINE}

    def vectors(module):
        found = answers(module, rows, lambda row: row, detokenize_stage=False, **config)
        return [{n: plain(row[n]) for n in ("num_input_tokens", "embeddings")} for row in found]

    here, there = vectors(HERE), kept.get("embeddings", lambda: vectors(THERE))
    for found, expected in zip(here, there, strict=True):
        assert found["num_input_tokens"] == expected["num_input_tokens"]
        np.testing.assert_allclose(found["embeddings"], expected["embeddings"], atol=2e-5)
    assert len({tuple(row["embeddings"]) for row in here}) == len(rows)


def test_rows_are_answered_by_the_same_adapters(model, kept, tmp_path):
    write_adapter(tmp_path / "one", 1)
    write_adapter(tmp_path / "two", 2)
    models = [str(tmp_path / "one"), str(tmp_path / "two")]
    # all rows have one: on a CPU, vLLM applies an adapter to rows without one as well
    rows = [{"id": i, "prompt": f"row {i // 2}", "model": models[i % 2]} for i in range(12)]
    sampling = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    loras = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    names = ("id", "generated_text", "generated_tokens", "num_generated_tokens")

    def answered(module):
        found = answers(
            module,
            rows,
            lambda row: {**row, "sampling_params": sampling},
            model_source=model,
            engine_kwargs=ENGINE | loras,
        )
        return compared(found, names)

    here = answered(HERE)
    assert here == kept.get("adapters", lambda: answered(THERE))
    texts = {row["id"]: row["generated_text"] for row in here}
    assert texts[0] != texts[1]
