"""The run report: text, JSON, exit codes."""

import json
import re
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest

from raybatch.durable.commit import commit_unit
from raybatch.durable.run_log import RunLog
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.planning.store import StoredPlan, write_plan
from raybatch.policy.cost.estimate import TimeEstimate
from raybatch.prefix.histogram import Histogram
from raybatch.records.pool_stats import QuantileCoverage
from raybatch.report import ErrorCount, RunReport, read_report, report_of
from raybatch.report.history import History, RunRecord, RunSample, UnitTime
from raybatch.report.record import report_path
from tests.durable.support import make_plan, unit_of
from tests.explanation.inputs import explain_prompts, grouped_prompts


def make_report(**changes):
    values = {"source": "in", "sink": "out", "model": "demo", "rows_in": 4, "rows_out": 4}
    return RunReport(**{**values, **changes})


def test_paths_of_a_report_can_be_pasted_into_a_shell():
    text = make_report(sink="my answers/it's").to_text()
    assert "output: 'my answers/it'\"'\"'s' (0 files)" in text
    assert "report: 'my answers/it'\"'\"'s/_raybatch/report.json'" in text


def test_exit_code_is_0_for_good_and_truncated_rows():
    assert make_report(statuses={"ok": 3, "truncated": 1}).exit_code() == 0


def test_exit_code_is_2_with_error_rows():
    assert make_report(statuses={"ok": 3, "invalid": 1}).exit_code() == 2


@pytest.mark.parametrize(
    "changes", [{"rows_lost": 1}, {"rows_duplicated": 1}, {"problems": ("a is no part",)}]
)
def test_exit_code_is_1_when_the_output_is_not_clean(changes):
    assert make_report(statuses={"invalid": 1}, **changes).exit_code() == 1


def test_text_has_the_line_of_rows():
    assert "rows: 4 in, 4 out, 0 lost" in make_report().to_text().splitlines()


def test_text_says_what_earlier_runs_have_written():
    assert "0 lost; 3 of them were written by earlier runs" in make_report(rows_resumed=3).to_text()


def test_text_names_repeated_rows():
    assert "rows: 4 in, 4 out, 0 lost, 2 duplicated" in make_report(rows_duplicated=2).to_text()


def test_text_and_page_name_files_that_were_left_out():
    skipped = tuple((f"f{i}.parquet", "<cut>") for i in range(5))
    report = make_report(skipped=skipped)
    lines = report.to_text().splitlines()
    assert "skipped: 5 files that cannot be read, ..." in lines
    assert "  f0.parquet: <cut>" in lines
    assert "f4.parquet" in report.to_html()
    assert "&lt;cut&gt;" in report.to_html()


def test_text_counts_special_tokens_in_texts():
    report = make_report(special_rows=1, special_tokens=3)
    assert "texts: 3 special tokens of the model in 1 row" in report.to_text().splitlines()


def test_page_has_a_card_for_rows_still_to_do():
    page = make_report(rows_out=1, rows_todo=3).to_html()
    assert 'aria-label="still to do 3"' in page


def test_text_names_the_limit_that_stopped_the_run():
    lines = make_report(rows_todo=3, stopped="limits.max_cost: 3.00").to_text().splitlines()
    assert "stopped: limits.max_cost: 3.00" in lines


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
        skipped=(("b.parquet", "empty"),),
        special_rows=1,
        special_tokens=2,
        stopped="limits.max_tokens: 9",
    )
    assert report.write() == report_path(str(tmp_path))
    assert read_report(str(tmp_path)) == report


def test_missing_report_names_the_expected_path(tmp_path):
    with pytest.raises(ConfigError, match=r"has no report; expected .*report\.json"):
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
        grouped_prompts(rng, groups=6, size=5, prefix=32, own=8), kv_tokens=400, time=time
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
    assert "plan: order auto; hit rate 64.0 % planned, 50.0 % actual" in text
    assert "the KV cache was 50 % smaller than planned" in text
    assert "engine time: 1 min 40 s planned, 90 s actual" in text
    assert "wall time: 50 s planned, 50 s actual" in text


def test_a_report_with_a_plan_is_read_as_it_was_written(planned_report):
    planned_report.write()
    assert planned_report == read_report(planned_report.sink)


def test_a_page_lies_beside_the_json(planned_report, tmp_path):
    planned_report.write()
    page = (tmp_path / "out" / "_raybatch" / "report.html").read_text()
    assert page == planned_report.to_html()
    assert {"Run", "Plan and actual", "Input", "Orders"} <= set(re.findall("<h2>(.*?)</h2>", page))


def test_a_page_without_plan_and_logs_has_audit_and_run_alone():
    assert ["Audit of the output", "Run"] == re.findall("<h2>(.*?)</h2>", make_report().to_html())


def test_nothing_of_a_report_is_markup():
    evil = "</script><img src=x>'\"&"
    error = ErrorCount(error_class=evil, rows=1, row_ids=(evil,), message=evil)
    unit = UnitTime(unit=1, start_s=0, seconds=1, rows=1, host=evil, pid=1)
    run = make_run(end=evil, host=evil, slowest=(unit,), units=(unit,), units_written=1)
    report = make_report(
        errors=(error,),
        source=evil,
        sink=evil,
        model=evil,
        problems=(evil,),
        statuses={evil: 1},
        history=History(runs=(run,)),
    )
    for page in (report.to_html(), report._repr_html_()):
        assert "<img" not in page
        assert "<script" not in page


def quantile(share, num_rows, num_below, num_at_most):
    return QuantileCoverage(
        share=share, num_rows=num_rows, num_below=num_below, num_at_most=num_at_most
    )


def make_run(**changes):
    samples = tuple(
        RunSample(
            end_s=float(i),
            seconds=1.0,
            rows=i,
            prompt_tokens=100 * i,
            generated_tokens=10 * i,
            num_ready=2,
            engines=((0, 0.5, 1.0), (1, 1.0, 1.0)),
            length_coverage=(quantile(0.5, 10 * i, 4 * i, 5 * i),),
        )
        for i in range(1, 5)
    )
    values = {"run_id": "a", "started": 1.7e9, "seconds": 5.0, "samples": samples}
    return RunRecord(**{**values, "end": "finished", **changes})


def test_a_report_with_a_history_is_read_as_it_was_written(tmp_path):
    history = History(runs=(make_run(end="", versions={"ray": "2"}), make_run(run_id="b")))
    lengths = Histogram.of(np.array([3, 30, 300]))
    report = make_report(sink=str(tmp_path), history=history, prompt_lengths=lengths)
    report.write()
    assert report == read_report(str(tmp_path))


def test_a_report_says_how_engines_of_the_last_run_ran():
    runs = (make_run(modes=(("as before", 9),)), make_run(modes=(("a", 2), ("b", 1))), make_run())
    report = make_report(history=History(runs=runs))
    lines = [line for line in report.to_text().splitlines() if line.startswith("engine:")]
    assert ["engine: a (2 engines)", "engine: b (1 engine)"] == lines
    assert "a (2 engines)" in report.to_html()
    again = make_run(modes=(("a", 2), ("b", 1)), mode_changes=3)
    lines = make_report(history=History(runs=(again,))).to_text().splitlines()
    assert "engine: b (1 engine); chosen or forecast 3 times before" in lines
    assert "engine:" not in make_report(history=History(runs=(make_run(),))).to_text()


def coverage_lines(*coverages):
    runs = [
        make_run(samples=(RunSample(end_s=1.0, seconds=1.0, length_coverage=coverage),))
        for coverage in coverages
    ]
    report = make_report(history=History(runs=tuple(runs)))
    return [line for line in report.to_text().splitlines() if line.startswith("output lengths")]


def test_a_report_says_how_many_outputs_were_as_long_as_predicted():
    first = (quantile(0.1, 150, 12, 18), quantile(0.9, 150, 140, 140))
    second = (quantile(0.1, 50, 8, 10), quantile(0.9, 50, 44, 44))
    assert coverage_lines(first, (), second) == [
        "output lengths: of 200 outputs, within the predicted length of 10.0 %: 10.0 % to 14.0 %, "
        "of 90.0 %: 92.0 %"
    ]


def test_shares_of_few_predictions_are_not_told():
    assert coverage_lines((quantile(0.5, 99, 50, 50),)) == []
    assert len(coverage_lines((quantile(0.5, 100, 50, 50),))) == 1


def test_the_page_tells_coverage_beside_the_lengths():
    run = make_run(
        samples=(RunSample(end_s=1.0, seconds=1.0, length_coverage=(quantile(0.5, 100, 50, 50),)),)
    )
    lengths = Histogram.of(np.array([3, 30, 300]))
    page = make_report(history=History(runs=(run,)), output_lengths=lengths).to_html()
    assert "within the predicted length of 50.0 %: 50.0 %" in page.split("<h2>Lengths</h2>")[1]


def test_a_page_shows_time_engines_lengths_errors_and_runs():
    lengths = Histogram.of(np.array([3, 30, 300]))
    error = ErrorCount(error_class="X", rows=1, row_ids=("a",), message="m")
    unit = UnitTime(unit=1, start_s=0, seconds=1, rows=1, host="h", pid=1)
    run = make_run(slowest=(unit,), units=(unit,), units_written=1)
    report = make_report(
        errors=(error,), prompt_lengths=lengths, history=History(runs=(run, make_run()))
    )
    assert re.findall("<h2>(.*?)</h2>", report.to_html()) == [
        "Audit of the output",
        "Run",
        "Errors",
        "Timeline",
        "Engines",
        "Units",
        "Lengths",
        "Runs",
    ]


def test_a_run_that_was_killed_gives_no_quantiles_of_units():
    unit = UnitTime(unit=1, start_s=0, seconds=9, rows=1, host="h", pid=1)
    killed = make_run(slowest=(unit,), units=(unit,), units_written=5)
    ended = make_run(slowest=(unit,), units=(unit,), units_written=2, median_unit_s=9.0)
    assert "half took" not in make_report(history=History(runs=(killed,))).to_html()
    page = make_report(history=History(runs=(killed, ended))).to_html()
    assert "7 written; half took up to 9.0 s" in page


def test_a_page_is_well_formed_and_needs_nothing_from_elsewhere():
    report = make_report(history=History(runs=(make_run(), make_run(end=""))))
    page = report.to_html()
    svgs = re.findall("<svg.*?</svg>", page)
    assert len(svgs) >= 3
    for svg in svgs:
        ElementTree.fromstring(svg)
    assert not re.search(r"(?i)<script|<link|src=|href=|url\(|@import|http", page)


def test_text_tells_every_run_where_there_were_several():
    report = make_report(history=History(runs=(make_run(end=""), make_run(run_id="b"))))
    text = report.to_text()
    assert "  run: 5.0 s, its log has no end: killed, or still running" in text.splitlines()
    assert "in 2 runs" in text


def test_text_tells_what_is_wrong_with_the_output():
    text = make_report(problems=("x is not a part of",)).to_text()
    assert "  problem: x is not a part of" in text.splitlines()


def test_printing_a_report_shows_its_text():
    assert str(make_report()) == make_report().to_text()


def test_a_notebook_gets_the_tables_without_wide_drawings():
    fragment = make_report(history=History(runs=(make_run(),)))._repr_html_()
    assert fragment.startswith('<div class="raybatch">')
    assert "<svg" not in fragment
    assert "Runs" in fragment


UNITS = [[0, 1], [2, 3], [4]]


@pytest.fixture
def crashed(tmp_path):
    """A sink of a run that was killed after the first of three units."""
    sink = str(tmp_path / "out")
    plan = make_plan(UNITS)
    stored = StoredPlan(
        hash=plan.hash,
        num_rows=5,
        num_units=3,
        num_groups=1,
        is_reordered=True,
        logical_tokens=100,
        computed_tokens=40,
        block_size=8,
        options={},
        files=(),
        shards=(),
        fingerprint={},
    )
    write_plan(sink, stored, plan)
    store = open_store(sink)
    commit_unit(store, **unit_of(plan, UNITS, 0))
    log = RunLog(store, "run-a", lambda: 1000.0)
    log.write("run_started", source="s3://k:Zq7RvW2k@in", model="m", versions={"ray": "2"})
    log.flush()
    return sink


def test_a_report_is_made_of_what_a_crash_left(crashed):
    report = report_of(crashed)
    assert (5, 2, 3, 0, 0) == (
        report.rows_in,
        report.rows_out,
        report.rows_todo,
        report.rows_lost,
        report.rows_duplicated,
    )
    assert ("m", 0.6, 1) == (report.model, report.planned_hit_rate, report.exit_code())
    assert report.problems == (
        "2 units not written yet, such as 1, 2; run the job again to resume",
    )
    assert [""] == [run.end for run in report.history.runs]


def test_a_report_of_a_crash_holds_no_secret(crashed):
    report = report_of(crashed)
    assert "Zq7RvW2k" not in report.to_html() + report.to_text() + report.to_json()


def test_a_report_of_an_output_without_logs_says_what_it_knows(crashed):
    shutil.rmtree(f"{crashed}/_raybatch/runs")
    report = report_of(crashed)
    assert (2, "not known") == (report.rows_out, report.model)


def test_a_report_of_a_folder_without_a_plan_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read"):
        report_of(str(tmp_path))


def test_a_plan_of_another_version_is_a_config_error(planned_report):
    path = planned_report.write()
    with open(path) as file:
        stored = json.load(file)
    stored["plan"]["plan"]["unheard_of"] = 1
    with open(path, "w") as file:
        json.dump(stored, file)
    with pytest.raises(ConfigError, match="unheard_of"):
        read_report(planned_report.sink)
