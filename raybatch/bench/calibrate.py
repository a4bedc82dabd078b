"""How far simulations of this host's native engine are off: held-out runs beside simulated ones.

The cost model is that of estimates, measured with other prompts in other batches. Each workload
runs longest rows first and shortest first, so that the ratio of two policies is judged as well.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from raybatch.backends.calibrate import MIN_VOCAB_SIZE, limits_of
from raybatch.backends.cost_cache import cost_model_path, load_cost_model, load_or_measure
from raybatch.backends.native import NativeBackend, create
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.profile.cached_file import write_cached
from raybatch.errors import MeasureError
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import full, percent
from raybatch.policy.cost.cost_model import CostModel, EngineLimits
from raybatch.records.arrays import Floats, Ints
from raybatch.records.types import Request, Sampling
from raybatch.simulator.engine import EngineSpec, SimulatedEngine, alone_seconds
from raybatch.simulator.rows import SimulatedRows
from raybatch.simulator.validation import HeldOutRun, Validation, to_json, validation_path

_NATIVE = BackendConfig(kind="native")
# rows that run at once, so that others wait and an order of rows matters
_MAX_SEQS = 32
_ROUNDS = 3
_MIN_ROWS, _MAX_ROWS = 64, 1024
# of the KV memory that all rows of the workload that is short of it would take together
_TIGHT_SHARE = 1 / 64
_POLICIES: dict[str, Callable[[SimulatedRows], Ints]] = {
    "longest first": lambda rows: np.argsort(-rows.output, kind="stable"),
    "shortest first": lambda rows: np.argsort(rows.output, kind="stable"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was found, and the file of the cost model that it is of."""

    model: str
    cost_model: Path
    validation: Validation

    def to_text(self) -> str:
        found = self.validation
        facts = (
            ("error of a step", f"{percent(found.step_error)} (median)"),
            ("of a completion", f"{percent(found.completion_error)} (the worst run)"),
            ("of the ratio of two orders", f"{percent(found.ratio_error)} (the worst workload)"),
            ("CPU", f"{percent(found.cpu_share, 0)} of a core while the engine ran"),
            ("cost model", str(self.cost_model)),
        )
        rows = tuple(
            (
                run.workload,
                full(run.num_steps),
                full(run.num_simulated_steps),
                f"{run.measured_s:.2f} s",
                percent(run.completion_error),
                percent(run.step_error),
                run.policy,
            )
            for run in found.runs
        )
        header = ("workload", "steps", "simulated", "measured", "error", "of a step", "order")
        failures = found.failures()
        verdict = (
            "nothing is simulated with it: " + "; ".join(failures)
            if failures
            else "simulations print their figures with these errors"
        )
        table = Table(header=header, rows=rows)
        section = Section(title="", facts=facts, table=table, notes=(verdict,))
        return to_text(f"{self.model}: simulated and measured", [section])


def calibrate(
    model: str,
    engine: EngineConfig,
    *,
    seconds: float = 1.5,
    fresh: bool = False,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure an engine, run held-out workloads on it and simulated, and store the errors.

    Args:
        seconds: of each run, about; there are eight, three times each.
        fresh: measure the cost model again.
        folder: of cost models; None is the usual one.

    An engine of one thread on a CPU is timed by its CPU seconds, so that others may use the host
    meanwhile.

    Raises:
        MeasureError: the host was too busy to measure on.
    """
    path = cost_model_path(model, _NATIVE, engine, folder=folder)
    if fresh:
        path.unlink(missing_ok=True)
    tell("measuring steps")
    clock = _clock_for(engine)
    load_or_measure(model, _NATIVE, engine, folder=folder, clock=clock)
    if (cost := load_cost_model(path)) is None:
        raise MeasureError(
            f"{model}: the host was busy while steps were measured, so nothing is stored; "
            "calibrate when it is quiet"
        )
    began, cpu_began = time.perf_counter(), time.process_time()
    runs, full_step_tokens = _held_out(model, engine, cost, seconds, clock, tell)
    cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    validation = Validation.of(runs, full_step_tokens=full_step_tokens, cpu_share=cpu_share)
    write_cached(validation_path(path), to_json(validation), what="validation")
    return Calibration(model=model, cost_model=path, validation=validation)


def held_out_rows(max_tokens: int, seed: int = 7) -> Iterator[tuple[str, SimulatedRows]]:
    """Yield workloads of `_MAX_ROWS` rows that fit a model of so many tokens."""
    rng = np.random.Generator(np.random.PCG64(seed))
    scale = min(1.0, max_tokens / 512)

    def lengths(values: Floats, most: int) -> Ints:
        return np.clip(np.rint(values * scale), 1, max(1, int(most * scale))).astype(np.int64)

    shape = _MAX_ROWS
    prompts = np.full(shape, 32.0)
    yield "alike", SimulatedRows.of(lengths(prompts, 32), lengths(np.full(shape, 16.0), 16))
    tail = rng.lognormal(np.log(6), 1.95, shape)
    yield "tail", SimulatedRows.of(lengths(prompts, 32), lengths(tail, 240))
    prompts, outputs = rng.uniform(16, 240, shape), rng.uniform(8, 120, shape)
    yield "mixed", SimulatedRows.of(lengths(prompts, 240), lengths(outputs, 120))
    prompts, outputs = rng.uniform(16, 120, shape), rng.uniform(16, 240, shape)
    yield "short of memory", SimulatedRows.of(lengths(prompts, 120), lengths(outputs, 240))


def _held_out(
    model: str,
    engine: EngineConfig,
    cost: CostModel,
    seconds: float,
    clock: Callable[[], float],
    tell: Callable[[str], None],
) -> tuple[list[HeldOutRun], float]:
    """Return the runs, and what `EngineSpec.full_step_tokens` is for the engine as configured."""
    plain = replace(
        engine, speculative_tokens=None, max_num_seqs=min(engine.max_num_seqs, _MAX_SEQS)
    )
    runs: list[HeldOutRun] = []
    with closing(create(model, plain)) as backend:
        full_step_tokens = backend.runner.full_step_tokens
        token_bytes = kv_bytes_per_token(backend.runner.spec, backend.runner.cache.k.dtype)
        for name, rows in held_out_rows(backend.capacity().max_model_len):
            tell(f"running rows that are {name}")
            running, config = backend, plain
            if name == "short of memory":
                kv_tokens = int((rows.prompt + rows.output).sum() * _TIGHT_SHARE)
                config = replace(plain, kv_cache_bytes=kv_tokens * token_bytes)
                running = create(model, config)
            try:
                spec = _spec_of(running, config, cost)
                runs += _compare(name, _as_many(rows, spec, seconds), running, spec, clock)
            finally:
                if running is not backend:
                    running.close()
    return runs, full_step_tokens


def _clock_for(engine: EngineConfig) -> Callable[[], float]:
    """Return a clock of steps, in which other work on the same host counts little."""
    is_on_cpu = engine.device == "cpu"
    is_on_cpu |= engine.device == "auto" and not torch.cuda.is_available()
    return time.process_time if is_on_cpu and engine.num_threads == 1 else time.perf_counter


def _spec_of(backend: NativeBackend, engine: EngineConfig, cost: CostModel) -> EngineSpec:
    limits: EngineLimits = limits_of(backend, engine.token_budget)
    return EngineSpec(
        cost=replace(cost, limits=limits),
        full_step_tokens=backend.runner.full_step_tokens,
        enable_prefix_caching=engine.enable_prefix_caching,
    )


def _as_many(rows: SimulatedRows, spec: EngineSpec, seconds: float) -> SimulatedRows:
    """Return as many of the rows as take about so long."""
    num_rows = _MIN_ROWS
    while num_rows < len(rows):
        if alone_seconds(rows.take(np.arange(2 * num_rows)), spec) > seconds:
            break
        num_rows *= 2
    return rows.take(np.arange(num_rows))


def _compare(
    name: str,
    rows: SimulatedRows,
    backend: NativeBackend,
    spec: EngineSpec,
    clock: Callable[[], float],
) -> list[HeldOutRun]:
    """Run rows in each order, in turns, and simulate the same."""
    ordered = {policy: rows.take(order(rows)).with_oracle() for policy, order in _POLICIES.items()}
    measured: dict[str, list[Floats]] = {policy: [] for policy in ordered}
    for seed in range(_ROUNDS):
        for policy, in_order in ordered.items():
            measured[policy].append(_measure(in_order, backend, seed, clock))
    return [
        HeldOutRun(
            workload=name,
            policy=policy,
            measured_s=np.median(measured[policy], axis=0),
            simulated_s=_simulate(in_order, spec),
        )
        for policy, in_order in ordered.items()
    ]


def _measure(
    rows: SimulatedRows, backend: NativeBackend, seed: int, clock: Callable[[], float]
) -> Floats:
    """Return the seconds of each step of an engine that has all rows at once."""
    random = np.random.default_rng(seed)
    backend.submit(
        [
            Request(
                request_id=row,
                row_id=str(row),
                prompt_token_ids=random.integers(0, MIN_VOCAB_SIZE, prompt).astype(np.int32),
                sampling=Sampling(max_tokens=output, ignore_eos=True),
            )
            for row, (prompt, output) in enumerate(
                zip(rows.prompt.tolist(), rows.output.tolist(), strict=True)
            )
        ]
    )
    seconds = []
    while backend.num_unfinished():
        began = clock()
        completions = backend.poll()
        seconds.append(clock() - began)
        if failed := [completion.error for completion in completions if completion.error]:
            raise MeasureError(f"a held-out row failed: {failed[0]}")
    return np.array(seconds)


def _simulate(rows: SimulatedRows, spec: EngineSpec) -> Floats:
    engine = SimulatedEngine(rows, spec)
    engine.add(range(len(rows)))
    seconds: list[Floats] = []
    while len(ends := engine.begin()):
        engine.compute(len(ends))
        seconds.append(np.diff(ends, prepend=0.0))
    return np.concatenate(seconds)
