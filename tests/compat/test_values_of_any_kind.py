"""Values without one Arrow type are what Ray Data makes of them, and end no job."""

import datetime
import decimal
import enum
import json
import threading
import types

import numpy as np
import pyarrow as pa
import pytest
from ray.data.block import BlockAccessor

from raybatch.compat.processor import INPUT_ERROR_COLUMN, Postprocess, Preprocess
from raybatch.errors import RowError
from raybatch.llm import ProcessorConfig
from raybatch.rows.schema import ERROR_COLUMN
from tests.backends.image_models import png
from tests.compat.support import LocalRun
from tests.stages.support import make_tokenizer


class Color(enum.Enum):
    RED = 1


DAY, NOON = datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 12)
VALUES = {
    "int and text": [5, "five"],
    "int and dict": [5, {"a": 1}],
    "all of JSON": [5, "five", {"a": 1}, [1], None, True, 1.5],
    "dicts": [{"a": 1}, {"a": "x"}],
    "lists": [[1], ["a"]],
    "list of kinds": [[1, "a"], [None, {}]],
    "dict and list": [{}, []],
    "deep": [{"a": {"b": {1, 2}}}, {"a": {"b": [5, "x"]}}],
    "sets": [{1, 2}, {3}],
    "sets of kinds": [{1}, {"a"}],
    "frozen sets": [frozenset([1]), frozenset()],
    "keys that are numbers": [{1: "a"}, {2: "b"}],
    "beyond 63 bits": [2**63, 1],
    "beyond 64 bits": [2**70, -1],
    "large and fractions": [2**60 + 1, 1.5],
    "bool and int": [True, 1],
    "nan and text": [float("nan"), "a"],
    "tuples": [(1, "a"), (2, "b")],
    "range": [range(2), range(3)],
    "complex": [1j, 2j],
    "enum": [Color.RED, None],
    "mapping": [types.MappingProxyType({"a": 1}), None],
    "decimal and text": [decimal.Decimal("1.5"), "a"],
    "time and date": [NOON, DAY],
    "tensors": [np.zeros((2, 2)), np.ones((2, 2))],
    "tensors of other shapes": [np.zeros((2, 2)), np.ones((3, 2))],
    "tensor and none": [np.zeros((2, 2)), None],
    "messages": [[{"content": "x"}], [{"content": [{"type": "text"}]}]],
    # typed, as they are everywhere
    "fractions": [1, 1.5],
    "other keys": [{"a": 1}, {"b": "x"}],
    "none": [None, None],
}


def block_of_ray(rows):
    """What Ray's own map makes of the rows that a function returns."""
    builder = BlockAccessor.for_block(pa.table({})).builder()
    for row in rows:
        builder.add(row)
    return builder.build()


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("kind", [Preprocess, Postprocess])
@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_that_rays_map_keeps(kind, name):
    values = VALUES[name]
    table = pa.table({"id": range(len(values)), ERROR_COLUMN: [""] * len(values)})
    if kind is Preprocess:
        table = table.drop_columns([ERROR_COLUMN])
    out = kind(lambda row: {"x": values[row["id"]]})(table)
    there = block_of_ray([{"x": value} for value in values])
    assert repr(out["x"].to_pylist()) == repr(there["x"].to_pylist())
    assert out["x"].type == there["x"].type


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_time_after_a_date_is_cut_there_and_kept_here():
    table = pa.table({"id": [0, 1], ERROR_COLUMN: ["", ""]})
    values = [DAY, NOON]
    out = Postprocess(lambda row: {"x": values[row["id"]]})(table)
    assert out["x"].to_pylist() == values
    assert block_of_ray([{"x": value} for value in values])["x"].to_pylist() == [DAY, DAY]


def test_images_of_pil_are_kept():
    image = pytest.importorskip("PIL.Image", reason="PIL is not installed here")
    pictures = [image.new("RGB", (2, 2), color) for color in ("red", "blue")]
    table = pa.table({"id": [0, 1], ERROR_COLUMN: ["", ""]})
    out = Postprocess(lambda row: {"x": pictures[row["id"]]})(table)
    assert [one.tobytes() for one in out["x"].to_pylist()] == [p.tobytes() for p in pictures]


def test_a_column_that_is_pickled_is_named_once_with_the_way_out(caplog):
    table = pa.table({"id": [0, 1], ERROR_COLUMN: ["", ""]})
    for _ in range(2):
        Postprocess(lambda row: {"named once": [5, "five"][row["id"]]})(table)
    (line,) = [r.getMessage() for r in caplog.records if "'named once'" in r.getMessage()]
    assert line.endswith("json.dumps of them to write readable Parquet")


def test_values_of_failed_rows_stay_beside_objects():
    def postprocess(row):
        return {"x": {0: 5, 1: "five"}[row["id"]], "id": row["id"]}

    table = pa.table({"id": [0, 7, 1], "x": [1, 2, 3], ERROR_COLUMN: [""] * 3})
    out = Postprocess(postprocess)(table)
    assert out["x"].to_pylist() == [5, 2, "five"]
    assert out[ERROR_COLUMN].to_pylist()[1].startswith("PostprocessError: KeyError")


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_a_column_of_objects_stays_one_and_is_never_read_as_its_bytes():
    objects = block_of_ray([{"x": 5}, {"x": "five"}])["x"]
    table = pa.table({"id": [0, 1], "x": objects, ERROR_COLUMN: ["", ""]})
    out = Postprocess(lambda row: {**row, "x": [6, 7][row["id"]]})(table)
    assert (out["x"].to_pylist(), out["x"].type) == ([6, 7], objects.type)

    def failing(row):
        return {"x": {0: b"a"}[row["id"]]}

    assert Preprocess(failing)(table.drop_columns([ERROR_COLUMN]))["x"].to_pylist() == [
        b"a",
        "five",
    ]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (threading.local(), "_local"),
        ((n for n in ()), "generator"),
        ([{"a": threading.local()}], "_local"),
    ],
    ids=["local", "generator", "nested"],
)
def test_an_object_that_cannot_be_pickled_is_the_error_of_its_row(value, name):
    values = [5, value, "five"]
    table = pa.table({"id": range(3), ERROR_COLUMN: [""] * 3})
    out = Postprocess(lambda row: {"x": values[row["id"]]})(table)
    assert out["x"].to_pylist() == [5, None, "five"]
    first, error, last = out[ERROR_COLUMN].to_pylist()
    assert (first, last) == ("", "")
    assert error.startswith("PostprocessError: ValueError: column 'x': ")
    assert name in error


TEXT = [{"role": "user", "content": "a"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
IMAGE = [{"role": "user", "content": [{"type": "image", "image": png(1)}]}]
TOOLS = [*TEXT, {"role": "assistant", "tool_calls": [{"function": {"arguments": {"x": [1, "a"]}}}]}]
BLOCKS = {
    "text": [TEXT, TEXT],
    "parts": [PARTS],
    "images": [IMAGE],
    "calls": [TOOLS],
    "mixed": [TEXT, PARTS, IMAGE, TOOLS],
    "json": ['[{"role": "user"}]', TEXT],
    "failed": [],
}


def preprocessed(values):
    """A block of a preprocess that returns these messages, and fails for one row more."""
    return Preprocess(lambda row: {"messages": values[row["id"]]})(
        pa.table({"id": range(len(values) + 1)})
    )


@pytest.mark.parametrize("first", BLOCKS)
def test_messages_have_one_type_in_all_blocks_whatever_these_mix(first):
    names = [first, *(name for name in BLOCKS if name != first)]
    blocks = [preprocessed(BLOCKS[name]) for name in names]
    builder = BlockAccessor.for_block(blocks[0]).builder()
    for block in blocks:
        builder.add_block(block)
    table = builder.build()
    assert table.schema.field("messages").type == pa.string()
    seen = []
    table = table.drop_columns([INPUT_ERROR_COLUMN])
    table = table.append_column(ERROR_COLUMN, pa.array([""] * len(table)))
    out = Postprocess(lambda row: seen.append(row["messages"]) or {**row})(table)
    assert out["messages"].equals(table["messages"])
    assert all(isinstance(messages, list | None) for messages in seen)
    assert all(one in seen for one in (TEXT, PARTS, TOOLS))


def test_messages_that_are_text_in_the_rows_stay_text_for_functions():
    table = pa.table({"messages": ['[{"role": "user"}]'], ERROR_COLUMN: [""]})
    out = Postprocess(lambda row: {"role": json.loads(row["messages"])[0]["role"]})(table)
    assert out["role"].to_pylist() == ["user"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat")


def run_of(model, postprocess, **options):
    config = ProcessorConfig(model_source=str(model), backend="fake", **options)
    rows = [{"id": 0, "content": "a"}, {"id": 1, "content": "b"}, {"id": 2, "content": "c"}]
    return LocalRun(
        config,
        rows,
        lambda row: {"messages": [{**TEXT[0], "content": row["content"]}]},
        postprocess,
    )


def test_postprocess_sees_messages_as_preprocess_made_them_and_may_add_to_them(model):
    run = run_of(model, lambda row: {"chat": [*row["messages"], {"role": "assistant"}]})
    assert [row["chat"][0]["content"] for row in run.rows] == ["a", "b", "c"]
    assert {row[ERROR_COLUMN] for row in run.rows} == {""}


def test_a_postprocess_that_reads_any_json_loses_no_answer(model):
    texts = ["5", '"five"', '{"a": 1}']
    run = run_of(model, lambda row: {"id": row["id"], "x": json.loads(texts[row["id"]])})
    assert [row["x"] for row in run.rows] == [5, "five", {"a": 1}]


def test_a_second_preprocess_sees_the_messages_of_the_first_as_lists(model):
    first = run_of(model, lambda row: {**row})
    out = Preprocess(lambda row: {"messages": [*row["messages"], *TEXT]})(first.table)
    assert json.loads(out["messages"].to_pylist()[0]) == [*TEXT, *TEXT]


@pytest.mark.parametrize("answer", [False, True, None])
def test_a_postprocess_that_raises_ends_the_job_where_errors_do(model, answer):
    def postprocess(row):
        return {"n": 1 // (row["id"] - 1)}

    options = {} if answer is None else {"should_continue_on_error": answer}
    if answer is not False:
        run = run_of(model, postprocess, **options)
        errors = [row[ERROR_COLUMN].partition(": i")[0] for row in run.rows]
        assert errors == ["", "PostprocessError: ZeroDivisionError", ""]
        return
    with pytest.raises(RowError, match=r"row '.+': PostprocessError: ZeroDivisionError.*=True"):
        run_of(model, postprocess, **options)
