"""Advice on the order of template fields, from rows of tables and files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.planning.layout_lint import (
    lint_layout,
    lint_source,
    sample_tables,
    token_counter,
    why_layout_is_not_linted,
    without_columns,
)
from raybatch.rows.options import build_stage_config
from raybatch.text.tokenizer import Tokenizer
from tests.stages.support import make_tokenizer, write_parquet


def config(**options):
    engine = {"block_size_tokens": 4}
    return build_stage_config("demo", {"engine": engine, **options}, where="test")


def words(text):
    return len(text.split())


def table(num_rows=60, num_documents=3, *, nulls=0):
    documents = [f"document {i} " + "word " * 40 for i in range(num_documents)]
    questions = [f"question number {i} of all" for i in range(num_rows)]
    return pa.table(
        {
            "document": [
                None if i < nulls else documents[i % num_documents] for i in range(num_rows)
            ],
            "question": questions,
            "lang": ["en"] * num_rows,
        }
    )


def test_a_shared_field_behind_a_private_one_is_told_with_both_hit_rates():
    hint = lint_layout(config(prompt="Q: {question}\nText: {document}"), [table()], words)
    assert hint.best.fields == ("document", "question")
    assert hint.text.startswith("putting {document} before {question} raises the hit rate from 0 %")


def test_nothing_is_said_of_the_best_order():
    assert lint_layout(config(prompt="{document}\nQ: {question}"), [table()], words) is None


def test_nothing_is_said_of_a_gain_below_one_point():
    stage = config(prompt="{question} {document}")
    assert lint_layout(stage, [table(num_rows=120, num_documents=119)], words) is None
    assert lint_layout(stage, [table(num_rows=120, num_documents=117)], words) is not None


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "{document}"},
        {"prompt": "{question} {document} {question}"},
        {"messages": "question"},
        {"tokenized_prompt": "question"},
        {},
    ],
    ids=["one-field", "a-field-twice", "messages-column", "tokens", "by-convention"],
)
def test_nothing_is_said_of_other_prompts(options):
    assert lint_layout(config(**options), [table()], words) is None


def test_fields_of_message_templates_count_in_their_order():
    messages = [
        {"role": "system", "content": "Be brief. {question}"},
        {"role": "user", "content": "{document}"},
    ]
    hint = lint_layout(config(messages=messages), [table()], words)
    assert hint.used.fields == ("question", "document")
    assert hint.best.fields == ("document", "question")
    assert hint.text.endswith(", and moves text from one message to another")


@pytest.mark.parametrize("system", ["", "Be brief in {lang}."])
def test_an_order_within_one_message_moves_no_text_to_another(system):
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "{question} {document}"},
    ]
    assert "message" not in lint_layout(config(messages=messages), [table()], words).text


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": "{question}{question} {document}"},
        {"messages": [{"role": r, "content": "{question} {lang}"} for r in ("system", "user")]},
    ],
    ids=["template", "messages"],
)
def test_a_field_that_stands_twice_is_said_to_be_in_the_way(options):
    message = why_layout_is_not_linted(config(**options))
    assert message.startswith("no other order of the fields was tried, because {question}")
    assert message.endswith(" is repeated")


def test_nothing_is_in_the_way_of_other_templates():
    assert "" == why_layout_is_not_linted(config(prompt="{question} {document}"))
    assert "" == why_layout_is_not_linted(config(messages="question"))
    assert "" == why_layout_is_not_linted(config(prompt="{question}{question}"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": "document"}, "document"),
        ({"prompt": "x" * 90}, "x" * 60 + "..."),
        ({"messages": [{"role": "user", "content": "{{document}}"}]}, "{{document}}"),
        ({"prompt": "{document}"}, ""),
        ({"messages": "question"}, ""),
        ({"tokenized_prompt": "question"}, ""),
    ],
    ids=["braces-forgotten", "long", "messages", "field", "messages-column", "tokens"],
)
def test_templates_without_a_column_are_found(options, message):
    assert message == without_columns(config(**options))


@pytest.mark.parametrize(
    "stage",
    [
        config(prompt="{question}{document}"),
        config(
            messages=[{"role": "user", "content": f"{{{c}}}"} for c in ("question", "document")]
        ),
    ],
    ids=["template", "messages"],
)
def test_rows_without_a_prompt_are_left_out(stage):
    with_bad = lint_layout(stage, [table(nulls=30)], words)
    without = lint_layout(stage, [table(nulls=30).slice(30)], words)
    assert (with_bad.used, with_bad.best) == (without.used, without.best)


def test_no_more_rows_are_read_than_asked_for():
    def tables():
        yield table()
        raise AssertionError("a second table was read")

    hint = lint_layout(
        config(prompt="{question}{document}"), tables(), words, num_rows=100, max_rows=50
    )
    assert hint.text.endswith(", in a sample of 50 rows")


def test_a_whole_input_is_no_sample():
    hint = lint_layout(config(prompt="{question}{document}"), [table()], words, num_rows=60)
    assert "sample" not in hint.text


def test_fixed_text_before_the_last_line_stays_at_the_front():
    head = "word " * 40 + "\n"
    rows = table(num_documents=30)
    hint = lint_layout(config(prompt=head + "{question}{document}"), [rows], words)
    # 40 tokens once for all rows and 42 for each document, of 87 in each row
    assert 1 - (40 + 30 * 42 + 60 * 5) / (60 * 87) == pytest.approx(hint.best.hit_rate, abs=0.03)


def test_a_missing_column_is_a_config_error():
    with pytest.raises(ConfigError, match="no column 'documents'"):
        lint_layout(config(prompt="{question}{documents}"), [table()], words)


def test_values_beyond_the_exact_part_are_measured_by_length(monkeypatch):
    monkeypatch.setattr("raybatch.planning.layout_lint._EXACT_CHARS", 1)
    texts = []

    def count(text):
        texts.append(text)
        return len(text)

    lint_layout(config(prompt="{question}{document}"), [table()], count)
    assert sum(text.startswith("question") for text in texts) == 1


@pytest.mark.parametrize("has_bos", [True, False])
def test_tokens_around_a_prompt_do_not_count(tmp_path, has_bos):
    count = token_counter(Tokenizer.load(make_tokenizer(tmp_path / "m", has_bos=has_bos)))
    assert [count(""), count("abc")] == [0, 3]


def test_a_sample_is_spread_over_the_row_groups(tmp_path):
    for part in range(4):
        column = np.arange(3000) + 3000 * part
        pq.write_table(pa.table({"x": column, "y": column}), tmp_path / f"{part}.parquet")
    source = scan_source(str(tmp_path))
    found = pa.concat_tables(sample_tables(source, ["x"], max_rows=4096))
    assert found.column_names == ["x"]
    assert [i * 3000 + j for i in range(4) for j in range(1024)] == found["x"].to_pylist()


def test_a_sample_of_a_jsonl_file_is_from_all_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"x": {i}}}\n' for i in range(8192)))
    found = pa.concat_tables(sample_tables(scan_source(str(path)), ["x"], max_rows=80))
    assert [1024 * i + j for i in range(8) for j in range(10)] == found["x"].to_pylist()


def test_a_source_is_sampled_with_the_model_s_tokenizer(tmp_path):
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path / "m"))
    pq.write_table(table(num_rows=300), tmp_path / "rows.parquet")
    source = scan_source(str(tmp_path / "rows.parquet"))
    stage = config(prompt="Q: {question}\nText: {document}")
    hint = lint_source(source, stage, tokenizer, max_rows=120)
    assert (("document", "question"), 120) == (hint.best.fields, hint.num_rows)
    assert hint.is_sample
    assert lint_source(source, config(prompt="{document}"), tokenizer) is None


def test_a_source_without_a_column_of_the_template_is_a_config_error(tmp_path):
    tokenizer = Tokenizer.load(make_tokenizer(tmp_path / "m"))
    pq.write_table(table(), tmp_path / "rows.parquet")
    source = scan_source(str(tmp_path / "rows.parquet"))
    with pytest.raises(ConfigError, match=r"no column 'documnet' .did you mean 'document'"):
        lint_source(source, config(prompt="{question}{documnet}"), tokenizer)


def test_sample_has_every_column_where_a_file_lacks_one(tmp_path):
    write_parquet(tmp_path / "a.parquet", pa.table({"x": ["a"], "y": ["b"]}))
    write_parquet(tmp_path / "b.parquet", pa.table({"x": ["c"]}))
    source = scan_source(str(tmp_path), schema_policy="cast")
    found = pa.concat_tables(sample_tables(source, ["y", "x"], max_rows=4096))
    assert found.to_pylist() == [{"y": "b", "x": "a"}, {"y": None, "x": "c"}]
