"""The measurements of the command line."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faultlab.mutations import MUTATIONS
from raybatch.cli.app import app
from raybatch.config import EngineConfig
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.errors import CapacityError, ConfigError
from raybatch.policy.cost.layers import RowsAhead, RowShape
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


def lines_of(result):
    assert 0 == result.exit_code, result.exception
    return result.stdout.splitlines()


ROWS = ("--prompt-tokens", "100", "--output-tokens", "20", "--rows", "500")
HOST = ("--set", f"engine.host_kv_bytes={1 << 26}")


def test_a_plan_says_what_the_engine_chooses_and_by_what(folder):
    lines = lines_of(bench_plan(folder / "qwen3-moe", *ROWS, *HOST))
    facts = dict(line.split(maxsplit=1) for line in lines[1:8])
    assert "3 layers of 8 experts, 3 for a token, float32" == facts["model"]
    assert "100 prompt and 20 output tokens each, 500" == facts["rows"]
    assert "4.2 MB on the device (5,440 tokens), 67.1 MB" in lines[4]
    assert "output tokens/s forecast, " in facts["engine"]
    assert "steps of up to" in facts["with"]
    table = lines[lines.index(next(line for line in lines if line.startswith("step tokens"))) :]
    assert {"host", "device"} == {line.split()[-1] for line in table[1:3]}
    assert "measures nothing" not in "".join(lines)


def test_a_plan_is_what_an_engine_with_these_options_chooses(folder):
    found = in_json(folder / "qwen3-moe", *ROWS, *HOST)
    config = EngineConfig(device="cpu", kv_cache_bytes=1 << 22, host_kv_bytes=1 << 26)
    prepared = PreparedModel.load(str(folder / "qwen3-moe"), config)
    rows = RowsAhead(shape=RowShape(prompt_tokens=100, output_tokens=20), num_rows=500)
    chosen = prepared.choose(rows)
    assert json.loads(json.dumps(asdict(chosen))) == found["choice"]
    costs = json.loads(json.dumps(asdict(prepared.inputs(rows))["costs"]))
    # runs that are never read together have no least length in JSON
    least = costs["cascade"]["min_tokens"]
    costs["cascade"]["min_tokens"] = [None if math.isinf(n) else n for n in least]
    assert costs == found["inputs"]["costs"]
    assert ("", None) == (found["not_asked"], found["with_host"])


def test_an_engine_that_does_not_ask_is_shown_with_what_host_memory_would_give(folder):
    found = in_json(folder / "qwen3-moe", *ROWS)
    assert "engine.host_kv_bytes is 0" in found["not_asked"]
    assert [False] == [mode["kv_offload"] for mode in found["choice"]["candidates"]]
    assert {False, True} == {mode["kv_offload"] for mode in found["with_host"]["candidates"]}
    # 500 rows, and no more than those: a token has 768 bytes
    assert 500 * (120 + 64) * 768 == found["with_host_bytes"]
    lines = lines_of(bench_plan(folder / "qwen3-moe", *ROWS))
    assert "measures nothing for this: KV on device: engine.host_kv_bytes" in lines[-2]
    assert f"--set engine.host_kv_bytes={found['with_host_bytes']} would give" in lines[-1]


def test_where_an_option_wants_kv_on_the_device_no_host_memory_is_proposed(folder):
    found = in_json(folder / "qwen3-moe", *ROWS, "--set", "engine.speculative_tokens=2")
    assert found["with_host"] is None
    assert "engine.speculative_tokens" in found["not_asked"]


def test_a_plan_says_what_streamed_layers_cost(folder):
    model, setting = folder / "qwen3", "engine.device_weight_bytes={}"
    whole = in_json(model, "--set", setting.format(1 << 30))
    assert whole["weights"] is None
    least = re.search(r"at least (\d+)", refusal(model, "--set", setting.format(1))).group(1)
    streamed = in_json(model, "--set", setting.format(least))["weights"]
    assert streamed["placement"]["is_resident"] == [False] * 3
    for phase in ("prefill", "decode"):
        # a core that copies does not compute
        assert 0 < streamed["plain_s"][phase] < streamed["streamed_s"][phase]
    lines = lines_of(bench_plan(model, "--set", setting.format(least)))
    message = "0 of 3 layers stay on the device; a step copies"
    assert any(line.startswith(f"weights    {message}") for line in lines)


def test_a_plan_is_measured_once_unless_it_is_asked_for_afresh(folder):
    build("qwen2").save_pretrained(folder / "qwen2")
    first, again = in_json(folder / "qwen2"), in_json(folder / "qwen2")
    fresh = in_json(folder / "qwen2", "--fresh")
    assert [False, True, False] == [found["was_read"] for found in (first, again, fresh)]
    assert first["profile"] == again["profile"] != fresh["profile"]


def rows_at_once(model, *options, tokens):
    """Return the rows of 200 + 56 tokens that run at once with float32 KV for `tokens` tokens."""
    rows = ("--prompt-tokens", "200", "--output-tokens", "56")
    found = in_json(model, *rows, *options, kv_bytes=tokens * 1536)
    return found["choice"]["best"]["rows_together"]


def test_memory_for_kv_bounds_the_rows_of_a_plan(folder):
    assert 10 == rows_at_once(folder / "qwen3", tokens=2560)


def test_kv_of_8_bits_makes_room_for_more_rows_in_a_plan(folder):
    # a row of 32 numbers has 36 bytes in place of 128
    setting = ("--set", "engine.kv_cache_dtype=int8")
    assert 35 == rows_at_once(folder / "qwen3", *setting, tokens=2560)


def test_memory_that_holds_no_row_is_refused_with_the_way_out(folder):
    message = refusal(folder / "qwen3", "--prompt-tokens", "300", kv_bytes=100 * 1536)
    assert "a row of 300 prompt and 128 output tokens fits neither" in message
    assert "raise engine.kv_cache_bytes" in message


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
    assert {"prompt_tokens": 200, "output_tokens": 50} == found["inputs"]["rows"]["shape"]
    found = in_json(folder / "qwen3", *like, "--output-tokens", "7")
    assert {"prompt_tokens": 200, "output_tokens": 7} == found["inputs"]["rows"]["shape"]


def test_an_output_without_answers_says_nothing_of_rows(folder, tmp_path):
    like = write_report(tmp_path / "out", statuses={"invalid": 12})
    assert "no row of this output generated tokens" in refusal(folder / "qwen3", *like)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt-tokens", "500"), "longer than the context of qwen3"),
        (("--set", "engine.dtyp=float32"), "unknown option 'dtyp' (did you mean 'dtype'?)"),
        (("--set", "seed=1"), "--set seed: bench plan only uses engine options"),
        (("--like", "nowhere"), "nowhere"),
    ],
    ids=["too-long", "unknown-option", "other-option", "no-output"],
)
def test_what_cannot_be_planned_is_refused(folder, options, message):
    assert message in refusal(folder / "qwen3", *options)


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
    assert "its folder does not exist" in str(result.exception)
