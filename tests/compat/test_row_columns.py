"""Values that a user's functions return, in columns of Arrow: which fit, and which are errors."""

import datetime
import json
import re
from decimal import Decimal
from io import BytesIO

import numpy as np
import pyarrow as pa
import pytest
from ray.data.extensions import ArrowTensorArray

from raybatch.compat.processor import INPUT_ERROR_COLUMN, Postprocess, Preprocess
from raybatch.rows.image_files import MEDIA_TYPE
from raybatch.rows.schema import ERROR_COLUMN
from tests.backends.image_models import png

TWO = pa.table({"id": [0, 1]})


def preprocessed(values, name, **options):
    """Return what becomes of rows for which a function returns these values of a column."""
    return Preprocess(lambda row: {name: values[row["id"]]}, **options)(TWO)


class Answer:
    """Stands for a model of Pydantic."""

    @staticmethod
    def model_json_schema():
        return {"type": "object"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structured_outputs": {"json": Answer}}, "the class Answer .* model_json_schema"),
        ({"stop": {"a"}}, "set has no JSON form; convert it to texts, numbers, lists or dicts"),
        ({"logit_bias": {(1, 2): 1.0}}, r"the key \(1, 2\) has no JSON form"),
    ],
    ids=["class", "set", "key"],
)
def test_options_without_a_form_in_json_make_an_error_row(options, message):
    out = preprocessed([{"max_tokens": 1}, options], "sampling_params")
    assert out["sampling_params"].to_pylist() == ['{"max_tokens": 1}', None]
    good, error = out[INPUT_ERROR_COLUMN].to_pylist()
    assert good == ""
    assert error.startswith("PreprocessError: ValueError: column 'sampling_params': ")
    assert re.search(message, error)


def test_a_message_with_a_value_of_no_kind_makes_an_error_row():
    good = [{"role": "user", "content": "a"}]
    out = preprocessed([good, [{"role": "user", "content": object()}]], "messages")
    assert out["messages"].to_pylist() == [json.dumps(good), None]
    assert "column 'messages': object" in out[INPUT_ERROR_COLUMN].to_pylist()[1]


@pytest.mark.parametrize("name", ["multimodal_data", "messages"])
def test_a_picture_that_cannot_be_read_makes_an_error_row(name):
    image = pytest.importorskip("PIL.Image", reason="PIL is not installed here")
    torn = image.open(BytesIO(png(1)[:-30]))
    values = [{"image": b"file"}, {"image": torn}]
    if name == "messages":
        values = [[{"role": "user", "content": [{"type": "image", **v}]}] for v in values]
    out = preprocessed(values, name, has_images=True)
    good, error = out[INPUT_ERROR_COLUMN].to_pylist()
    assert good == ""
    assert error.startswith(f"PreprocessError: ValueError: column '{name}': ")


def test_messages_with_dates_are_handed_through_as_they_are():
    messages = [{"role": "user", "content": "a", "at": datetime.datetime(2026, 1, 2)}]
    table = pa.table({"id": [1], "messages": [messages]})
    assert Preprocess(lambda row: {**row})(table).select(table.column_names).equals(table)


def test_options_in_a_struct_that_are_handed_through_stay_a_struct():
    table = pa.table({"id": [1], "sampling_params": [{"max_tokens": 1}]})
    assert Preprocess(lambda row: {**row})(table).select(table.column_names).equals(table)


def test_arrays_among_options_are_lists():
    out = preprocessed([{"stop_token_ids": np.array([1, 2])}, None], "sampling_params")
    assert out["sampling_params"].to_pylist() == ['{"stop_token_ids": [1, 2]}', None]


def test_messages_that_are_texts_stay_texts_beside_lists():
    lists = [{"role": "user", "content": "a"}]
    out = preprocessed(['[{"role": "user"}]', lists], "messages")
    assert out["messages"].to_pylist() == [
        '[{"role": "user"}]',
        '[{"role": "user", "content": "a"}]',
    ]


def test_a_picture_in_a_message_is_a_url():
    image = pytest.importorskip("PIL.Image", reason="PIL is not installed here")
    part = {"type": "image_url", "image_url": {"url": image.open(BytesIO(png(1)))}}
    out = preprocessed([[{"role": "user", "content": [part]}], None], "messages")
    (found,) = json.loads(out["messages"].to_pylist()[0])[0]["content"]
    assert found["image_url"]["url"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"image": b"a"}, {"image": [b"b", b"c"]}),
        ({"image": b"a"}, {"image": "data:image/png;base64,"}),
        ({"image": {"bytes": b"a", "path": None}}, {"image": np.array([b"b"], object)}),
        ({"image": b"a"}, {"image": b"b", "video": None}),
        (None, {"image": None}),
    ],
    ids=["list", "url", "struct", "video", "none"],
)
def test_media_have_one_type_in_whatever_form_they_are(one, other):
    tables = [
        preprocessed(v, "multimodal_data", has_images=True) for v in ([one, other], [None] * 2)
    ]
    assert tables[0][INPUT_ERROR_COLUMN].to_pylist() == ["", ""]
    assert [table.schema.field("multimodal_data").type for table in tables] == [MEDIA_TYPE] * 2


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({"video": np.zeros((2, 2, 2))}, "only images are supported, got video"),
        ({"image": np.zeros((2, 2))}, "an image must be bytes, .*, got ndarray"),
        ({"image": [5]}, "an image must be bytes, .*, got int"),
    ],
    ids=["video", "array", "number"],
)
def test_media_that_are_not_read_make_an_error_row(media, message):
    out = preprocessed([{"image": b"a"}, media], "multimodal_data", has_images=True)
    good, error = out[INPUT_ERROR_COLUMN].to_pylist()
    assert good == ""
    assert re.search(f"column 'multimodal_data': {message}", error)


def test_media_of_postprocess_are_its_own():
    table = pa.table({"multimodal_data": [{"image": b"a"}], ERROR_COLUMN: [""]})
    out = Postprocess(lambda row: {"multimodal_data": "an image"})(table)
    assert out["multimodal_data"].to_pylist() == ["an image"]


def with_id_as_text(row):
    if row["id"] == 7:
        raise KeyError("no text")
    return {**row, "id": str(row["id"])}


def test_the_id_of_a_failed_row_takes_the_type_that_a_function_gives_the_others():
    table = pa.table({"id": range(256)})
    out = Preprocess(with_id_as_text)(table)
    assert out["id"].to_pylist() == [str(i) for i in range(256)]
    table = table.append_column(ERROR_COLUMN, pa.array([""] * 256))
    assert Postprocess(with_id_as_text)(table)["id"].to_pylist() == out["id"].to_pylist()


@pytest.mark.parametrize("ids", [[7], [6, 7], [6]], ids=["failed", "mixed", "good"])
def test_a_type_that_a_function_changes_is_that_of_failed_rows_alone_too(ids):
    columns = {"id": ids, "generated_text": ["a" if i == 6 else None for i in ids]}
    errors = ["" if i == 6 else "ValueError: x" for i in ids]
    out = Postprocess(lambda row: {"id": str(row["id"])})(
        pa.table({**columns, ERROR_COLUMN: errors})
    )
    assert out["id"].to_pylist() == [str(i) for i in ids]


def test_rows_that_have_all_failed_keep_the_types_of_columns_that_are_handed_through():
    columns = {"id": pa.array([7], pa.int8()), "generated_text": pa.nulls(1, pa.list_(pa.string()))}
    table = pa.table({**columns, ERROR_COLUMN: ["ValueError: x"]})
    out = Postprocess(lambda row: {**row})(table)
    assert out.select(table.column_names).equals(table)


def test_a_value_of_a_failed_row_that_has_no_form_in_the_new_type_is_null():
    def preprocess(row):
        return {"text": len(row["text"]), "seen": row["must"][0]}

    out = Preprocess(preprocess)(pa.table({"text": ["a", "b c"], "must": [[1], []]}))
    assert out["text"].to_pylist() == [1, None]
    assert out["seen"].to_pylist() == [1, None]


def test_a_text_that_cannot_be_read_ends_nothing_where_others_are_changed():
    texts = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    out = Preprocess(lambda row: {"text": row["text"].upper()})(pa.table({"text": texts}))
    assert out["text"].cast(pa.binary()).to_pylist() == [b"A", b"\xff"]


def test_options_of_failed_rows_become_json_and_messages_objects_beside_those_of_others():
    messages = [{"role": "user", "content": "a"}]
    table = pa.table(
        {"id": [1, 7], "sampling_params": [{"max_tokens": 1}] * 2, "messages": [messages] * 2}
    )

    def preprocess(row):
        mixed = [{"role": "user", "content": [{"type": "image", "image": b"a"}]}, *messages]
        return {**with_id_as_text(row), "messages": mixed, "sampling_params": {"max_tokens": 2}}

    row = Preprocess(preprocess)(table).to_pylist()[1]
    assert row["messages"] == messages
    assert json.loads(row["sampling_params"]) == {"max_tokens": 1}


def test_a_row_without_a_column_that_others_return_keeps_its_own():
    out = Preprocess(lambda row: {"text": "new"} if row["id"] else {})(
        pa.table({"id": [0, 1], "text": ["old", "old"]})
    )
    assert out["text"].to_pylist() == ["old", "new"]


def test_a_key_that_a_function_adds_to_a_struct_is_kept():
    table = pa.table({"meta": [{"a": 1, "deep": [{"b": 2}]}]})
    new = {"a": 1, "deep": [{"b": 2, "c": 3}], "d": 4}
    assert Preprocess(lambda row: {"meta": new})(table)["meta"].to_pylist() == [new]


def test_arrays_that_are_handed_through_stay_as_they_are():
    tensors = ArrowTensorArray.from_numpy(np.arange(8.0).reshape(2, 2, 2))
    table = pa.table({"id": [0, 1], "x": tensors})
    out = Preprocess(lambda row: {**row, "prompt": "a"})(table)
    assert out.schema.field("x") == table.schema.field("x")
    assert out["x"].equals(table["x"])


def test_rows_of_several_samples_that_have_all_failed_have_lists():
    columns = {
        "generated_text": pa.nulls(1, pa.list_(pa.string())),
        "generated_tokens": pa.nulls(1, pa.list_(pa.list_(pa.int32()))),
        "finish_reason": pa.nulls(1, pa.list_(pa.string())),
    }
    table = pa.table({**columns, ERROR_COLUMN: ["ValueError: x"]})
    out = Postprocess(
        lambda row: {"answers": row["generated_text"], "ids": row["generated_tokens"]}
    )(table)
    assert out.schema.field("answers").type == pa.list_(pa.string())
    assert pa.types.is_list(out.schema.field("ids").type.value_type)


def test_an_error_that_postprocess_returns_is_the_rows_error():
    table = pa.table({"generated_text": ["a", "b"], ERROR_COLUMN: ["", ""]})
    out = Postprocess(
        lambda row: {**row, ERROR_COLUMN: "no number" if row["generated_text"] == "a" else ""}
    )(table)
    assert out[ERROR_COLUMN].to_pylist() == ["no number", ""]
    assert out["generated_text"].to_pylist() == ["a", "b"]


NOON = datetime.datetime(2026, 1, 2, 12, 0, 0, 7)


@pytest.mark.parametrize(
    ("held", "values"),
    [
        (pa.array([3, 4]), [0.75, 0.25]),
        (pa.array([3, 4]), [3.0, 4.0]),
        (pa.array([0, 1]), [False, True]),
        (pa.array([True, False]), [1, 0]),
        (pa.array([1.5, 2.5]), [1, 2]),
        (pa.array([0.5, 1], pa.float32()), [0.1, 0.5]),
        (pa.array([3, 4]).dictionary_encode(), [0.5, 1.5]),
        (pa.array([[1], [2]]), [[0.5], [1.5]]),
        (pa.array([[1], [2]]), [[1.0], [2.0]]),
        (pa.array([{"a": [{"b": 1}]}] * 2), [{"a": [{"b": 1.5}]}, {"a": [{"b": 2.5}]}]),
        (pa.array([NOON.date()] * 2), [NOON, NOON]),
        (pa.array([NOON] * 2, pa.timestamp("s")), [NOON, NOON]),
        (pa.array([NOON] * 2, pa.timestamp("us", "UTC")), [NOON, NOON]),
        (pa.array([datetime.timedelta(1)] * 2, pa.duration("s")), [NOON - NOON.min] * 2),
        (pa.array([b"a", b"b"]), ["a", "b"]),
        (pa.array(["a", "b"]), [b"a", b"b"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "to",
)
@pytest.mark.parametrize("kind", [Preprocess, Postprocess])
def test_new_values_of_another_kind_are_what_the_function_made(kind, held, values):
    table = pa.table({"id": [0, 1], "x": held, ERROR_COLUMN: ["", ""]})
    out = kind(lambda row: {**row, "x": values[row["id"]]})(table)
    assert repr(out["x"].to_pylist()) == repr(values)


@pytest.mark.parametrize(
    ("held", "values"),
    [
        (pa.array([3, None], pa.int8()), [5, None]),
        (pa.array([3, 4], pa.int64()), [np.int32(5), 6]),
        (pa.array([0.5, 1], pa.float32()), [0.25, float("nan")]),
        (pa.array([0.5, 1], pa.float32()), [3, 0.25]),
        (pa.array(["a", "b"], pa.large_string()), ["c", None]),
        (pa.array(["a", "b"]).dictionary_encode(), ["c", "a"]),
        (pa.array([Decimal("1.50")] * 2, pa.decimal128(9, 2)), [Decimal("2.5"), Decimal("3")]),
        (pa.array([[1, 2]] * 2, pa.list_(pa.int16(), 2)), [(3, 4), np.array([5, 6])]),
        (pa.array([b"ab"] * 2, pa.binary(2)), [b"cd", b"ef"]),
        (pa.array([NOON] * 2, pa.timestamp("ns")), [NOON.replace(hour=3), None]),
        (
            pa.array([{"a": 1, "b": None}] * 2, pa.struct({"a": "int8", "b": "string"})),
            [{"a": 2}] * 2,
        ),
        (pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int8())), [{"k": 2}, [("l", 3)]]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "to",
)
def test_new_values_that_a_columns_type_holds_as_they_are_keep_it(held, values):
    table = pa.table({"id": [0, 1], "x": held})
    out = Preprocess(lambda row: {"x": values[row["id"]]})(table)
    assert out["x"].type == held.type
    assert repr(out["x"].to_pylist()) == repr(pa.array(values, held.type).to_pylist())
    assert not out["x"].equals(table["x"])


@pytest.mark.parametrize("order", [1, -1])
def test_times_among_dates_are_not_cut_to_dates(order):
    table = pa.table({"id": [0, 1], "x": [NOON.date()] * 2})
    values = [NOON.date(), NOON][::order]
    out = Preprocess(lambda row: {"x": values[row["id"]]})(table)
    assert out["x"].to_pylist() == values


@pytest.mark.parametrize(
    ("held", "new"), [([1, 5], True), ([NOON, NOON], NOON.date()), ([[1], [0.5]], [1])]
)
def test_a_failed_row_keeps_nothing_that_its_column_would_cut(held, new):
    def preprocess(row):
        return {"x": {0: new}[row["id"]]}

    out = Preprocess(preprocess)(pa.table({"id": [0, 7], "x": held}))
    assert repr(out["x"].to_pylist()) == repr([new, None])


def test_columns_with_nan_that_are_handed_through_are_not_built_again():
    table = pa.table({"x": pa.array([float("nan"), 1.0]), "y": [[float("nan")], None]})
    out = Preprocess(lambda row: {**row})(table)
    for name in ("x", "y"):
        assert (
            out[name].chunk(0).buffers()[-1].address == table[name].chunk(0).buffers()[-1].address
        )
