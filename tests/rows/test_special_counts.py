"""Special tokens in the texts of rows are counted, and the counts outlive a crash."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable.journal import POS, ROW
from raybatch.durable.storage import store_of
from raybatch.durable.units import UnitCounts, sum_counts
from raybatch.planning.store import StoredPlan, read_plan
from raybatch.rows.plan_columns import PlanColumns, prompt_columns, take_off
from raybatch.rows.render import PromptReader
from raybatch.stages.unit_writer import SPECIAL, UnitWriter
from raybatch.text.tokenizer import Prompt, Tokenizer
from tests.outputs.support import OUTPUT, SCHEMA, finished_rows, make_sink
from tests.stages.support import fake_stage


def counted(model: Path, table: pa.Table, **options) -> list[int]:
    config = fake_stage(model, **options).config
    prompts = PromptReader(config, Tokenizer.load(model)).read(table)
    assert all(not prompt.error for prompt in prompts)
    return [prompt.num_special for prompt in prompts]


TEXTS = pa.table({"text": ["a", "<|eos|>b<|user|>", "<|eos"]})


@pytest.mark.parametrize("special_tokens", ["escape", "allow"])
@pytest.mark.parametrize("chat", [False, True])
def test_special_tokens_in_texts_are_counted(chat_model, special_tokens, chat):
    options = {"prompt": "{text}", "special_tokens": special_tokens, "chat": chat}
    assert [0, 2, 0] == counted(chat_model, TEXTS, **options)


def test_those_that_the_job_writes_itself_are_not_counted(chat_model):
    options = {"prompt": "<|user|>{text}<|assistant|>", "special_tokens": "allow", "chat": False}
    assert [0, 2, 0] == counted(chat_model, TEXTS, **options)
    assert [0, 2, 0] == counted(chat_model, TEXTS, prompt="{text}", system="<|eos|>")


def test_those_of_messages_are_counted(chat_model):
    rows = [[{"role": "user", "content": text}] for text in TEXTS.column("text").to_pylist()]
    assert [0, 2, 0] == counted(chat_model, pa.table({"m": rows}), messages="m")
    templates = [{"role": "user", "content": "<|eos|>{text}"}]
    assert [0, 2, 0] == counted(chat_model, TEXTS, messages=templates)


def test_a_token_that_template_and_value_make_together_is_counted(model):
    assert [1] == counted(model, pa.table({"text": ["eos|>"]}), prompt="<|{text}")


def test_counts_travel_with_prompts_that_a_plan_has_kept():
    prompts = [Prompt(np.array([1], np.int32), num_special=3), Prompt(None, "Bad: x")]
    nothing = pa.table({"__rb_plan_group": pa.array([None, None], pa.int64())})
    table = nothing.append_column("__rb_plan_prefix_len", pa.array([0, 0], pa.int32()))
    table = table.append_column("__rb_plan_expected", pa.array([None, None], pa.int32()))
    for name, column in prompt_columns(prompts).items():
        table = table.append_column(name, column)
    _, planned = take_off(table)
    assert isinstance(planned, PlanColumns)
    assert planned.prompts is not None
    assert [3, 0] == [prompt.num_special for prompt in planned.prompts]


def make_writer(sink: str, stored: StoredPlan) -> UnitWriter:
    return UnitWriter(
        sink=sink, store=store_of(sink), stored=stored, schema=SCHEMA, output=OUTPUT, attempt="test"
    )


def placed(rows: list[int], special: list[int]) -> pa.Table:
    columns = {POS: pa.array(rows), ROW: pa.array(rows), SPECIAL: pa.array(special)}
    table = finished_rows(rows)
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


@pytest.mark.parametrize("partition_by", [(), ("text",)], ids=["whole", "partitioned"])
def test_counts_of_rows_in_the_journal_are_in_the_receipt(tmp_path, partition_by):
    sink = str(tmp_path / "out")
    make_sink(sink)
    writer = make_writer(sink, replace(read_plan(sink), partition_by=partition_by))
    writer.flush(0, writer.joined([placed([0, 2], [4, 0])]))
    known = writer.journal_of(0)
    receipt = writer.deliver(0, writer.joined([known, placed([1, 3], [1, 0])]))
    assert receipt is not None
    assert (2, 5) == (receipt.counts.special_rows, receipt.counts.special_tokens)
    stored = writer.receipt_of(0)
    assert stored is not None
    assert receipt.counts == stored.counts


def test_counts_are_not_written_to_the_rows(tmp_path):
    sink = str(tmp_path / "out")
    make_sink(sink)
    writer = make_writer(sink, read_plan(sink))
    writer.deliver(0, writer.joined([placed([0, 1, 2, 3], [1, 1, 1, 1])]))
    table = pq.read_table(tmp_path / "out" / "data" / "part-000000.parquet")
    assert SCHEMA.names == table.column_names


def test_counts_of_units_add_up():
    one = UnitCounts(special_rows=1, special_tokens=2)
    total = sum_counts([one, one])
    assert (2, 4) == (total.special_rows, total.special_tokens)


def test_footers_without_the_counts_are_read():
    values = asdict(UnitCounts(num_rows=2))
    del values["special_rows"], values["special_tokens"]
    assert UnitCounts(num_rows=2) == UnitCounts.from_json(values)
