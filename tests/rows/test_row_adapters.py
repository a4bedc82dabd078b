"""An adapter per row: what reaches the engine, and what is an error row."""

import asyncio
import json

import pyarrow as pa
import pytest

from raybatch.compat.processor import INPUT_ERROR_COLUMN, Preprocess
from raybatch.config import PlanConfig
from raybatch.errors import ConfigError
from raybatch.planning.run import RowDescriber
from raybatch.records.payload import LORA
from raybatch.rows.options import build_stage_config
from raybatch.rows.schema import ERROR_COLUMN
from tests.stages.support import answer, fake_stage, local


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return folder


def stage_of(model, adapters, **options):
    return local(
        fake_stage(
            model, prompt="{text}", lora_column="adapter", lora_path=str(adapters), **options
        )
    )


def test_rows_are_asked_with_their_adapters(model, adapters):
    stage = stage_of(model, adapters)
    names = ["one", None, "", str(model), "two"]
    answer(stage, pa.table({"text": ["a", "b", "c", "d", "e"], "adapter": names}))
    assert [request.payload for request in stage.pool.requests] == [
        {LORA: f"{adapters}/one"},
        {},
        {},
        {},
        {LORA: f"{adapters}/two"},
    ]


def test_an_unknown_adapter_is_the_rows_error(model, adapters):
    stage = stage_of(model, adapters)
    columns = {"text": ["a", "b", "c"], "adapter": ["one", "three", "../adapters/one"]}
    out = answer(stage, pa.table(columns))
    classes = [error.partition(":")[0] for error in out[ERROR_COLUMN].to_pylist()]
    assert classes == ["", "UnknownAdapter", "UnknownAdapter"]


def test_an_adapter_that_was_there_is_not_looked_at_again_and_one_that_was_not_is(model, tmp_path):
    config = tmp_path / "one" / "adapter_config.json"
    config.parent.mkdir()
    config.write_text('{"r": 8}')
    feeder = stage_of(model, tmp_path)()
    batch = pa.table({"text": ["a", "b"], "adapter": ["one", "two"]})
    first = asyncio.run(feeder(batch))
    config.parent.rename(tmp_path / "two")
    second = asyncio.run(feeder(batch))
    failed = [[bool(error) for error in out[ERROR_COLUMN].to_pylist()] for out in (first, second)]
    assert failed == [[False, True], [False, False]]


def test_equal_prompts_of_two_adapters_are_no_copies(model, adapters):
    stage = stage_of(model, adapters)
    columns = {"text": ["a"] * 4, "adapter": ["one", "two", None, "one"]}
    answer(stage, pa.table(columns))
    assert len(stage.pool.requests) == 3


def test_a_plan_knows_which_adapter_a_row_has(model, adapters):
    config = stage_of(model, adapters, engine={"block_size_tokens": 2}).config
    table = pa.table({"text": ["aaaa"] * 3, "adapter": ["one", "two", "one"]})
    _, plan_index = RowDescriber(config, PlanConfig())(table)
    one, two, again = plan_index.adapters.tolist()
    keys = plan_index.keys.keys.reshape(3, 2).tolist()
    assert (one, keys[0]) == (again, keys[2])
    assert one != two
    assert not set(keys[0]) & set(keys[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_column": "a"}, "native backend does not support LoRA"),
        ({"lora_column": "a", "backend": "vllm"}, "set enable_lora in the engine_kwargs"),
        ({"lora_path": "a/"}, "needs lora_column"),
    ],
)
def test_engines_that_take_no_adapters_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_stage_config("m", options, where="LLMStage")


def test_the_column_of_adapters_is_there_after_preprocess():
    out = Preprocess(lambda row: {"prompt": "p"}, model="m", has_adapters=True)(
        pa.table({"id": [1]})
    )
    assert out.column_names == ["id", "prompt", "sampling_params", "model", INPUT_ERROR_COLUMN]


def test_adapters_in_the_column_model_are_fine_where_engines_take_them():
    table = pa.table({"model": ["one", None]})
    out = Preprocess(None, model="m", has_adapters=True)(table)
    assert out.column("model").to_pylist() == ["one", None]
