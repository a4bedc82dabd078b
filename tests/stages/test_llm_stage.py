import asyncio
import datetime
import logging

import numpy as np
import pyarrow as pa
import pytest
from ray.data.block import BlockAccessor

from raybatch.backends.fake import fake_tokens
from raybatch.errors import ConfigError, RowError
from raybatch.records.types import Sampling
from raybatch.rows.prepare import row_seed
from raybatch.rows.schema import ERROR_COLUMN, OutputSchema
from raybatch.text.tokenizer import Tokenizer
from tests.stages.support import FullPool, answer, fake_stage, local

OUTPUT_NAMES = OutputSchema().arrow().names


def errors(table: pa.Table) -> list[str]:
    return table.column(ERROR_COLUMN).to_pylist()


def error_classes(table: pa.Table) -> list[str]:
    return [error.partition(":")[0] for error in errors(table)]


def user_columns() -> pa.Table:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 0, 123456)
    bad_text = pa.array([b"ok", b"\xff\xfe", None], pa.binary()).view(pa.string())
    return pa.table(
        {
            "text": ["a", "b", "c"],
            "whole": pa.array([1, None, 2**60], pa.int64()),
            "nested": pa.array([[[1, None], []], None, [[3]]], pa.list_(pa.list_(pa.int16()))),
            "moment": pa.array([moment, None, moment], pa.timestamp("us", "Europe/Oslo")),
            "blob": pa.array([b"\x00\xff", b"", None], pa.binary()),
            "record": pa.array([{"a": 1, "b": None}, None, {"a": 2, "b": "x"}]),
            "price": pa.array([None, 1, 2], pa.decimal128(12, 2)),
            "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
            "day": pa.array([datetime.date(2024, 2, 29), None, None]),
            "not_utf8": bad_text,
            "label": pa.array(["x", None, "x"]).dictionary_encode(),
        }
    )


def test_user_columns_pass_through_bit_identical(model):
    table = user_columns()
    out = answer(local(fake_stage(model, prompt="{text}")), table)
    assert out.select(table.column_names).equals(table)


def test_output_columns_follow_the_users_in_the_fixed_schema(model):
    table = pa.table({"text": ["a"]})
    out = answer(local(fake_stage(model, prompt="{text}")), table)
    assert out.schema == pa.schema([*table.schema, *OutputSchema().arrow()])


def test_all_rows_failing_keeps_the_schema(model):
    table = pa.table({"text": pa.array([None, None], pa.string())})
    out = answer(local(fake_stage(model, prompt="{text}")), table)
    assert out.schema == pa.schema([*table.schema, *OutputSchema().arrow()])
    assert error_classes(out) == ["InvalidPrompt", "InvalidPrompt"]


@pytest.mark.parametrize("num_rows", [0, 1])
def test_small_blocks_keep_the_schema(model, num_rows):
    table = pa.table({"text": pa.array(["a"][:num_rows], pa.string())})
    out = answer(local(fake_stage(model, prompt="{text}")), table)
    assert (out.num_rows, out.schema) == (
        num_rows,
        pa.schema([*table.schema, *OutputSchema().arrow()]),
    )


@pytest.mark.parametrize("batch_format", ["numpy", "pandas", "pyarrow"])
def test_every_batch_format_keeps_what_it_can_hold(model, batch_format):
    table = pa.table(
        {
            "text": ["a", None],
            "lists": pa.array([[1, 2], []], pa.list_(pa.int64())),
            "words": pa.array([["x", None], None], pa.list_(pa.string())),
            "moment": pa.array([datetime.datetime(2024, 1, 1), None], pa.timestamp("us")),
            "blob": [b"\x00\xff", None],
            "record": [{"a": 1, "b": [None]}, None],
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "fraction": pa.array([1.5, float("nan")]),
        }
    )
    batch = BlockAccessor.for_block(table).to_batch_format(batch_format)
    out = answer(local(fake_stage(model, prompt="{text}")), batch)
    kept = out.select(table.column_names)
    assert kept.schema.equals(table.schema)
    assert repr(kept.to_pylist()) == repr(table.to_pylist())
    assert error_classes(out) == ["", "InvalidPrompt"]


def test_answers_are_those_of_the_engine_for_the_rows_seed(model):
    table = pa.table({"text": ["hello"], "id": [7]})
    stage = fake_stage(model, prompt="{text}", id_column="id", seed=3)
    row = answer(local(stage), table).to_pylist()[0]
    sampling = Sampling(max_tokens=4, seed=3)
    expected = fake_tokens(np.frombuffer(b"hello", np.uint8), row_seed(3, "7"), sampling)
    assert row["generated_tokens"] == expected.tolist()
    assert row["generated_text"] == bytes(expected.tolist()).decode("utf-8", "replace")
    assert (row["row_id"], row["num_input_tokens"], row["num_generated_tokens"]) == ("7", 5, 4)
    assert (row["finish_reason"], row["attempts"], row["group_id"]) == ("length", 1, None)


def test_one_bad_row_of_each_kind_is_one_error_row(model):
    not_utf8 = pa.array([b"\xff"], pa.binary()).view(pa.string())
    texts = pa.concat_arrays([pa.array(["good", None, "", "x" * 50, "E"]), not_utf8])
    table = pa.table(
        {"text": texts, "id": ["a", "b", "c", "d", "e", "f"], "t": [0.5, None, None, 1, 1, 1]}
    )
    stage = fake_stage(
        model,
        prompt="{text}",
        id_column="id",
        overrides={"temperature": "t"},
        engine={"max_model_len": 20},
        fake={"error_on": ord("E")},
    )
    out = answer(local(stage), table)
    assert error_classes(out) == [
        "",
        "InvalidPrompt",
        "InvalidPrompt",
        "PromptTooLong",
        "ValueError",
        "InvalidPrompt",
    ]
    assert out.column("row_id").to_pylist() == ["a", "b", "c", "d", "e", "f"]
    assert out.column("finish_reason").to_pylist() == ["length"] + ["error"] * 5
    assert out.column("num_input_tokens").to_pylist() == [4, None, None, 50, 1, None]
    assert out.column("attempts").to_pylist() == [1, 0, 0, 0, 1, 0]


def test_row_that_fits_no_cache_keeps_the_engines_reason(model):
    stage = local(fake_stage(model, prompt="{t}"))
    stage.pool = FullPool(fake_stage(model, prompt="{t}").pool.spec)
    out = answer(stage, pa.table({"t": ["a"]}))
    assert out.column("finish_reason").to_pylist() == ["capacity"]
    assert error_classes(out) == ["CapacityError"]
    reported = out.column("__inference_error__")[0].as_py()
    assert "raise engine.kv_cache_bytes" in reported
    assert "host_kv_bytes" in reported


@pytest.mark.parametrize("error", [ConfigError("no"), ImportError("no"), ValueError("no")])
def test_feeder_that_cannot_start_says_why_in_its_first_call(model, monkeypatch, error):
    def fail(folder):
        raise error

    monkeypatch.setattr(Tokenizer, "load", fail)
    feeder = local(fake_stage(model, prompt="{t}"))()
    with pytest.raises(type(error), match="no"):
        asyncio.run(feeder(pa.table({"t": ["a"]})))


def test_null_id_is_a_row_error(model):
    table = pa.table({"text": ["a", "b"], "id": ["x", None]})
    out = answer(local(fake_stage(model, prompt="{text}", id_column="id")), table)
    assert error_classes(out) == ["", "InvalidRowId"]


def test_ids_without_a_column_count_equal_prompts(model):
    table = pa.table({"text": ["a", "b", "a"]})
    ids = answer(local(fake_stage(model, prompt="{text}")), table).column("row_id").to_pylist()
    assert len(set(ids)) == 3
    assert ids[0].partition("-")[0] == ids[2].partition("-")[0]


def test_error_raises_with_the_row_when_asked(model):
    table = pa.table({"text": ["a", None], "id": ["x", "y"]})
    stage = fake_stage(model, prompt="{text}", id_column="id", on_error="raise")
    with pytest.raises(RowError, match="row 'y': InvalidPrompt: column 'text' is null"):
        answer(local(stage), table)


def test_engine_error_raises_with_the_row_when_asked(model):
    table = pa.table({"text": ["a", "E"], "id": ["x", "y"]})
    stage = fake_stage(
        model, prompt="{text}", id_column="id", on_error="raise", fake={"error_on": ord("E")}
    )
    with pytest.raises(RowError, match="row 'y': ValueError"):
        answer(local(stage), table)


def test_name_of_an_output_column_is_refused_with_the_way_out(model):
    table = pa.table({"text": ["a"], "generated_text": ["b"]})
    with pytest.raises(ConfigError, match=r"already has a column 'generated_text'.*output_prefix"):
        answer(local(fake_stage(model, prompt="{text}")), table)


def test_output_prefix_keeps_two_stages_apart(model):
    first = answer(local(fake_stage(model, prompt="{text}")), pa.table({"text": ["a"]}))
    second = answer(local(fake_stage(model, prompt="{text}", output_prefix="b_")), first)
    assert second.column_names == ["text", *OUTPUT_NAMES, *["b_" + name for name in OUTPUT_NAMES]]


def test_logprobs_column_is_there_only_when_asked(model):
    table = pa.table({"text": ["a"]})
    plain = answer(local(fake_stage(model, prompt="{text}")), table)
    requested = answer(
        local(fake_stage(model, prompt="{text}", sampling={"max_tokens": 1, "logprobs": 1})), table
    )
    assert ("logprobs" in plain.column_names, "logprobs" in requested.column_names) == (False, True)


def test_overrides_replace_options_per_row_and_null_keeps_the_stages(model):
    table = pa.table({"text": ["a", "b", "c"], "m": [2.0, None, 1.5], "s": [None, None, None]})
    stage = fake_stage(model, prompt="{text}", overrides={"max_tokens": "m", "seed": "s"})
    out = answer(local(stage), table)
    assert out.column("num_generated_tokens").to_pylist() == [2, 4, 0]
    error = "InvalidSampling: column 'm': max_tokens must be a whole number, got 1.5"
    assert errors(out)[2] == error


def test_few_rows_at_once_are_hinted_at_once_with_the_way_out(model, caplog):
    feeder = local(fake_stage(model, prompt="{text}"))()
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            asyncio.run(feeder(pa.table({"text": ["a"] * 3})))
    hints = [r.getMessage() for r in caplog.records if "stage.apply(ds)" in r.getMessage()]
    assert len(hints) == 1


def test_many_rows_at_once_are_not_hinted(model, caplog):
    feeder = local(fake_stage(model, prompt="{text}", sampling={"max_tokens": 1}))()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            asyncio.run(feeder(pa.table({"text": ["a"] * 256})))
    assert not [r for r in caplog.records if "stage.apply(ds)" in r.getMessage()]
