"""The measurements of the command line."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faultlab.mutations import MUTATIONS
from raybatch.cli.app import app
from raybatch.errors import CapacityError, ConfigError
from raybatch.report import RunReport
from raybatch.report.record import report_path
from tests.engine.tiny_models import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a sparse and a dense checkpoint, with a cache folder beside them."""
    folder = tmp_path_factory.mktemp("models")
    for variant in ("qwen3-moe", "qwen3"):
        build(variant).save_pretrained(folder / variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(folder / "cache"))
        yield folder


def bench_plan(model, *options, kv_bytes=1 << 22):
    setting = f"engine.kv_cache_bytes={kv_bytes}"
    command = ["bench", "plan", str(model), "--set", "engine.device=cpu", "--set", setting]
    return CliRunner().invoke(app, [*command, *options])


def in_json(model, *options, **more):
    result = bench_plan(model, "--json", *options, **more)
    assert 0 == result.exit_code, result.exception
    return json.loads(result.stdout)


def refusal(model, *options, **more):
    result = bench_plan(model, *options, **more)
    assert isinstance(result.exception, ConfigError | CapacityError), result.output
    return str(result.exception)


def test_a_plan_says_how_steps_run_and_with_which_options(folder):
    rows = ("--prompt-tokens", "100", "--output-tokens", "20")
    result = bench_plan(folder / "qwen3-moe", *rows)
    assert 0 == result.exit_code, result.exception
    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert "3 layers of 8 experts, 3 for a token, float32" == facts["model"]
    assert "100 prompt and 20 output tokens each" == facts["rows"]
    assert "layers with attention over" in facts["steps"]
    assert facts["options"].startswith("max_batched_tokens=")
    assert "prefill: " in result.stdout
    assert "decode: " in result.stdout


def test_a_plan_says_what_streamed_layers_cost(folder):
    model, setting = folder / "qwen3", "engine.device_weight_bytes={}"
    whole = in_json(model, "--set", setting.format(1 << 30))
    assert whole["weights"] is None
    least = re.search(r"(\d+) at least", refusal(model, "--set", setting.format(1))).group(1)
    streamed = in_json(model, "--set", setting.format(least))["weights"]
    assert streamed["residence"]["is_resident"] == [False] * 3
    for phase in ("prefill", "decode"):
        # a core that copies does not compute
        assert 0 < streamed["plain_s"][phase] < streamed["pass_s"][phase]
    told = bench_plan(model, "--set", setting.format(least)).stdout
    assert "0 of 3 layers stay on the device; a pass copies" in told
    parameters = [line for line in told.splitlines() if line.startswith("parameters")]
    where = "parameters  0 of 3 layers on the device, the others streamed through 2 buffers"
    assert [where] * 2 == parameters


def test_options_of_a_plan_are_those_that_its_phases_and_steps_come_to(folder):
    found = in_json(folder / "qwen3-moe", "--set", "engine.max_batched_tokens=1")
    gates = {name: of["best"]["plan"]["gate_tokens"] for name, of in found["phases"].items()}
    assert {"prefill", "decode"} == set(gates)
    assert 1 < max(gates.values()) == found["options"]["max_batched_tokens"]
    assert found["steps"]["attn_batch_tokens"] == found["options"]["attn_batch_tokens"]
    assert 0 == found["memory"]["host_bytes"]
    assert not any(of["best"]["plan"]["has_kv_on_host"] for of in found["phases"].values())


def test_a_plan_asks_for_no_smaller_steps_than_the_engine_has(folder):
    setting = ("--set", "engine.max_batched_tokens=100000")
    assert 100_000 == in_json(folder / "qwen3", *setting)["options"]["max_batched_tokens"]


def test_a_plan_is_measured_once_unless_it_is_asked_for_afresh(folder):
    build("qwen2").save_pretrained(folder / "qwen2")
    first, again = in_json(folder / "qwen2"), in_json(folder / "qwen2")
    fresh = in_json(folder / "qwen2", "--fresh")
    assert [False, True, False] == [found["was_read"] for found in (first, again, fresh)]
    assert first["profile"] == again["profile"] != fresh["profile"]


def test_memory_for_kv_bounds_the_batch_of_a_plan(folder):
    # 10 rows of 256 tokens
    rows = ("--prompt-tokens", "200", "--output-tokens", "56")
    found = in_json(folder / "qwen3", *rows, kv_bytes=10 * 256 * 1536)
    target = found["phases"]["decode"]["target"]
    assert ("memory for KV", 10) == (target["bound"], target["tokens"])
    assert 10 == found["phases"]["decode"]["best"]["plan"]["gate_tokens"]


def test_kv_of_8_bits_makes_room_for_more_rows_in_a_plan(folder):
    rows = (
        "--prompt-tokens",
        "200",
        "--output-tokens",
        "56",
        "--set",
        "engine.kv_cache_dtype=int8",
    )
    found = in_json(folder / "qwen3", *rows, kv_bytes=10 * 256 * 1536)
    # a row of 32 numbers has 36 bytes in place of 128
    assert 35 == found["phases"]["decode"]["target"]["tokens"]


def test_memory_that_holds_no_row_is_refused_with_what_one_needs(folder):
    told = refusal(folder / "qwen3", "--prompt-tokens", "300", kv_bytes=100 * 1536)
    assert f"of these {(300 + 128) * 1536} are for KV, which may have {64 * 1536}" in told
    assert "raise engine.kv_cache_bytes" in told


def test_memory_for_no_block_is_refused(folder):
    assert "one block of 64 tokens needs" in refusal(folder / "qwen3", kv_bytes=1000)


def write_report(folder, **counts):
    path = Path(report_path(str(folder)))
    path.parent.mkdir(parents=True)
    found = RunReport(source="in", sink=str(folder), model="m", rows_in=12, rows_out=12, **counts)
    path.write_text(found.to_json())
    return ("--like", str(folder))


def test_rows_are_like_those_of_a_job_and_cached_tokens_cost_nothing(folder, tmp_path):
    statuses = {"ok": 9, "truncated": 1, "invalid": 2}
    counts = {"prompt_tokens": 3000, "cached_tokens": 1000, "generated_tokens": 500}
    like = write_report(tmp_path / "out", statuses=statuses, **counts)
    found = in_json(folder / "qwen3", *like)
    assert {"prompt_tokens": 200, "output_tokens": 50} == found["row"]
    found = in_json(folder / "qwen3", *like, "--output-tokens", "7")
    assert {"prompt_tokens": 200, "output_tokens": 7} == found["row"]


def test_an_output_without_answers_says_nothing_of_rows(folder, tmp_path):
    like = write_report(tmp_path / "out", statuses={"invalid": 12})
    assert "no row of this output has generated tokens" in refusal(folder / "qwen3", *like)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--prompt-tokens", "500"), "longer than the 512 tokens of qwen3"),
        (("--set", "engine.dtyp=float32"), "unknown option 'dtyp' (did you mean 'dtype'?)"),
        (("--set", "seed=1"), "--set seed: a plan depends on options of the engine"),
        (("--like", "nowhere"), "nowhere"),
    ],
    ids=["too-long", "unknown-option", "other-option", "no-output"],
)
def test_what_cannot_be_planned_is_refused(folder, options, told):
    assert told in refusal(folder / "qwen3", *options)


def test_a_model_that_is_not_there_is_refused(folder):
    assert "does not exist" in refusal(folder / "missing" / "model")


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
