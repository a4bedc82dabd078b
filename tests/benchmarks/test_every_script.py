"""Every script runs once, unchanged, on next to nothing; its measurements are then worth nothing.

Peers, which are separate processes, run by way of the scripts that start them. The parts of
scripts have separate tests in this folder, which are quick.
"""

import importlib
import inspect
import json
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = (ROOT / "benchmarks", ROOT / "lab" / "benchmarks")
# arguments of this run for the scripts that start peers
RUN = ("--models", "{model}", "--repetitions", "1", "--quiet-wait-s", "0", "--no-results")
VENVS = ("--venv", "transformers={prefix}", "--venv", "vllm={prefix}")
VLLM, RAY = pytest.mark.vllm, pytest.mark.ray


def _short_kinds(kinds: Any) -> Any:
    """Return kinds of rows with few tokens."""
    return {name: (number, (4, 12), (4, 12)) for name, (number, *_) in kinds.items()}


def _small(shape: Any) -> Any:
    """Return a shape of the same kind with as little as its kernels take."""
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 1024}
    experts = {"num_experts": 4, "experts_per_token": 2} if shape.num_experts else {}
    return type(shape)(**sizes, **experts, ffn_size=64, num_kv_heads=1, head_dim=32)


def _fewer(workloads: Mapping[str, Any], num_requests: int = 4) -> dict[str, Any]:
    from workloads_e2e import scaled

    return {name: scaled(workload, num_requests) for name, workload in workloads.items()}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A run of one script.

    Args:
        args: of its command line.
        values: of names of the module, in place of those; a function gets the replaced value.
        marks: of its test.
        runs: other scripts that it starts.
    """

    args: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()
    runs: tuple[str, ...] = ()


def _few_prompts(workloads: Mapping[str, Any]) -> dict[str, Any]:
    from prefix_suites import w1

    return {"W1 x16": w1(16, 32)}


TINY = {
    "admission": Tiny(args=("--cases", "W4", "--orders", "ratio", "--knows", "true")),
    "feeding": Tiny(
        args=("--rows", "8", "--runs", "1"), values={"SHARED_CHARS": 40, "OWN_CHARS": 20}
    ),
    "step_size": Tiny(args=("--rows", "1", "--repeats", "1")),
    "linears": Tiny(
        args=("--budget-s", "0"), values={"SHAPES": ((64, 64),), "HEAD": (64, 32), "ROWS": (1, 9)}
    ),
    "cas_rounds": Tiny(
        args=("--model", "dense-4m", "--ranks", "2", "--passes", "2", "--repeats", "1")
    ),
    "combine": Tiny(args=("--parts", "2", "--tokens", "2", "--repetitions", "1")),
    "contention": Tiny(args=("--rounds", "1")),
    "cost_model": Tiny(
        args=("--models", "dense-4m", "--requests", "2", "--rounds", "1", "--workloads", "random")
    ),
    "durability": Tiny(args=("--rows", "4", "--units", "2")),
    "e2e": Tiny(
        args=(
            *("--requests", "4", "--workloads", "random,short256,pool", *RUN, *VENVS),
            *("--peers", "raybatch,transformers-static,raybatch-job,raybatch-pool"),
        ),
        marks=(pytest.mark.timeout(600),),
        runs=("peer_raybatch", "peer_transformers", "peer_pool"),
    ),
    "engine": Tiny(
        args=("--models", "moe-8m", "--batches", "1,2", "--repeats", "1"),
        values={"PREFILL_TOKENS": 64, "DECODE_CONTEXT": 64, "DECODE_STEPS": 2},
    ),
    "executors": Tiny(
        args=("--rows", "2", "--replicas", "1", "--repetitions", "1"),
        marks=(pytest.mark.timeout(600),),
    ),
    "group_attention": Tiny(
        args=("--members", "2", "--prefix", "32", "--own", "8", "--rounds", "1")
    ),
    "group_order": Tiny(args=("--workloads", "W4", "--seeds", "1")),
    "plan_order": Tiny(args=("--cases", "W4", "--seeds", "1", "--knows", "true")),
    "plan_order_engine": Tiny(args=("--cases", "W4", "--repeats", "1", "--orders", "auto")),
    "kill_replicas": Tiny(
        args=("--rows", "16", "--replicas", "1"), values={"KILL_AT_FRACTIONS": (0.0,)}, marks=(RAY,)
    ),
    "kv_dtype": Tiny(
        args=("--rows", "1", "--repetitions", "1"), values={"ATTENTION": ((2, 64, 2, 1, 64),)}
    ),
    "large_job": Tiny(args=("--rows", "32"), marks=(RAY,)),
    "models": Tiny(
        args=("moe-8m", "{folder}/model", "--check"),
        values={"check": lambda own: partial(own, num_prompts=2, output_len=4)},
    ),
    "page_boundary": Tiny(
        args=("--workloads", "W4", "--seeds", "1"),
        values={
            "WORKLOADS": lambda own: {"W4": partial(own["W4"], num_rows=24)},
            "device_cases": lambda own: lambda: list(own())[:2],
            "host_cases": lambda own: lambda: list(own())[:2],
        },
    ),
    "pipelines": Tiny(
        args=("--repetitions", "1"),
        values={"SIZES": {"rollout": ("--prompts", "1", "--samples", "2", "--rounds", "2")}},
    ),
    "plan_job": Tiny(args=("--rows", "32"), marks=(RAY,)),
    "ray_pipeline": Tiny(
        args=("--rows", "64", "--repetitions", "1", "--kv-mib", "4"), marks=(RAY,)
    ),
    "pool": Tiny(args=("--rows", "8", "--rows-per-batch", "2", "--replicas", "1"), marks=(RAY,)),
    "prefix": Tiny(
        args=(
            *("--workloads", "W2", "--kv", "50", *RUN, *VENVS),
            *("--peers", "raybatch-plan", "--orders", "shuffled"),
        ),
        marks=(pytest.mark.timeout(600),),
        runs=("peer_raybatch",),
    ),
    "prefix_plan": Tiny(args=("--rows", "64", "--data", "shared", "zero")),
    "quantization": Tiny(
        args=("--models", "dense-4m", "--forms", "int8"),
        values={"NUM_PROMPTS": 2, "PROMPT_TOKENS": 8, "OUTPUT_TOKENS": 2},
    ),
    "repeat_jobs": Tiny(
        args=("--times", "1", "--repetitions", "1", *VENVS),
        values={"WORKLOADS": _few_prompts},
        marks=(VLLM, pytest.mark.timeout(900)),
        runs=("peer_raybatch_vllm", "peer_raydata_llm"),
    ),
    "scheduler": Tiny(args=("--num-seqs", "4", "--steps", "2", "--prompt", "48")),
    "speculation": Tiny(
        args=(
            *("--rows", "2", "--drafts", "2", "--prompt-len", "16", "--output-len", "4"),
            *("--repetitions", "1", "--layers", "2", "--hidden", "256"),
        )
    ),
    "coroutines": Tiny(
        args=(
            *("--models", "moe-8m", "--rows", "6", "--device-rows", "2", "--repetitions", "1"),
            *("--gates", "4", "--ways", "swap", "auto"),
        ),
        values={"profile_options": lambda own: lambda config: replace(own(config), budget_s=0.2)},
    ),
    "length_mix": Tiny(
        args=("--rounds", "1"),
        values={
            "BATCHES": ((8, 32),),
            "STEP_LENS": (16, 32, 64),
            "STEP_ROWS": (1, 2, 3, 4),
            "NUM_STEPS": 1,
            "JOBS": ((50, 2),),
        },
    ),
    "tail": Tiny(args=("--rows", "32", "--replicas", "2", "--scenarios", "plain", "slow")),
    "tp_group": Tiny(args=("--models", "dense-4m", "--prompt", "16", "--steps", "8")),
    # the row is to be there yet where a busy host takes its time to move it
    "move_pause": Tiny(args=("--tokens", "96", "--moves", "1"), values={"TOKENS_OF_MOVE": 1600}),
    "batch_registry": Tiny(args=("--rows", "4096", "--repeats", "1")),
    "duplicates": Tiny(args=("--rows", "24", "--repeats", "1", "--scenarios", "none")),
    "pool_stages": Tiny(args=("--rounds", "1", "--share", "0.02"), values={"KINDS": _short_kinds}),
    "cascade_attention": Tiny(
        args=("--rounds", "1"), values={"PREFIX": 96, "OWN": 4, "OUTPUT": 3, "GROUPS": ((2, 3),)}
    ),
    "shared_weights": Tiny(
        args=("--model", "dense-4m", "--sizes", "2", "--rows", "1", "4", "--passes", "1")
    ),
    "simulated_sharing": Tiny(
        args=(
            *("--models", "Llama-3.1-70B", "--lengths", "1024", "--num-rows", "40"),
            *("--tail-rows", "40", "--batches", "32", "--slot-batches", "256", "--passes", "2"),
        )
    ),
    "simulated_stages": Tiny(
        args=("--rows", "40", "--replicas", "2", "--factors", "1.7", "--spreads", "W7")
    ),
    "simulated_tables": Tiny(
        args=("--rows", "10", "--replicas", "2", "--slots", "8", "--rows-per-slot", "1")
    ),
    "simulator_error": Tiny(
        args=("--model", "{model}", "--rows", "12", "--rounds", "1", "--seconds", "0.1")
    ),
    "swap": Tiny(args=("--rows", "8", "--share", "0.6", "--repetitions", "1")),
    "weights": Tiny(args=("--rows", "2", "--repetitions", "1"), values={"OUTPUT_LEN": 2}),
}
# by vLLM, in a separate environment
VLLM_PEERS = Tiny(
    args=(
        *("--requests", "4", "--workloads", "random", *RUN, *VENVS),
        *("--peers", "raybatch,vllm-eager"),
    ),
    runs=("peer_raybatch", "peer_vllm"),
)
# makes environments with pip; tests/benchmarks/test_bench_run_parts.py has its decisions
ELSEWHERE = ("venvs",)


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """Everything that scripts keep lies in a folder of the test, and models are small."""
    import models

    small = {name: _small(shape) for name, shape in models.SHAPES.items()}
    monkeypatch.setattr(models, "SHAPES", small)
    for name in ("venvs", "bench_run", "peer_process", "cost_model"):
        monkeypatch.setattr(importlib.import_module(name), "WORK", tmp_path / "work")
    limits = importlib.import_module("machine_limits")
    monkeypatch.setattr(limits, "_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "_GEMM_SIZES", (64,))
    num_threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(num_threads)


@pytest.fixture
def on_shared_cluster(request, monkeypatch):
    """Scripts that start and end Ray in this process use the running cluster."""
    request.getfixturevalue("cluster")
    for name in ("init", "shutdown"):
        monkeypatch.setattr(f"ray.{name}", lambda *args, **kwargs: None)


def run(name: str, tiny: Tiny, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script as its command line would; raise what it raises, SystemExit for a failure."""
    module = importlib.import_module(name)
    for value, given in tiny.values.items():
        own = getattr(module, value)
        monkeypatch.setattr(module, value, given(own) if callable(given) else given)
    places = {"folder": folder, "model": folder / "tiny", "prefix": sys.prefix}
    args = [arg.format(**places) for arg in tiny.args]
    out = folder / "out.json"
    if '"--out"' in inspect.getsource(module):
        args += ["--out", str(out)]
    monkeypatch.setattr("sys.argv", [f"{name}.py", *args])
    try:
        status = module.main(args) if inspect.signature(module.main).parameters else module.main()
    except SystemExit as error:
        status = error.code
    assert not status
    if "--out" in args:
        assert "conditions" in json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=tiny.marks, id=name) for name, tiny in TINY.items()]
)
def test_a_script_runs(name, request, in_folder, monkeypatch, capsys):
    tiny = TINY[name]
    if RAY in tiny.marks:
        request.getfixturevalue("on_shared_cluster")
    if "{model}" in tiny.args:
        importlib.import_module("models").write("dense-4m", in_folder / "tiny")
    if name == "repeat_jobs":
        importlib.import_module("models").write("dense-4m", in_folder / "work/models/dense-4m")
    if name == "large_job":
        import large_job

        monkeypatch.setattr(large_job, "in_process", in_this_process)
    run(name, tiny, in_folder, monkeypatch)
    assert capsys.readouterr().out


def in_this_process(folder: Path, num_replicas: int, _: int | None, run: Any) -> dict[str, Any]:
    """Stand in for the process of a driver, which would start its own cluster."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    run(folder, sender, num_replicas)
    return dict(receiver.recv())


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_peers_that_need_vllm_run(in_folder, monkeypatch):
    importlib.import_module("models").write("dense-4m", in_folder / "tiny")
    run("e2e", VLLM_PEERS, in_folder, monkeypatch)


def test_no_script_is_forgotten():
    files = [path for folder in BENCHMARKS for path in folder.glob("*.py")]
    scripts = {path.stem for path in files if "__main__" in path.read_text()}
    started = {other for tiny in (*TINY.values(), VLLM_PEERS) for other in tiny.runs}
    assert scripts == {*TINY, *started, *ELSEWHERE}


def test_no_pipeline_is_forgotten():
    run = (ROOT / "tests" / "pipelines" / "test_pipelines.py").read_text()
    files = (ROOT / "pipelines").glob("*.py")
    pipelines = [path.name for path in files if "__main__" in path.read_text()]
    assert [name for name in pipelines if f'"{name}"' not in run] == []
    assert pipelines
