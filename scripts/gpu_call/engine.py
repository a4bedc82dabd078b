"""Checks an engine: seconds of its start, tokens, kernels compiled after the start, its choice."""

import cProfile
import gc
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from gpu_call.models import DENSE, TOY
from gpu_call.stage import Stage, run_stage
from raybatch.backends.native import load_once
from raybatch.bench.checkpoints import ON_CPU, Shape, write_checkpoint
from raybatch.bench.engine_run import EngineJob, EngineResult, Rows, answer, requests_of, run_engine
from raybatch.config import EngineConfig
from raybatch.engine.forward import step_graphs
from raybatch.engine.loading import prepared, runner
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.records.types import Request

_MAX_LEN = 8192
# largest difference of log-probabilities in bfloat16; a wrong key changes a logit by far more
_MOST_OF_LOGPROB = 0.25
# number of host functions that are listed
_TOP = 20
# rows of a float32 model, in which all engines give equal tokens; 8 graph sizes are enough
_TOY_ROWS = Rows(
    name="toy", num_rows=8, prompt_tokens=96, output_tokens=16, rows_per_group=4, shared_tokens=64
)
_TOY_OPTIONS = {"max_num_seqs": 8, "max_batched_tokens": 64, "kv_offload": False}
# rows that cause every kind of step: decodes, shared prefixes, chunks, long rows
_ROWS = (
    Rows(name="alone", num_rows=48, prompt_tokens=300, output_tokens=48),
    Rows(
        name="groups",
        num_rows=32,
        prompt_tokens=1100,
        output_tokens=32,
        rows_per_group=8,
        shared_tokens=1024,
    ),
    Rows(name="long", num_rows=4, prompt_tokens=5000, output_tokens=24),
)
_FEW_ROWS = (replace(_TOY_ROWS, name="alone", num_rows=4, output_tokens=8),)


class Compilations:
    """Counts what Triton compiles, or reads from its cache, by kernel."""

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        if find_spec("triton") is not None:
            import triton

            triton.knobs.compilation.listener = self._note

    def _note(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.read if cache_hit else self.made)[src.name] += 1

    def total(self) -> int:
        return self.made.total() + self.read.total()


def main(stage: Stage) -> None:
    compilations = Compilations()
    # proves that tokens are right
    stage.attempt("tokens as in transformers", partial(_toy, stage), needs_s=8)
    path = dense_checkpoint(stage)
    start = partial(_start, stage, compilations, path)
    made = stage.attempt("an engine with graphs", start, needs_s=20)
    if made is not None:
        run = partial(_same_without_graphs, stage, path, *made)
        stage.attempt("the same without graphs", run, needs_s=8)
    stage.attempt("the defaults", partial(_defaults, stage, path), needs_s=8)


def dense_checkpoint(stage: Stage) -> Path:
    """Return the folder of the dense model; write it if no stage has."""
    path = stage.work / "dense"
    if not (path / "done").exists():
        began = time.monotonic()
        dtype = torch.bfloat16 if stage.is_gpu else torch.float32
        write_checkpoint(dense_shape(stage), path, dtype=dtype, device=stage.device)
        (path / "done").touch()
        stage.put(write_s=time.monotonic() - began)
        _free()
    return path


def dense_shape(stage: Stage) -> Shape:
    return DENSE if stage.is_gpu else ON_CPU["dense, 4 layers of 256"]


def options(stage: Stage, **more: Any) -> dict[str, Any]:
    """Return the options of engines on this device."""
    found = {"device": stage.device, "max_model_len": _MAX_LEN, **more}
    return found if stage.is_gpu else {**found, "kv_cache_bytes": 64 << 20}


def fixed_options(stage: Stage, **more: Any) -> dict[str, Any]:
    """Return options that leave an engine nothing to choose."""
    sizes = {"max_batched_tokens": 8192, "max_num_seqs": 256}
    if not stage.is_gpu:
        sizes = {"max_batched_tokens": 256, "max_num_seqs": 8}
    return options(stage, kv_offload=False, **sizes, **more)


def _start(stage: Stage, compilations: Compilations, path: Path) -> tuple[list[Any], list[float]]:
    """Start an engine part by part; return all tokens, and `first_logprobs`."""
    seconds: dict[str, float] = {}
    began = time.monotonic()
    config = EngineConfig(**fixed_options(stage))
    make = load_once(str(path), config)
    seconds["load"] = time.monotonic() - began
    parts = (
        (prepared, "pick_ops", "pick"),
        (prepared, "run_forms", "forms"),
        (runner, "step_peak_bytes", "peak"),
        (step_graphs.GraphSetup, "capture", "capture"),
    )
    with timed(seconds, *parts):
        backend = make(config)
    seconds["whole start"] = time.monotonic() - began
    at_start = compilations.total()
    made_at_start = dict(compilations.made)
    counts = {"made": made_at_start, "read": dict(compilations.read)}
    stage.put(start_s=seconds, forms_at_start=counts)
    stage.figure("start: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()))
    tokens: list[Any] = []
    for rows in _rows(stage):
        taken_s, made, steps = answer(backend, _requests(stage, rows))
        tokens += made
        stage.put(**{f"rows_{rows.name}": {"seconds": taken_s, "steps": steps}})
    late = compilations.total() - at_start
    graphs = asdict(backend.runner.graph_counts)
    counts = {"made": dict(compilations.made), "read": dict(compilations.read)}
    stage.put(forms_after_start=late, forms=counts, graphs=graphs)
    stage.figure(
        f"{at_start} forms at the start ({sum(made_at_start.values())} compiled), {late} after it; "
        f"{graphs['num_captured']} graphs ran "
        f"{graphs['num_steps']} steps, without one: {graphs['eager_steps'] or 'none'}"
    )
    if stage.is_gpu and not graphs["num_captured"]:
        stage.wrong("the engine captured no graph")
    if late:
        stage.wrong(f"{late} forms of kernels were compiled after the start")
    first = first_logprobs(backend, _requests(stage, _rows(stage)[0]))
    stage.attempt("steps of the host", partial(_host_steps, stage, backend), needs_s=10)
    backend.close()
    del backend, make
    _free()
    return tokens, first


def _host_steps(stage: Stage, backend: Any) -> None:
    """Time decode steps as a caller sees them, and profile the host's functions in them."""
    num_rows, prompt, num_steps = (256, 512, 32) if stage.is_gpu else (8, 32, 4)
    rows = Rows(
        name="decodes", num_rows=num_rows, prompt_tokens=prompt, output_tokens=5 * num_steps
    )
    backend.submit(_requests(stage, rows))
    # compute the prompts, and run some decode steps
    for _ in range(num_steps):
        backend.poll()
    began = time.perf_counter()
    for _ in range(num_steps):
        backend.poll()
    step_s = (time.perf_counter() - began) / num_steps
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        backend.poll()
    profiler.disable()
    while backend.num_unfinished():
        backend.poll()
    stats = pstats.Stats(profiler)
    of_functions: dict[Any, Any] = vars(stats)["stats"]
    own = sorted(of_functions.items(), key=lambda each: -each[1][2])[:_TOP]
    functions = {
        f"{Path(file).name}:{line} {name}": 1e3 * values[2] / num_steps
        for (file, line, name), values in own
    }
    stage.put(host_steps={"rows": num_rows, "step_ms": 1e3 * step_s, "own_ms": functions})
    stage.figure(f"steps of {num_rows} decodes, as a caller sees them: {1e3 * step_s:.3g} ms")


def first_logprobs(backend: Any, requests: list[Request]) -> list[float]:
    """Return the log-probability of the likeliest first token of each row."""
    backend.submit(
        [
            replace(each, sampling=replace(each.sampling, max_tokens=1, logprobs=1))
            for each in requests
        ]
    )
    found: dict[int, float] = {}
    while backend.num_unfinished():
        for completion in backend.poll():
            found[completion.request_id] = float(completion.logprobs[0][1][0])
    return [found[each.request_id] for each in requests]


def beside(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return how many rows are equal, and the first token that differs in the others."""
    first = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        for one, other in zip(ours, theirs, strict=True)
    ]
    apart = [place for place in first if place is not None]
    return {
        "equal_rows": len(first) - len(apart),
        "rows": len(first),
        "first_divergence": first,
        "median_divergence": statistics.median_low(apart) if apart else None,
    }


def _same_without_graphs(stage: Stage, path: Path, tokens: list[Any], first: list[float]) -> None:
    config = EngineConfig(**fixed_options(stage, cuda_graphs=False))
    backend = load_once(str(path), config)(config)
    made: list[Any] = []
    for rows in _rows(stage):
        made += answer(backend, _requests(stage, rows))[1]
    others = first_logprobs(backend, _requests(stage, _rows(stage)[0]))
    backend.close()
    found = beside(tokens, made)
    stage.put(graphs_beside_eager=found)
    stage.figure(
        f"bfloat16 tokens of graphs and without: {found['equal_rows']} of {found['rows']} rows are "
        f"equal, the others up to token {found['median_divergence']}"
    )
    far = max((abs(one - other) for one, other in zip(first, others, strict=True)), default=0.0)
    # random weights have near ties in bfloat16; after one, all tokens of a row may differ
    if far > _MOST_OF_LOGPROB:
        stage.wrong(f"graphs give first tokens whose log-probabilities are {far:.2g} apart")
    del backend
    _free()


def _toy(stage: Stage) -> None:
    path = stage.work / "toy"
    write_checkpoint(TOY, path, dtype=torch.float32, device="cpu")
    kinds = {
        "native": ("native", {}),
        "without graphs": ("native", {"cuda_graphs": False}),
        "transformers": ("transformers", {}),
    }
    tokens: dict[str, Any] = {}
    for name, (kind, more) in kinds.items():
        job = EngineJob(
            kind=kind,
            model=str(path),
            rows=(_TOY_ROWS,),
            vocab_size=TOY.vocab_size,
            num_repeats=0,
            engine=options(stage, dtype="float32", **_TOY_OPTIONS, **more),
        )
        results: list[EngineResult] = []
        run_engine(job, results.append)
        tokens[name] = results[-1].runs[0].token_ids
        _free()
    for name in ("without graphs", "transformers"):
        found = beside(tokens["native"], tokens[name])
        equal, rows = found["equal_rows"], found["rows"]
        stage.put(**{f"beside_{name.replace(' ', '_')}": found})
        stage.figure(f"float32 against {name}: {equal} of {rows} rows are equal")
        if equal < rows:
            stage.wrong(f"{rows - equal} of {rows} float32 rows differ from {name}")


def _defaults(stage: Stage, path: Path) -> None:
    """Note the choice of an engine without options, and the costs behind it."""
    seconds: dict[str, float] = {}
    model = PreparedModel.load(str(path), EngineConfig(**options(stage)))
    with timed(seconds, (prepared, "measured_profile", "profile")):
        choice = model.choose(model.usual_rows())
    text = model.budget.plain_reason() if choice is None else choice.to_text()
    costs = None if choice is None or model.profile is None else asdict(model.profile.costs())
    ways = [] if choice is None else [asdict(mode) for mode in choice.candidates[:8]]
    stage.put(choice={"text": text, "costs": costs, "ways": ways, "seconds": seconds})
    stage.figure(f"defaults: {text}")
    if choice is not None and choice.best.kv_offload:
        stage.wrong("the defaults move the KV of a model that fits to host memory")


def _rows(stage: Stage) -> tuple[Rows, ...]:
    return _ROWS if stage.is_gpu else _FEW_ROWS


def _requests(stage: Stage, rows: Rows) -> Any:
    return requests_of(rows, dense_shape(stage).vocab_size, seed=0, first_id=0)


@contextmanager
def timed(seconds: dict[str, float], *parts: tuple[Any, str, str]) -> Iterator[None]:
    """Add up the seconds of functions by label; a part is (module or class, name, label)."""
    plain = [getattr(owner, name) for owner, name, _ in parts]

    def timing(function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*args, **options)
            finally:
                seconds[label] = seconds.get(label, 0.0) + time.monotonic() - began

        return call

    for (owner, name, label), function in zip(parts, plain, strict=True):
        setattr(owner, name, timing(function, label))
    try:
        yield
    finally:
        for (owner, name, _), function in zip(parts, plain, strict=True):
            setattr(owner, name, function)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_stage("engine", main)
