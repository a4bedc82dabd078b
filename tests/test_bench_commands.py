"""The measurements of the command line."""

import json

from typer.testing import CliRunner

from raybatch.cli import app


def test_simulated_faults_are_printed_and_stored(tmp_path):
    out = tmp_path / "faults.json"
    options = ["--schedules", "60", "--rounds", "0", "--no-sweep", "--no-peers", "--seed", "5"]
    result = CliRunner().invoke(app, ["bench", "faults", *options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "simulated   60 schedules" in result.output
    assert "9 of 9 planted bugs found" in result.output
    stored = json.loads(out.read_text())
    assert (60, [], True) == (
        stored["simulation"]["num_schedules"],
        stored["simulation"]["violations"],
        stored["is_right"],
    )


def test_a_file_that_cannot_be_written_is_refused_before_hours_of_work(tmp_path):
    out = tmp_path / "missing" / "faults.json"
    result = CliRunner().invoke(app, ["bench", "faults", "--out", str(out)])
    assert "there is no such folder" in str(result.exception)
