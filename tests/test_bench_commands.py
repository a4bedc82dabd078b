"""The measurements of the command line."""

import json

from typer.testing import CliRunner

from raybatch.cli import app
from raybatch.faults.mutations import MUTATIONS


def test_simulated_faults_are_printed_and_stored(tmp_path):
    out = tmp_path / "faults.json"
    options = ["--schedules", "60", "--rounds", "0", "--no-sweep", "--no-peers", "--no-bad-inputs"]
    result = CliRunner().invoke(
        app, ["bench", "faults", *options, "--seed", "5", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "simulated   60 schedules" in result.output
    assert f"{len(MUTATIONS)} of {len(MUTATIONS)} planted bugs found" in result.output
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
