import json

import pyarrow as pa
import pytest
from ray.data import DataContext

from raybatch.compat.processor import INPUT_ERROR_COLUMN, Postprocess, Preprocess
from raybatch.errors import ConfigError
from raybatch.records.types import UNBOUNDED_TOKENS
from raybatch.rows.schema import ERROR_COLUMN, OutputSchema


def answered(errors: list[str]) -> pa.Table:
    """Return a table with output columns, as a stage leaves it."""
    num = len(errors)
    columns = {name: [None] * num for name in OutputSchema().arrow().names}
    columns |= {"generated_text": ["yes" if not e else None for e in errors], ERROR_COLUMN: errors}
    user = pa.table({"id": pa.array(range(num), pa.int32()), "tags": pa.array([[1.5]] * num)})
    return OutputSchema().attach(user, columns)


def test_preprocess_is_merged_and_leaves_other_columns_alone():
    table = pa.table({"id": pa.array([1, None], pa.int8()), "tags": [[1], []]})
    out = Preprocess(lambda row: {"prompt": f"p{row['id']}"})(table)
    assert out.select(["id", "tags"]).equals(table)
    assert out.column("prompt").to_pylist() == ["p1", "pNone"]


def test_preprocess_that_returns_the_whole_row_changes_no_types():
    table = pa.table({"id": pa.array([1, None], pa.int8()), "f": pa.array([1.5, 2], pa.float32())})
    assert Preprocess(lambda row: {**row})(table).select(["id", "f"]).equals(table)


def test_failing_preprocess_is_the_rows_error():
    out = Preprocess(lambda row: {"prompt": {1: "a"}[row["id"]]})(pa.table({"id": [1, 2]}))
    message = "PreprocessError: KeyError: 2"
    assert out.column(INPUT_ERROR_COLUMN).to_pylist() == ["", message]
    assert out.column("prompt").to_pylist() == ["a", None]


@pytest.mark.parametrize("value", ["a\ud800", [{"role": "user", "content": "\ud800"}]])
def test_text_that_arrow_cannot_hold_is_the_rows_error(value):
    out = Preprocess(lambda row: {"x": value} if row["id"] == 1 else {})(pa.table({"id": [1, 2]}))
    first, second = out.column(INPUT_ERROR_COLUMN).to_pylist()
    assert (first.partition(" '")[0], second) == ("PreprocessError: UnicodeEncodeError:", "")


def test_error_of_an_earlier_processor_stays_the_rows_error():
    table = pa.table({"id": [1, 2], ERROR_COLUMN: ["", "ValueError: x"]})
    out = Preprocess(lambda row: {"prompt": f"p{row['id']}"})(table)
    assert out.column(INPUT_ERROR_COLUMN).to_pylist() == ["", "ValueError: x"]
    assert out.column("prompt").to_pylist() == ["p1", None]
    assert ERROR_COLUMN not in out.column_names


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("model", "adapter", "set enable_lora in engine_kwargs, with backend='vllm'"),
        ("multimodal_data", {"image": "x"}, "backend='vllm' .* image_url parts"),
        ("mm_processor_kwargs", {"a": 1}, "set mm_processor_kwargs in engine_kwargs"),
        ("multimodal_uuids", {"image": ["a"]}, "identified by their bytes"),
        ("pooling_params", {"dimensions": 2}, "set task_type to 'embed'"),
        ("tokenization_kwargs", {"max_length": 9}, "cut texts in preprocess"),
    ],
)
def test_column_that_asks_for_more_than_there_is_names_the_way_to_it(name, value, way):
    with pytest.raises(ConfigError, match=f"column '{name}'.*{way}.*rename it"):
        Preprocess(lambda row: {name: value})(pa.table({"id": [1]}))


def test_images_are_handed_on_where_they_are_read():
    out = Preprocess(lambda row: {"multimodal_data": {"image": b"file"}}, has_images=True)(
        pa.table({"id": [1]})
    )
    assert out.column("multimodal_data").to_pylist() == [
        {"image": [{"bytes": b"file", "path": None}]}
    ]


def test_model_column_that_names_the_stages_model_is_fine():
    table = pa.table({"model": ["m", None]})
    assert Preprocess(None, model="m")(table).column("model").to_pylist() == ["m", None]


def test_output_columns_of_an_earlier_processor_make_room():
    out = Preprocess(lambda row: {"first": row["generated_text"]})(answered([""]))
    assert out.column_names == ["id", "tags", "first", "sampling_params", INPUT_ERROR_COLUMN]


def after_a_processor(**inputs) -> pa.Table:
    table = answered([""])
    for name, value in inputs.items():
        table = table.append_column(name, pa.array([value]))
    return table


def test_inputs_of_an_earlier_processor_are_not_asked_again():
    table = after_a_processor(messages="[]", sampling_params='{"max_tokens": 1}')
    (row,) = Preprocess(lambda row: {"prompt": "new"})(table).to_pylist()
    assert (row["prompt"], row["sampling_params"], "messages" in row) == ("new", None, False)


def test_prompts_that_are_handed_through_beside_new_ones_are_dropped():
    table = after_a_processor(messages="[]")
    out = Preprocess(lambda row: {**row, "prompt": "new"})(table)
    assert ("prompt" in out.column_names, "messages" in out.column_names) == (True, False)


def test_first_of_several_prompts_of_an_earlier_processor_is_asked():
    table = after_a_processor(messages="[]", prompt="text")
    out = Preprocess(lambda row: {**row, "messages": "[1]"})(table)
    assert (out["messages"].to_pylist(), "prompt" in out.column_names) == (["[1]"], False)


def test_second_of_several_prompts_of_an_earlier_processor_is_refused_when_it_is_changed():
    table = after_a_processor(messages="[]", prompt=" text ")
    with pytest.raises(
        ConfigError, match=r"'messages' and changes 'prompt'.*return only the prompt"
    ):
        Preprocess(lambda row: {**row, "prompt": row["prompt"].strip()})(table)


@pytest.mark.parametrize("prompt", ["text", " text "], ids=["equal", "changed"])
def test_one_of_several_prompts_of_an_earlier_processor_is_asked_when_it_returns_alone(prompt):
    table = after_a_processor(messages="[]", prompt=prompt)
    out = Preprocess(lambda row: {"prompt": row["prompt"].strip()})(table)
    assert (out["prompt"].to_pylist(), "messages" in out.column_names) == (["text"], False)


def test_prompt_of_an_earlier_processor_that_is_changed_beside_a_new_one_is_refused():
    table = after_a_processor(messages="[]")
    with pytest.raises(ConfigError, match="returns 'prompt' and changes 'messages'"):
        Preprocess(lambda row: {"messages": "[1]", "prompt": "new"})(table)


def test_rows_with_different_prompts_after_an_earlier_processor_are_refused():
    table = answered(["", ""]).append_column("prompt", pa.array(["a", "b"]))
    with pytest.raises(ConfigError, match="no prompt for some rows, and for others 'prompt'"):
        Preprocess(lambda row: {"prompt": "new"} if row["id"] else {})(table)


def test_rows_that_hand_different_columns_through_ask_the_same_prompt():
    table = answered(["", ""]).append_column("messages", pa.array(["[]", "[]"]))
    out = Preprocess(lambda row: {**(row if row["id"] else {}), "prompt": "new"})(table)
    assert (out["prompt"].to_pylist(), "messages" in out.column_names) == (["new"] * 2, False)


def test_prompts_of_an_earlier_processor_are_asked_again_when_returned():
    table = after_a_processor(messages="[]", sampling_params="{}")
    out = Preprocess(lambda row: {n: row[n] for n in ("messages", "sampling_params")})(table)
    assert (out["messages"].to_pylist(), out["sampling_params"].to_pylist()) == (["[]"], ["{}"])


@pytest.mark.parametrize("function", [None, lambda row: {"topic": "x"}])
def test_rows_with_only_prompts_of_an_earlier_processor_are_refused(function):
    with pytest.raises(ConfigError, match=r"'prompt'.* earlier processor"):
        Preprocess(function)(after_a_processor(prompt="old"))


def test_user_columns_with_names_of_outputs_stay_without_an_earlier_processor():
    assert "attempts" in Preprocess(None)(pa.table({"attempts": [1]})).column_names


def test_sampling_params_of_different_keys_stay_exact():
    def preprocess(row):
        return {"sampling_params": [{"max_tokens": 5}, {"stop": ["a"]}][row["id"]]}

    out = Preprocess(preprocess)(pa.table({"id": [0, 1]}))
    assert out.column("sampling_params").to_pylist() == ['{"max_tokens": 5}', '{"stop": ["a"]}']


def test_messages_without_a_common_type_become_json():
    def preprocess(row):
        content = ["text", [{"type": "text", "text": "a"}]][row["id"]]
        return {"messages": [{"role": "user", "content": content}]}

    out = Preprocess(preprocess)(pa.table({"id": [0, 1]}))
    assert out.schema.field("messages").type == pa.string()


def test_values_without_a_common_type_are_named_where_ray_may_not_pickle(monkeypatch):
    context = DataContext.get_current()
    monkeypatch.setattr(context, "enable_fallback_to_arrow_object_ext_type", False)
    with pytest.raises(ConfigError, match=r"different types in 'x'.*return json\.dumps"):
        Preprocess(lambda row: {"x": ["a", {}][row["id"]]})(pa.table({"id": [0, 1]}))


def test_postprocess_replaces_the_row_and_keeps_the_error_column():
    out = Postprocess(lambda row: {"answer": row["generated_text"].upper()})(answered([""]))
    assert out.to_pylist() == [{"answer": "YES", ERROR_COLUMN: ""}]


def test_postprocess_that_hands_columns_through_changes_no_types():
    table = answered(["", "ValueError: x"])
    out = Postprocess(lambda row: {**row, "n": len(row["generated_text"])})(table)
    assert out.select(table.column_names).equals(table)
    assert out.column("n").to_pylist() == [3, None]


def test_postprocess_that_changes_a_list_in_place_is_heard():
    def postprocess(row):
        row["tags"].append(2.5)
        return row

    assert Postprocess(postprocess)(answered([""])).column("tags").to_pylist() == [[1.5, 2.5]]


def test_failing_postprocess_is_the_rows_error():
    out = Postprocess(lambda row: {"n": 1 // row["id"]})(answered(["", ""]))
    assert out.column("n").to_pylist() == [None, 1]
    assert out.column(ERROR_COLUMN).to_pylist()[0].startswith("PostprocessError: ZeroDivisionError")


def test_postprocess_of_failed_rows_alone_has_the_schema_of_good_ones():
    def postprocess(row):
        return {"id": row["id"], "n": len(row["generated_text"].strip())}

    process = Postprocess(postprocess)
    assert process(answered(["ValueError: x"])).schema == process(answered([""])).schema


def test_postprocess_that_fails_for_every_row_of_a_batch_loses_no_column():
    table = answered(["", "ValueError: x"])
    out = Postprocess(lambda row: {"answer": json.loads(row["generated_text"])})(table)
    assert out.drop_columns(ERROR_COLUMN).equals(table.drop_columns(ERROR_COLUMN))
    first, second = out[ERROR_COLUMN].to_pylist()
    assert first.startswith("PostprocessError: JSONDecodeError: ")
    assert second == "ValueError: x"


SYSTEM = {"role": "system", "content": "short"}
USER = {"role": "user", "content": "a"}


def insert_system(row):
    row["messages"].insert(0, SYSTEM)


def change_content(row):
    row["messages"][0]["content"] = "b"


@pytest.mark.parametrize(
    ("change", "messages"),
    [(insert_system, [SYSTEM, USER]), (change_content, [{**USER, "content": "b"}])],
)
def test_what_preprocess_changes_inside_its_row_is_merged(change, messages):
    def preprocess(row):
        change(row)
        return {"sampling_params": {"max_tokens": 1}}

    table = pa.table({"messages": [[USER], [USER]], "ids": [[1, 2], [3]]})
    out = Preprocess(preprocess)(table)
    assert out["messages"].to_pylist() == [messages] * 2
    assert out["ids"].equals(table["ids"])


def test_a_kind_of_number_that_preprocess_changes_inside_its_row_is_merged():
    def preprocess(row):
        row["ids"][0] = float(row["ids"][0])
        return {}

    out = Preprocess(preprocess)(pa.table({"ids": [[1]]}))
    assert repr(out["ids"].to_pylist()) == "[[1.0]]"


def test_messages_of_an_earlier_processor_that_are_changed_in_their_row_are_asked():
    def preprocess(row):
        row["messages"].append({"role": "assistant", "content": row["generated_text"]})
        return {}

    out = Preprocess(preprocess)(after_a_processor(messages=[USER]))
    assert out["messages"].to_pylist() == [[USER, {"role": "assistant", "content": "yes"}]]


def test_nested_values_that_preprocess_leaves_are_not_among_what_it_returns():
    with pytest.raises(ConfigError, match=r"'messages'.* earlier processor"):
        Preprocess(lambda row: {"topic": "x"})(after_a_processor(messages=[USER]))


STRUCTS = [{"max_tokens": 5, "temperature": 0.5}, {"max_tokens": None, "temperature": 0.5}]


@pytest.mark.parametrize(
    ("options_of", "is_unbounded"),
    [
        (lambda held: {"max_tokens": None}, [True, True]),
        (lambda held: {"max_tokens": None, "temperature": 0.0}, [True, False]),
        (lambda held: {**held, "max_tokens": None}, [True, False]),
        (lambda held: {**held, "seed": 1}, [False, False]),
        (lambda held: held.update(max_tokens=None) or held, [True, False]),
    ],
    ids=["fresh", "alike", "spread", "beside", "in_place"],
)
def test_none_that_a_function_writes_is_no_bound_beside_a_struct(options_of, is_unbounded):
    table = pa.table({"sampling_params": STRUCTS})
    out = Preprocess(lambda row: {"sampling_params": options_of(row["sampling_params"])})(table)
    found = [json.loads(text)["max_tokens"] for text in out["sampling_params"].to_pylist()]
    assert [number == UNBOUNDED_TOKENS for number in found] == is_unbounded


@pytest.mark.parametrize("held", [{"max_tokens": 5}, {"temperature": 0.5}, None])
def test_none_is_no_bound_where_the_rows_struct_has_another_or_none(held):
    table = pa.table(
        {
            "sampling_params": pa.array(
                [held], pa.struct(dict.fromkeys(held or {"max_tokens": 1}, "double"))
            )
        }
    )
    out = Preprocess(lambda row: {"sampling_params": {"max_tokens": None, "temperature": 0.0}})(
        table
    )
    assert json.loads(out["sampling_params"].to_pylist()[0]) == {
        "max_tokens": UNBOUNDED_TOKENS,
        "temperature": 0.0,
    }
