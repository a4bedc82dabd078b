"""A report rebuilt from the output, also if no run has written one."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from raybatch.durable.layout import part_name
from raybatch.durable.run_log import RunLog
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.report import RunReport, current_report, keep_report, read_report, report_of_complete
from tests.outputs.support import contents, make_complete, make_sink, write_input, write_unit


@pytest.fixture
def sink(tmp_path):
    return str(tmp_path / "out")


def write_report(sink, *units):
    names = tuple(part_name(unit) for unit in units)
    report = RunReport(
        source="in", sink=sink, model="m", rows_in=12, rows_out=12, total_s=3.0, output_files=names
    )
    report.write()
    return report


def test_the_report_of_a_run_is_taken_where_it_names_the_parts(sink):
    make_complete(sink)
    assert write_report(sink, 0, 1, 2) == current_report(sink)


def test_a_report_older_than_the_parts_is_made_anew(sink):
    make_complete(sink)
    write_report(sink, 0)
    assert current_report(sink).is_rebuilt


def test_a_torn_report_is_made_anew(sink):
    make_complete(sink)
    write_report(sink, 0, 1, 2)
    open_store(sink).replace("_raybatch/report.json", b'{"source": ')
    assert current_report(sink).is_rebuilt


def test_rows_without_a_report_are_counted_from_the_footers(sink, tmp_path):
    source = write_input(tmp_path / "in")
    make_complete(sink, source)
    report = current_report(sink)
    assert (12, 12, 0, 0) == (report.rows_in, report.rows_out, report.rows_lost, report.rows_todo)
    assert (2, 60, 20) == (report.rows_failed, report.prompt_tokens, report.generated_tokens)
    assert (f"file://{source}", "some/model") == (report.source, report.model)
    assert {"ReplicaCrash": ("a.parquet:1",), "InvalidPrompt": ("a.parquet:6",)} == {
        error.error_class: error.row_ids for error in report.errors
    }


def test_rows_of_a_run_that_died_are_still_to_do_and_not_lost(sink):
    write_unit(sink, make_sink(sink), 2)
    report = current_report(sink)
    assert (4, 0, 8, 1) == (report.rows_out, report.rows_lost, report.rows_todo, report.exit_code())
    assert "rows: 12 in, 4 out, 0 lost, 8 still to do" in report.to_text()
    assert "time:" not in report.to_text()


def test_a_part_that_is_gone_after_success_is_lost(sink):
    make_complete(sink)
    open_store(sink).remove(part_name(0))
    report = current_report(sink)
    assert (4, 0) == (report.rows_lost, report.rows_todo)
    (problem,) = current_report(sink).problems
    assert "restore them from a copy, or remove _SUCCESS and run the job again" in problem


def test_a_part_that_cannot_be_read_is_lost(sink):
    write_unit(sink, make_sink(sink), 2)
    open_store(sink).create(part_name(0), b"torn")
    report = current_report(sink)
    assert (4, 4) == (report.rows_lost, report.rows_todo)


def test_a_run_that_died_before_its_plan_has_nothing_to_report(sink):
    make_sink(sink)
    open_store(sink).remove("_raybatch/plan.json")
    with pytest.raises(ConfigError, match="before it wrote its plan"):
        current_report(sink)


def test_a_report_that_a_full_disk_refuses_leaves_the_one_before(sink, monkeypatch, caplog):
    make_complete(sink)
    report = write_report(sink, 0)
    before = contents(Path(sink))

    def refuse(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    kept = keep_report(replace(report, model="other"), sink)
    assert before == contents(Path(sink))
    assert "report: none yet" in kept.to_text().splitlines()
    assert "to make it again" in caplog.text


def test_a_complete_output_that_lacks_its_report_gets_one(sink):
    make_complete(sink)
    store = open_store(sink)
    log = RunLog(store, "run-a", lambda: 1000.0)
    log.write("run_started", source="in", model="m", versions={})
    log.flush()
    found = report_of_complete(sink)
    assert f"report: {sink}/_raybatch/report.json" in found.to_text().splitlines()
    assert found == read_report(sink)
