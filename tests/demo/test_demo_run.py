"""The demo command's folder, scoring and summary; the whole run is in test_pipelines."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.demo.run import DemoResult, claim_folder, run_demo, score_answers
from raybatch.errors import ConfigError
from raybatch.report import RunReport


def make_report(**changes):
    values = {"source": "in", "sink": "out", "model": "demo", "rows_in": 4, "rows_out": 4}
    return RunReport(**{**values, **changes})


def test_a_folder_with_other_files_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="not the folder of an earlier demo"):
        run_demo(tmp_path, rows=1, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(ConfigError, match="not the folder of an earlier demo"):
        run_demo(tmp_path / "out", rows=1, seed=0)


def test_an_earlier_demo_is_replaced_and_other_files_beside_it_are_kept(tmp_path):
    claim_folder(tmp_path)
    for name in ("prompts/a.parquet", "answers/b.parquet", "mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    claim_folder(tmp_path)
    names = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert names == ["mine.txt"]


def test_error_rows_and_rows_without_an_answer_are_not_scored(tmp_path):
    table = pa.table(
        {
            "answer": ["a", "b", "c", None],
            "generated_text": [" a", "x", None, "d"],
            "__inference_error__": ["", "", "InvalidPrompt: null", ""],
        }
    )
    for name in ("1.parquet", "2.parquet"):
        pq.write_table(table, tmp_path / name)
    report = make_report(sink=str(tmp_path), output_files=("1.parquet", "2.parquet"))
    assert score_answers(report) == (4, 2)


def test_the_score_is_rounded_down():
    result = DemoResult(report=make_report(), rows_scored=1000, rows_right=949)
    assert result.to_text().splitlines()[-1] == "exact match: 0.94"


def test_nothing_to_score_is_no_match():
    result = DemoResult(report=make_report(), rows_scored=0, rows_right=0)
    assert result.to_text().splitlines()[-1] == "exact match: 0.00"
