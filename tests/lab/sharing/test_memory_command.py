"""`raybatch bench plan memory`, beside `raybatch bench plan`."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.errors import ConfigError
from tests.policy.paper_models import LLAMA_3_1_70B_CONFIG

H20 = ("--gpu-bytes", "144e9")
RATES = ("--gpu-flops", "81.4e12", "--gpu-bytes-per-s", "3.2e12", "--link-bytes-per-s", "450e9")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA_3_1_70B_CONFIG))
    return str(folder)


def plan_memory(model, *options):
    return CliRunner().invoke(app, ["bench", "plan", "memory", model, *H20, *options])


def in_json(model, *options):
    result = plan_memory(model, "--json", *options)
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def refusal(model, *options):
    result = plan_memory(model, *options)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def test_a_plan_shows_what_gpus_hold_alone_and_shared(model):
    result = plan_memory(model, "--tp", "2", "--dp", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"The memory of {model}"
    facts = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines[1:7]}
    assert facts["model"] == (
        "80 layers, 141.1 GB of weights (80 % feed-forward), 327,680 bytes of KV a token"
    )
    assert facts["plan"] == (
        "by memory alone share by shard; a sharing replica has 1.77 times the KV"
    )
    assert facts["replicated"].split() == ["70.55", "0", "0.00", "323,768", "1.30", "M", "79"]
    assert any("set the GPU rates " in line and "--gpu-bytes-per-s" in line for line in lines)


def test_rates_give_bounds_of_the_batch(model):
    found = in_json(model, "--tp", "2", "--dp", "4", "--sequence-tokens", "1024", *RATES)
    assert found["kv_ratio"] == pytest.approx(1.77, abs=0.01)
    bounds = found["bounds"]
    # three quarters of the feed-forward weights of a GPU, over NVLink 4
    assert bounds["fetch_s"] == pytest.approx(0.0940, abs=1e-4)
    assert 90 <= bounds["hiding_rows"] <= 128
    assert set(found["pass_s"]) == {"layer", "shard"}
    # twice the KV is no longer worth much where products take all the time
    assert found["replicated_s"] < 1.05 * found["shared_s"]
    text = plan_memory(model, "--tp", "2", "--dp", "4", *RATES).stdout
    assert "each replica has all weights; a sharing replica has 1.77 times the KV" in text
    assert "B_th, which hides the weight fetch (94.0 ms a pass): " in text
    assert "computed from these rates, not measured" in text


@pytest.mark.slow
def test_a_group_is_taken_where_its_job_is_quicker(model):
    # an H200, whose products take less time than its memory
    rates = ("--gpu-flops", "544e12", "--gpu-bytes-per-s", "3.84e12", "--link-bytes-per-s", "450e9")
    found = in_json(model, "--tp", "2", "--dp", "4", "--sequence-tokens", "16384", *rates)
    assert found["replicated_s"] > 1.05 * found["shared_s"]
    text = plan_memory(model, "--tp", "2", "--dp", "4", "--sequence-tokens", "16384", *rates).stdout
    assert "share by shard; a sharing replica has 1.77 times the KV" in text


def test_a_plan_says_why_replicas_cannot_be(model):
    text = plan_memory(model, "--tp", "1", "--dp", "8").stdout
    assert "replicated weights do not fit: weights need 141.1 GB of 123.6 GB" in text


def test_a_plan_without_any_way_fails_and_says_why(model):
    result = plan_memory(model, "--tp", "1", "--dp", "8", "--gpu-memory-utilization", "0.2")
    assert result.exit_code == 1
    assert "none: weights need 42.5 GB and 16 slots 2.8 GB of 22.8 GB" in result.stdout


@pytest.mark.parametrize("rates", [(), RATES])
def test_a_plan_has_room_for_a_row_or_says_that_none_has(model, rates):
    result = plan_memory(model, "--tp", "2", "--dp", "4", "--sequence-tokens", "1000000", *rates)
    assert result.exit_code == 1
    assert "none: KV memory for 573," in result.stdout
    assert " tokens, but rows may have 1,000,000" in result.stdout


def test_wrong_options_are_refused(model, tmp_path):
    assert refusal(model, "--dp", "1").startswith(
        "--dp 1: weights are shared by at least 2 replicas"
    )
    assert re.match("tp must divide the 64 heads .* got 3", refusal(model, "--tp", "3"))
    assert "go together" in refusal(model, "--gpu-flops", "1e12")
    assert "at most 1, got 1.5" in refusal(model, "--gpu-memory-utilization", "1.5")
    assert "above 0, got inf" in refusal(model, *RATES[2:], "--gpu-flops", "inf")
    assert "above 0, got 0" in refusal(model, *RATES[2:], "--gpu-flops", "0")
    assert "config.json" in refusal(str(tmp_path))
    assert "gpu_bytes must be at least 1, got 0" in refusal(model, "--gpu-bytes", "0")
    assert "--gpu-bytes is nan" in refusal(model, "--gpu-bytes", "nan")
    assert "--reserve-bytes is inf" in refusal(model, "--reserve-bytes", "inf")


def test_the_name_of_a_model_is_still_that_of_bench_plan(model):
    result = CliRunner().invoke(app, ["bench", "plan", "--help"])
    assert "Measure one layer of a model on this host" in result.output
    both = CliRunner().invoke(app, ["bench", "--help"]).output
    assert "plan memory" in both
    # a folder named memory is one that has a slash
    other = CliRunner().invoke(app, ["bench", "plan", "./memory"])
    assert "memory" in str(other.exception)


def test_a_plan_of_memory_loads_neither_torch_nor_ray(model):
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from raybatch.cli.app import app\n"
        f"done = CliRunner().invoke(app, ['bench', 'plan', 'memory', {model!r}, *{H20!r}])\n"
        "assert done.exit_code == 0, done.output\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
