"""The demo dataset's files."""

from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.demo.run import SCHEMA, write_dataset
from raybatch.demo.task import NOT_STATED, PROMPT


def write(folder, **changes):
    options = {"num_documents": 12, "questions_per_document": 10, "seed": 3, "num_files": 3}
    write_dataset(folder, **(options | changes))
    return sorted(folder.iterdir())


@pytest.fixture
def table(tmp_path):
    return pa.concat_tables(pq.read_table(file) for file in write(tmp_path))


@pytest.fixture
def good(tmp_path):
    files = write(tmp_path, include_bad_rows=False)
    return pa.concat_tables(pq.read_table(file) for file in files)


def test_same_seed_writes_the_same_bytes(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_other_seed_writes_other_bytes(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", seed=4)
    assert first[0].read_bytes() != second[0].read_bytes()


def test_every_file_has_the_schema(tmp_path):
    for file in write(tmp_path):
        assert SCHEMA == pq.read_schema(file)


def test_files_share_the_rows_evenly(tmp_path):
    files = write(tmp_path, include_bad_rows=False)
    assert [40, 40, 40] == [pq.read_metadata(file).num_rows for file in files]


def test_every_file_is_valid_when_there_are_fewer_rows_than_files(tmp_path):
    files = write(
        tmp_path, num_documents=1, questions_per_document=1, num_files=3, include_bad_rows=False
    )
    assert [1, 0, 0] == [pq.read_metadata(file).num_rows for file in files]


def test_each_document_has_its_questions(good):
    counts = good.group_by("doc_id").aggregate([([], "count_all")])["count_all"]
    assert [10] * 12 == counts.to_pylist()


def test_questions_of_one_document_are_scattered(good):
    doc_ids = good["doc_id"].to_pylist()
    neighbours = sum(a == b for a, b in pairwise(doc_ids))
    assert neighbours < len(doc_ids) / 4


def test_answers_are_found_in_their_documents(good):
    for row in good.select(["document", "answer"]).to_pylist():
        assert row["answer"] == NOT_STATED or row["answer"] in row["document"]


@pytest.mark.parametrize("column", ["priority", "spans", "origin", "comment"])
def test_nullable_columns_hold_nulls_and_values(good, column):
    assert 0 < good[column].null_count < good.num_rows


def test_inner_lists_hold_nulls(good):
    spans = [span for row in good["spans"].to_pylist() if row for span in row]
    assert None in spans
    assert any(None in span for span in spans if span)


def test_bad_rows_come_on_top_of_the_good_ones(table):
    assert 12 * 10 + 4 == table.num_rows


def test_one_document_and_one_question_are_null(table):
    assert (1, 1) == (table["document"].null_count, table["question"].null_count)


def test_one_document_is_not_utf8(table):
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        table["document"].validate(full=True)


def test_one_prompt_is_longer_than_the_model_allows(table, tokenizer):
    longest = max(table["document"].cast(pa.binary()).drop_null().to_pylist(), key=len)
    assert len(tokenizer(longest.decode()).input_ids) > 2 * tokenizer.model_max_length


def test_documents_are_about_150_to_400_tokens(tokenizer, tmp_path):
    files = write(
        tmp_path, num_documents=300, questions_per_document=1, num_files=1, include_bad_rows=False
    )
    documents = pq.read_table(files[0], columns=["document"])["document"].to_pylist()
    lengths = [len(ids) for ids in tokenizer(documents).input_ids]
    assert 140 <= min(lengths)
    assert max(lengths) <= 400


def test_prompt_puts_the_document_first():
    assert PROMPT.startswith("{document}")
    assert "a b" == PROMPT.format(document="a b", question="")[:3]


@pytest.mark.parametrize("name", ["num_documents", "questions_per_document", "num_files"])
def test_counts_below_one_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        write(tmp_path, **{name: 0})
