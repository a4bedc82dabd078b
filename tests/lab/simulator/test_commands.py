"""The commands about simulated pools."""

import json
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.config import EngineConfig
from raybatch.engine.profile.cached_file import write_cached
from raybatch.errors import ConfigError
from raybatch_lab.calibrate import calibrate
from raybatch_lab.calibration_rows import held_out_rows, training_rows
from raybatch_lab.simulated import rows_like, validated_spec
from raybatch_lab.simulator.validation import RunErrors, Validation, validation_path
from tests.engine.tiny_models import build
from tests.lab.simulator.pools import costs

ERRORS = Validation(
    step_error=0.04,
    completion_error=0.03,
    ratio_error=0.01,
    full_step_tokens=None,
    cpu_share=1.0,
    runs=(),
)


@pytest.fixture
def cost_model(tmp_path):
    """Return the file of a validated cost model."""
    path = tmp_path / "cost.json"
    limits = {"kv_tokens": 1 << 18, "max_num_seqs": 32}
    path.write_text(json.dumps(asdict(costs(**limits))))
    write_cached(ERRORS, validation_path(path), what="validation")
    return path


def simulate(cost_model, *options):
    command = ["bench", "simulate", "--workload", "W11", "--rows", "400", "--replicas", "4,1"]
    return CliRunner().invoke(app, [*command, "--cost-model", str(cost_model), *options])


def test_figures_are_printed_with_their_error(cost_model):
    result = simulate(cost_model)
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    (header,) = [n for n, line in enumerate(lines) if line.startswith("replicas")]
    one, four = lines[header + 1 : header + 3]
    assert (one.split()[0], four.split()[0]) == ("1", "4")
    assert one.count("+-3.0") == four.count("+-3.0") == 5


def test_figures_are_written_to_a_file(cost_model, tmp_path):
    out = tmp_path / "figures.json"
    assert simulate(cost_model, "--out", str(out)).exit_code == 0
    found = json.loads(out.read_text())
    assert found["is_simulated"]
    assert [each["num_replicas"] for each in found["figures"]] == [1, 4]
    assert found["validation"]["completion_error"] == 0.03


def test_replicas_are_slowed_and_killed(cost_model, tmp_path):
    out = tmp_path / "figures.json"
    result = simulate(cost_model, "--slow", "0:2", "--kill", "0@0.5", "--out", str(out))
    assert result.exit_code == 0, result.exception
    one, four = json.loads(out.read_text())["figures"]
    assert one["num_deaths"] == four["num_deaths"] == 1
    assert one["ideal_s"] / four["ideal_s"] == pytest.approx(3.5 / 0.5)


def test_no_figure_is_printed_without_a_validation(cost_model):
    validation_path(cost_model).unlink()
    result = simulate(cost_model)
    assert isinstance(result.exception, ConfigError)
    assert "bench calibrate" in str(result.exception)
    assert result.stdout == ""


def test_no_figure_is_printed_where_simulations_are_too_far_off(cost_model):
    write_cached(replace(ERRORS, ratio_error=0.05), validation_path(cost_model), what="validation")
    result = simulate(cost_model)
    assert isinstance(result.exception, ConfigError)
    assert "the ratio of two policies is off by 5.0%" in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--replicas", "1,many"), "must be whole numbers"),
        (("--replicas", "0"), "each number must be at least 1"),
        (("--slow", "1"), "--slow 0:2"),
        (("--slow", "7:2"), "there is no replica of rank 7"),
        (("--kill", "0@2"), "cannot die at a fraction of 2.0"),
        (("--kill", "0:0.5"), "--kill 0@0.5"),
        (("--workload", "W99"), "unknown workload 'W99'"),
        (("--set", "engine.max_num_seqs=8"), "no effect with --cost-model"),
        (("--out", "no/such/folder/file.json"), "its folder does not exist"),
    ],
)
def test_what_cannot_be_simulated_is_told(cost_model, options, message):
    result = simulate(cost_model, *options)
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)


def test_a_scheduler_that_is_not_simulated_is_told():
    result = CliRunner().invoke(app, ["bench", "calibrate", "--backend", "fake"])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be simulated" in str(result.exception)


def test_pools_of_vllm_schedule_as_it_does(cost_model):
    write_cached(replace(ERRORS, backend="vllm"), validation_path(cost_model), what="validation")
    assert validated_spec(cost_model)[0].is_vllm
    assert simulate(cost_model).exit_code == 0


def test_a_missing_cost_model_is_told(tmp_path):
    result = simulate(tmp_path / "none.json")
    assert isinstance(result.exception, ConfigError)
    assert "there is no cost model" in str(result.exception)


def write_output(folder, **columns):
    (folder / "data").mkdir()
    pq.write_table(pa.table(columns), folder / "data" / "part.parquet")
    return rows_like(str(folder), ["data/part.parquet"])


def test_lengths_are_those_of_an_output(tmp_path):
    rows = write_output(
        tmp_path, x_num_input_tokens=[5, 6, 7], x_num_generated_tokens=[3, None, 9], other=[1, 2, 3]
    )
    assert (rows.prompt.tolist(), rows.output.tolist()) == ([5, 7], [3, 9])


def test_an_output_without_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no row of this output"):
        write_output(tmp_path, num_input_tokens=[5], num_generated_tokens=[0])


def test_an_output_of_several_samples_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="several samples"):
        write_output(tmp_path, num_input_tokens=[5], num_generated_tokens=[[1, 2]])


@pytest.mark.parametrize("max_tokens", [64, 512, 4096])
@pytest.mark.parametrize("workloads", [training_rows, held_out_rows])
def test_calibrating_rows_fit_the_model(workloads, max_tokens):
    for _, *_, rows in workloads(max_tokens):
        assert rows.longest_tokens <= max_tokens
        assert np.array_equal(rows.new_tokens, rows.output)


@pytest.mark.slow
def test_held_out_runs_take_the_steps_that_are_simulated(tmp_path):
    build("qwen3").save_pretrained(tmp_path / "model")
    engine = EngineConfig(
        device="cpu", block_size_tokens=8, kv_cache_bytes=1 << 24, max_model_len=64
    )
    found = calibrate(str(tmp_path / "model"), engine, seconds=0.01, folder=tmp_path)
    runs: tuple[RunErrors, ...] = found.validation.runs
    assert len(runs) == 8
    assert all(run.num_steps == run.num_simulated_steps for run in runs)
    assert sum(run.num_steps for run in runs) > 100
    assert found.is_stored == validation_path(found.cost_model).exists()
    assert found.is_stored == (not found.validation.failures())
