import json
import sys
from pathlib import Path

import conditions
import e2e
import job_data
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import venvs
from peer_loop import Answer, outcome
from runlog import RunLog
from suites import PEERS, SHARED, SUITES, parts, rows_to_run, sample_rows
from tables import render_conditions, write_results
from workloads_e2e import TokenRequest


def test_a_run_is_continued_from_its_log(tmp_path):
    first = RunLog(tmp_path / "log.jsonl", {"size": 1})
    first.add("measure", "m", "w", "raybatch", {"cpu_s": 1.0})
    second = RunLog(tmp_path / "log.jsonl", {"size": 1})
    assert [r["cpu_s"] for r in second.find("measure", "m", "w", "raybatch")] == [1.0]
    assert second.find("measure", "m", "w", "vllm-eager") == []


def test_half_a_line_of_a_cut_run_is_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    RunLog(path, {}).add("measure", "m", "w", "raybatch", {"cpu_s": 1.0})
    with path.open("a") as file:
        file.write('{"kind": "mea')
    RunLog(path, {}).add("measure", "m", "w", "raybatch", {"cpu_s": 2.0})
    assert [r["cpu_s"] for r in RunLog(path, {})] == [1.0, 2.0]


def test_a_run_with_other_settings_is_not_continued(tmp_path):
    RunLog(tmp_path / "log.jsonl", {"size": 1})
    with pytest.raises(ValueError, match="--fresh"):
        RunLog(tmp_path / "log.jsonl", {"size": 2})


def test_outcome_names_rows_of_the_wrong_length():
    requests = [TokenRequest(prompt_ids=(1, 2), output_len=2) for _ in range(2)]
    described = outcome(requests, Answer(token_ids=[[5, 6], [5]]))
    assert described["rows_of_wrong_length"] == [1]
    assert (described["prompt_tokens"], described["output_tokens"]) == (4, 3)


def test_job_rows_come_back_in_input_order(tmp_path):
    pq.write_table(pa.table({"id": [1, 0], "generated_tokens": [[8], [7]]}), tmp_path / "a.parquet")
    assert job_data.read_output(tmp_path, 2).token_ids == [[7], [8]]


def test_a_job_that_loses_a_row_is_an_error(tmp_path):
    pq.write_table(pa.table({"id": [0, 0], "generated_tokens": [[8], [7]]}), tmp_path / "a.parquet")
    with pytest.raises(job_data.JobOutputError, match="2 rows of 2 came out, 1 unique"):
        job_data.read_output(tmp_path, 2)


def test_job_input_holds_the_prompts(tmp_path):
    job_data.write_input([TokenRequest(prompt_ids=(4, 5), output_len=3)], tmp_path)
    table = pq.read_table(tmp_path / "prompts.parquet")
    assert table.to_pylist() == [{"id": 0, "tokenized_prompt": [4, 5], "output_len": 3}]


def test_job_input_can_have_another_order_and_keeps_the_ids(tmp_path):
    requests = [TokenRequest(prompt_ids=(i,), output_len=i) for i in range(3)]
    job_data.write_input(requests, tmp_path, [2, 0, 1])
    rows = pq.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert [(row["id"], row["tokenized_prompt"]) for row in rows] == [(2, [2]), (0, [0]), (1, [1])]


@pytest.mark.parametrize("column", job_data.CACHED_COLUMNS)
def test_cached_tokens_of_a_job_are_summed_where_it_tells_them(tmp_path, column):
    columns = {"id": [1, 0], "generated_tokens": [[8], [7]], column: [16, 32]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert job_data.read_output(tmp_path, 2).cached_tokens == 48


def test_a_job_that_tells_no_cached_tokens_has_none(tmp_path):
    pq.write_table(pa.table({"id": [0], "generated_tokens": [[7]]}), tmp_path / "a.parquet")
    assert job_data.read_output(tmp_path, 1).cached_tokens is None


def test_a_slow_peer_runs_the_first_rows_of_its_kinds_only():
    slow = PEERS["transformers-static"]
    assert rows_to_run(SHARED, slow) == list(range(64))
    assert rows_to_run(SUITES["full"][0].engine[0], slow) is None
    assert rows_to_run(SHARED, PEERS["raybatch"]) is None


def test_sampled_rows_spread_over_the_workload():
    assert sample_rows(SHARED, 4) == [0, 64, 128, 192]


def test_a_suite_can_be_narrowed_and_resized():
    (part,) = parts("full", ["dense-4m"], ["random"], 8)
    assert [(w.name, w.num_requests) for w in part.engine] == [("random", 8)]
    assert part.job == ()


def test_a_model_folder_goes_by_its_last_name(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert e2e.named_models(f"dense-4m,{folder}") == (
        ["dense-4m", "my-model"],
        {"my-model": folder},
    )


def test_a_model_that_is_neither_known_nor_a_folder_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"absent is neither .* dense-4m"):
        e2e.named_models(str(tmp_path / "absent"))


def test_an_unknown_model_takes_the_workloads_of_the_first_part():
    (part,) = parts("quick", ["demo"], [], None)
    assert part.model == "demo"
    assert part.engine == SUITES["quick"][0].engine


def test_folders_do_not_reach_the_results():
    arguments = ["--venv", "vllm=/a/b", "--suite", "full", "--models", "/c/d"]
    cleaned = ["--venv", "vllm=FOLDER", "--suite", "full", "--models", "FOLDER"]
    assert conditions.without_folders(arguments) == cleaned


def test_a_label_names_the_kind_of_machine():
    features = ["avx2", "avx512f", "amx_bf16"]
    assert conditions.label({"cores": 2, "cpu_features": features}) == "2core-avx512-amx"


def test_results_hold_raw_numbers_and_conditions(tmp_path):
    measure = {
        "kind": "measure",
        "model": "m",
        "workload": "w",
        "peer": "raybatch",
        "cpu_s": 1.5,
        "row_digests": ["a"],
    }
    as_json, as_markdown = write_results(
        tmp_path,
        "run",
        tables="TABLE\n",
        rows=[],
        refused={},
        conditions={"cores": 2, "cpu_features": ["avx2"], "versions": {"raybatch": "torch 2"}},
        records=[measure],
    )
    assert json.loads(as_json.read_text())["raw"] == [
        {"kind": "measure", "model": "m", "workload": "w", "peer": "raybatch", "cpu_s": 1.5}
    ]
    assert "TABLE" in as_markdown.read_text()
    assert "- versions: raybatch torch 2" in as_markdown.read_text()


def test_raw_numbers_of_refused_workloads_are_left_out(tmp_path):
    measure = {"kind": "measure", "model": "m", "workload": "w", "peer": "raybatch", "cpu_s": 1.5}
    as_json, _ = write_results(
        tmp_path,
        "run",
        tables="",
        rows=[],
        refused={("m", "w"): "differs"},
        conditions={},
        records=[measure],
    )
    assert json.loads(as_json.read_text())["raw"] == []


def test_conditions_are_a_list():
    assert render_conditions({"cpu_model": "X"}) == "## Conditions\n\n- cpu model: X\n"


def test_a_given_venv_is_used_as_it_is(tmp_path):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert venvs.ensure("vllm", {"vllm": tmp_path}) == python


def test_a_given_folder_without_python_is_an_error(tmp_path):
    with pytest.raises(venvs.VenvError, match=r"given for vllm .* bin/python"):
        venvs.ensure("vllm", {"vllm": tmp_path})


def test_a_failed_venv_is_told_without_paths():
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    with pytest.raises(venvs.VenvError) as caught:
        venvs._call("vllm", command, "pip install torch")
    assert str(caught.value) == "could not make the venv of vllm: pip install torch failed"


def test_a_venv_of_an_unknown_peer_is_an_error():
    assert venvs.parse_given(["vllm=x/y"]) == {"vllm": Path("x/y")}
    with pytest.raises(ValueError, match="--venv takes NAME=FOLDER"):
        venvs.parse_given(["vlm=x"])
