"""The run report: text, JSON, exit codes."""

import json
import re

import pytest

from raybatch.errors import ConfigError
from raybatch.explanation.build import SpeedAndPrice
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.explanation.time import TimeEstimate
from raybatch.report import (
    ErrorCount,
    RunReport,
    read_report,
    report_path,
)
from tests.explanation.inputs import explain_prompts, grouped_prompts


def make_report(**changes):
    values = {"source": "in", "sink": "out", "model": "demo", "rows_in": 4, "rows_out": 4}
    return RunReport(**{**values, **changes})


def test_exit_code_is_0_for_good_and_truncated_rows():
    assert make_report(statuses={"ok": 3, "truncated": 1}).exit_code() == 0


def test_exit_code_is_2_with_error_rows():
    assert make_report(statuses={"ok": 3, "invalid": 1}).exit_code() == 2


@pytest.mark.parametrize("changes", [{"rows_lost": 1}, {"rows_duplicated": 1}])
def test_exit_code_is_1_when_rows_are_lost_or_repeated(changes):
    assert make_report(statuses={"invalid": 1}, **changes).exit_code() == 1


def test_text_has_the_line_of_rows():
    assert "rows: 4 in, 4 out, 0 lost" in make_report().to_text().splitlines()


def test_text_says_what_earlier_runs_have_written():
    assert "0 lost; 3 of them were written by earlier runs" in make_report(rows_resumed=3).to_text()


def test_text_names_repeated_rows():
    assert "rows: 4 in, 4 out, 0 lost, 2 duplicated" in make_report(rows_duplicated=2).to_text()


def test_text_states_rates_over_engine_time():
    text = make_report(prompt_tokens=1000, generated_tokens=50, engines_s=2.0).to_text()
    assert "speed: 500 prompt tokens/s, 25 output tokens/s" in text


def test_text_escapes_terminal_codes_in_row_ids():
    error = ErrorCount(error_class="InvalidPrompt", rows=1, row_ids=("\x1b[2Jé",))
    assert "(rows \\x1b[2J\\xe9)" in make_report(errors=(error,)).to_text()


def test_json_holds_derived_figures():
    values = json.loads(make_report(statuses={"invalid": 1}).to_json())
    assert (values["rows_failed"], values["exit_code"]) == (1, 2)


def test_written_report_reads_back_equal(tmp_path):
    error = ErrorCount(error_class="InvalidPrompt", rows=1, row_ids=("a",), message="m")
    report = make_report(
        sink=str(tmp_path),
        errors=(error,),
        statuses={"ok": 3, "invalid": 1},
        output_files=("part-0.parquet",),
    )
    assert report.write() == report_path(str(tmp_path))
    assert read_report(str(tmp_path)) == report


def test_missing_report_names_the_expected_path(tmp_path):
    with pytest.raises(ConfigError, match=r"no report here; expected .*report\.json"):
        read_report(str(tmp_path))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"errors": [], "output_files": []}'])
def test_foreign_report_is_a_config_error(tmp_path, content):
    path = tmp_path / "_raybatch" / "report.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_report(str(tmp_path))


def test_speed_of_a_run_too_short_to_be_measured_is_not_zero():
    lines = make_report(prompt_tokens=20, engines_s=0.0).to_text().splitlines()
    assert "speed: not measured, too little work" in lines


@pytest.fixture
def planned_report(tmp_path, rng):
    time = TimeEstimate(engine_s=100, wall_s=50, low_s=40, high_s=60, num_replicas=2)
    plan = explain_prompts(
        grouped_prompts(rng, groups=6, size=5, prefix=32, own=8),
        kv_tokens=400,
        speed=SpeedAndPrice(time=time),
    )
    actual = RunActual(
        prompt_tokens=1200,
        computed_tokens=600,
        generated_tokens=480,
        num_rows=30,
        num_generated=30,
        kv_tokens=200,
        engine_s=90.0,
        wall_s=50.0,
    )
    outcome = PlanOutcome(plan=plan, actual=actual)
    return make_report(sink=str(tmp_path / "out"), plan=outcome)


def test_text_puts_plan_and_actual_side_by_side(planned_report):
    text = planned_report.to_text()
    assert "plan: order ratio; hit rate 64.0 % planned, 50.0 % actual" in text
    assert "the KV cache was 50 % smaller than planned" in text
    assert "engine time: 1 min 40 s planned, 90 s actual" in text
    assert "time by the clock: 50 s planned, 50 s actual" in text


def test_a_report_with_a_plan_is_read_as_it_was_written(planned_report):
    planned_report.write()
    assert planned_report == read_report(planned_report.sink)


def test_a_page_lies_beside_the_json(planned_report, tmp_path):
    planned_report.write()
    page = (tmp_path / "out" / "_raybatch" / "report.html").read_text()
    assert page == planned_report.to_html()
    assert {"Run", "Plan and actual", "Input", "Orders"} <= set(re.findall("<h2>(.*?)</h2>", page))


def test_a_page_without_a_plan_has_the_run_alone():
    assert ["Run"] == re.findall("<h2>(.*?)</h2>", make_report().to_html())


def test_row_ids_and_errors_are_no_markup():
    evil = "</script><img src=x>"
    error = ErrorCount(error_class=evil, rows=1, row_ids=(evil,), message=evil)
    assert "<img" not in make_report(errors=(error,), source=evil, sink=evil).to_html()


def test_a_plan_of_another_version_is_a_config_error(planned_report):
    path = planned_report.write()
    with open(path) as file:
        stored = json.load(file)
    stored["plan"]["plan"]["unheard_of"] = 1
    with open(path, "w") as file:
        json.dump(stored, file)
    with pytest.raises(ConfigError, match="unheard_of"):
        read_report(planned_report.sink)
