"""`raybatch bench gpu` on a CPU: all of its parts run, on a model of two layers."""

import importlib.metadata
import json
import subprocess
import time
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from raybatch.bench import gpu
from raybatch.bench.checkpoints import ON_GPU, Shape
from raybatch.bench.engine_run import Rows, requests_of
from raybatch.bench.gpu import bench_gpu
from raybatch.bench.machine import Limits, measure_limits
from raybatch.cli.app import app
from raybatch.policy.cost.roofline import Work

TINY = Shape(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    ffn_size=64,
    vocab_size=64,
    num_experts=4,
    experts_per_token=2,
)
ROWS = (
    Rows(
        name="pairs",
        num_rows=4,
        prompt_tokens=24,
        output_tokens=4,
        rows_per_group=2,
        shared_tokens=16,
    ),
)
NATIVE = {"device": "cpu", "engines": ("native",)}


@pytest.fixture(scope="module")
def report():
    return bench_gpu(**NATIVE, shapes={"tiny": TINY}, rows=ROWS)


def test_tokens_are_those_of_transformers(report):
    assert (report.checked.equal_rows, report.checked.num_rows) == (8, 8)
    assert report.failures == ()
    assert report.is_right


def test_results_are_kept_as_they_come(monkeypatch):
    monkeypatch.setattr(gpu._Bench, "_run", lambda *_, **__: None)
    kept = []
    report = bench_gpu(**NATIVE, shapes={"one": TINY, "two": TINY}, rows=ROWS, keep=kept.append)
    assert [["one"], ["one", "two"]] == [[m.name for m in each.models] for each in kept[1:]]
    assert report == kept[-1]


@pytest.mark.parametrize("shape", ON_GPU.values(), ids=ON_GPU)
def test_the_head_is_a_small_part_of_what_a_token_is_multiplied_with(shape):
    dim = shape.hidden_size
    heads = dim * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    layer = heads + 3 * dim * shape.ffn_size * max(1, shape.experts_per_token)
    assert shape.vocab_size * dim < 0.15 * shape.num_layers * layer


def test_limits_are_measured_on_random_numbers(monkeypatch):
    factors = []
    plain = torch.mm
    monkeypatch.setattr(
        torch,
        "mm",
        lambda one, other, out: factors.extend((one, other)) or plain(one, other, out=out),
    )
    measure_limits(torch.device("cpu"), torch.float32)
    assert all(0.9 < float(factor.std()) < 1.1 for factor in factors)


def test_layers_and_engines_are_timed(report):
    (model,) = report.models
    assert {each.module for each in model.layers.times} == {
        "attention, decode over 512",
        "attention, decode over 4,096",
        "attention, prefill of 512",
        "experts",
    }
    assert all(each.seconds > 0 and each.share > 0 for each in model.layers.times)
    (run,) = model.engines[0].runs
    assert (len(run.seconds), run.prompt_tokens, run.output_tokens) == (3, 96, 16)
    assert [len(tokens) for tokens in run.token_ids] == [4, 4, 4, 4]


def test_ops_are_compared_with_their_references(report):
    (model,) = report.models
    assert {op.name for op in model.layers.ops} >= {"linear", "moe_ffn", "attention"}
    assert all(op.agrees for op in model.layers.ops)
    assert "ops agree with torch within" in report.to_text()


def test_an_op_that_differs_is_a_failure(monkeypatch):
    right = gpu.pick_ops

    def wrong(*args, **kwargs):
        ops = right(*args, **kwargs)
        return replace(ops, add_linear_=lambda x, hidden, layer: x.add_(1.0))

    monkeypatch.setattr(gpu, "pick_ops", wrong)
    monkeypatch.setattr(gpu._Bench, "_run", lambda *_, **__: None)
    report = bench_gpu(**NATIVE, shapes={"tiny": TINY}, rows=ROWS)
    assert "FAILED: tiny: the kernel of add_linear_ differs by" in report.to_text()
    assert not report.is_right


def test_a_report_can_be_sent_and_read(report):
    fields = json.loads(report.to_json())
    assert fields["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    text = report.to_text()
    assert "equal for 8 of 8 rows" in text
    assert "rates of a CPU" in text
    assert "pairs" in text


def test_engines_that_differ_are_counted(report):
    (model,) = report.models
    native = model.engines[0]
    run = native.runs[0]
    other = replace(run, token_ids=((1, 2, 3, 4), *run.token_ids[1:]))
    both = replace(model, engines=(native, replace(native, kind="vllm", runs=(other,))))
    assert "3 of 4" in replace(report, models=(both,)).to_text()


def test_sizes_that_were_not_timed_are_told(monkeypatch):
    # memory for the first size alone
    monkeypatch.setattr(gpu, "_MAX_KV_BYTES", {"cpu": 1})
    monkeypatch.setattr(gpu._Bench, "_run", lambda *_, **__: None)
    report = bench_gpu(**NATIVE, shapes={"tiny": TINY}, rows=ROWS)
    assert report.models[0].layers.not_timed == (
        "attention, decode over 512 of 16, 64 tokens",
        "attention, decode over 4,096 of 1, 16, 64 tokens",
        "attention, prefill of 512 of 1, 16, 64 tokens",
    )
    assert "tiny, layers: no time or memory for attention, decode over 512" in report.to_text()
    assert report.is_right


def test_what_has_no_time_is_told_and_no_failure(monkeypatch):
    monkeypatch.setattr(gpu, "measure_layers", lambda *_, **__: pytest.fail("out of time"))
    report = bench_gpu(**NATIVE, minutes=0.0, shapes={"tiny": TINY}, rows=ROWS)
    assert report.skipped == (
        "the comparison of tokens, native",
        "the comparison of tokens, transformers",
        "tiny",
    )
    assert "skipped, --minutes 0 reached: tiny" in report.to_text()
    assert (report.is_right, report.checked, report.failures) == (True, None, ())


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return what runs an engine whose process ends as one that is given."""

    def run(ended):
        monkeypatch.setattr(subprocess, "run", ended)
        bench = gpu._Bench(
            device=torch.device("cpu"),
            dtype=torch.float32,
            end=time.monotonic() + 60,
            tell=lambda _: None,
        )
        two = (*ROWS, replace(ROWS[0], name="more"))
        return bench._run("tiny", "native", TINY, tmp_path, two, num_repeats=1), bench

    return run


def test_rows_that_were_done_in_time_are_kept(report, run):
    line = json.dumps(asdict(report.models[0].engines[0])).encode()

    def late(command, **_):
        raise subprocess.TimeoutExpired(command, 1.0, output=line + b"\n" + line[:40])

    result, bench = run(late)
    assert result == report.models[0].engines[0]
    assert (bench.skipped, bench.failures) == (["tiny, native: more"], [])
    both = replace(
        report.models[0], engines=(result, replace(result, kind="vllm", runs=2 * result.runs))
    )
    text = replace(report, models=(both,), skipped=tuple(bench.skipped)).to_text()
    assert "no time" in text
    assert "skipped, --minutes 10 reached: tiny, native: more" in text


@pytest.mark.parametrize(
    ("code", "stdout", "message"),
    [(1, b"", "tiny, native: out of memory"), (0, b"no JSON\n", "tiny, native: gave no result (")],
)
def test_an_engine_that_ends_early_is_a_failure(run, code, stdout, message):
    def ended(command, **_):
        return subprocess.CompletedProcess(command, code, stdout, b"trace\nout of memory\n")

    result, bench = run(ended)
    assert result is None
    assert bench.failures[0].startswith(message)
    assert bench.skipped == []


def test_repeats_share_no_prefix():
    one, two = (requests_of(ROWS[0], 64, seed=seed, first_id=0) for seed in (0, 1))
    shared = [request.prompt_token_ids[:16].tolist() for request in one]
    assert shared[0] == shared[1] != shared[2]
    assert shared[0] != two[0].prompt_token_ids[:16].tolist()
    assert [request.group_id for request in one] == [0, 0, 1, 1]


def test_the_longer_of_computing_and_moving_bounds_a_layer():
    limits = Limits(dtype="float32", operations_per_s=10.0, bytes_per_s=2.0)
    assert limits.least_s(Work(operations=100.0, moved_bytes=2.0)) == 10.0
    assert limits.least_s(Work(operations=1.0, moved_bytes=8.0)) == 4.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "tpu7"), "--device must be auto, cpu, cuda or cuda:N, got 'tpu7'"),
        (("--device", "mps"), "--device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        (("--device", "cuda:63"), "--device cuda:63: torch sees 0 GPUs here"),
        (("--engines", "nativ"), "--engines must be among native, vllm, got 'nativ'"),
        (("--out", "nowhere/x.json"), "--out nowhere/x.json: its folder does not exist"),
        (("--out", "."), "--out . is a folder"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(arguments, message, monkeypatch, tmp_path):
    if "63" in arguments[1] and torch.cuda.is_available():
        pytest.skip("a host with GPUs has another number")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", "gpu", *arguments])
    assert message in str(result.exception)
