"""Fits costs to the steps of this host's native engine, and says how far simulations are off.

The scheduler is the same in both, so that a simulated step has the counts of the measured one.
Costs are fitted to the program of estimates and to the steps of whole runs; they are judged by runs
of other workloads, each with its longest rows first and with its shortest, so that the ratio of two
policies is judged as well.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from raybatch.backends.calibrate import MIN_VOCAB_SIZE, limits_of, measure_backend
from raybatch.backends.cost_cache import cost_model_path
from raybatch.backends.native import NativeBackend, create
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.profile.cached_file import write_cached
from raybatch.errors import MeasureError
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import full, percent
from raybatch.policy.cost.cost_model import CostModel, MeasuredStep, fit
from raybatch.records.arrays import Floats, Ints
from raybatch.records.types import Request, Sampling
from raybatch.simulator.engine import EngineSpec, SimulatedEngine
from raybatch.simulator.rows import SimulatedRows
from raybatch.simulator.validation import HeldOutRun, Validation, to_json, validation_path

_NATIVE = BackendConfig(kind="native")
# rows that run at once, so that others wait and an order of rows matters
_MAX_SEQS = 32
_ROUNDS = 3
# runs of whose time the program of estimates takes as much
_PROGRAM_RUNS = 8
_MIN_ROWS, _MAX_ROWS = 64, 1024
_SHORT_OF_MEMORY = "short of memory"
# of the KV memory that all rows of the workload that is short of it would take together
_TIGHT_SHARE = 1 / 64
_POLICIES: dict[str, Callable[[SimulatedRows], Ints]] = {
    "longest first": lambda rows: np.argsort(-rows.output, kind="stable"),
    "shortest first": lambda rows: np.argsort(rows.output, kind="stable"),
}

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was found, and where the cost model would be.

    Args:
        cost_model: its file, where `is_stored`: that of a model whose simulations are not too far
            off.
    """

    model: str
    cost_model: Path
    is_stored: bool
    num_steps: int
    fit_error: float
    validation: Validation

    def to_text(self) -> str:
        found = self.validation
        facts = (
            ("fitted to", f"{full(self.num_steps)} steps, within {percent(self.fit_error)}"),
            ("a step is off by", f"{percent(found.step_error)} (median of held-out runs)"),
            ("a completion", f"{percent(found.completion_error)} (worst run)"),
            ("the ratio of two orders", f"{percent(found.ratio_error)} (worst workload)"),
            ("CPU", f"{percent(found.cpu_share, 0)} of a core while the engine ran"),
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
        header = ("held out", "steps", "simulated", "measured", "error", "of a step", "order")
        notes = (
            f"stored: {self.cost_model}"
            if self.is_stored
            else f"not stored, and nothing is simulated with it: {'; '.join(found.failures())}",
        )
        table = Table(header=header, rows=rows)
        section = Section(title="", facts=facts, table=table, notes=notes)
        return to_text(f"{self.model}: simulated and measured", [section])


def calibrate(
    model: str,
    engine: EngineConfig,
    *,
    seconds: float = 1.5,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure an engine, fit its costs, and store them with their errors on held-out runs.

    What fails its validation is not stored, as estimates would read it as well. An engine of one
    thread on a CPU is timed by its CPU seconds, so that others may use the host meanwhile.

    Args:
        seconds: of each run, about; eight are held out, three times each.
        folder: of cost models; None is the usual one.

    Raises:
        MeasureError: the engine fails a row, or is too small.
    """
    path = cost_model_path(model, _NATIVE, engine, folder=folder)
    clock = _clock_for(engine)
    plain = replace(engine, speculative_tokens=None)
    began, cpu_began = time.perf_counter(), time.process_time()
    tell("measuring steps")
    with closing(create(model, plain)) as backend:
        limits = limits_of(backend, engine.token_budget)
        known = backend.runner.full_step_tokens
        full_step_tokens = None if math.isinf(known) else known
        max_len = backend.capacity().max_model_len
        steps = measure_backend(backend, limits, clock=clock, budget_s=_PROGRAM_RUNS * seconds)
    with ExitStack() as stack:
        bench = _Bench(model, plain, stack)
        guess = fit(steps, limits)
        fitted = [bench.case(*each, guess, seconds) for each in training_rows(max_len)]
        judged = [bench.case(*each, guess, seconds) for each in held_out_rows(max_len)]
        # in turns, so that a host that others use more and more is the same for all
        for number in range(_ROUNDS):
            tell(f"running rows, round {number + 1} of {_ROUNDS}")
            for case in (*fitted, *judged):
                case.measure(number, clock)
    steps += [step for case in fitted for run in case.steps().values() for step in run]
    cost = fit(steps, limits, for_sums=True)
    held_out = [
        HeldOutRun(
            workload=case.name,
            policy=policy,
            measured_s=np.array([step.seconds for step in run]),
            simulated_s=np.array([cost.predict(step) for step in run]),
        )
        for case in judged
        for policy, run in case.steps().items()
    ]
    cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    validation = Validation.of(held_out, full_step_tokens=full_step_tokens, cpu_share=cpu_share)
    is_stored = not validation.failures()
    if is_stored:
        write_cached(path, json.dumps(asdict(cost), indent=1), what="cost model")
        write_cached(validation_path(path), to_json(validation), what="validation")
    return Calibration(
        model=model,
        cost_model=path,
        is_stored=is_stored,
        num_steps=len(steps),
        fit_error=cost.fit_error,
        validation=validation,
    )


def training_rows(max_tokens: int) -> Iterator[tuple[str, SimulatedRows]]:
    """Yield workloads that costs are fitted to, of lengths that those held out do not have."""
    rng, num_rows = np.random.Generator(np.random.PCG64(3)), _MAX_ROWS
    output = np.minimum(rng.geometric(1 / 24, num_rows), 100)
    yield "geometric", _scaled(rng.integers(8, 400, num_rows), output, max_tokens)
    yield (
        "short prompts",
        _scaled(np.full(num_rows, 12), rng.integers(20, 60, num_rows), max_tokens),
    )
    output = rng.integers(60, 180, num_rows)
    yield _SHORT_OF_MEMORY, _scaled(np.full(num_rows, 60), output, max_tokens)


def held_out_rows(max_tokens: int) -> Iterator[tuple[str, SimulatedRows]]:
    """Yield the workloads by which costs are judged."""
    rng, num_rows = np.random.Generator(np.random.PCG64(7)), _MAX_ROWS
    yield "alike", _scaled(np.full(num_rows, 32), np.full(num_rows, 16), max_tokens)
    output = np.minimum(rng.lognormal(np.log(6), 1.95, num_rows), 240)
    yield "tail", _scaled(np.full(num_rows, 32), output, max_tokens)
    prompt, output = rng.integers(16, 240, num_rows), rng.integers(8, 120, num_rows)
    yield "mixed", _scaled(prompt, output, max_tokens)
    prompt, output = rng.integers(16, 120, num_rows), rng.integers(16, 240, num_rows)
    yield _SHORT_OF_MEMORY, _scaled(prompt, output, max_tokens)


def _scaled(prompt: Ints | Floats, output: Ints | Floats, max_tokens: int) -> SimulatedRows:
    """Return rows whose lengths are known, in a model of so many tokens."""
    scale = min(1.0, max_tokens / 512)
    lengths = (np.maximum(np.rint(n * scale), 1).astype(np.int64) for n in (prompt, output))
    return SimulatedRows.of(*lengths).with_oracle()


@dataclass(frozen=True, slots=True)
class _Case:
    """A workload in each order, on one engine, and what was measured of it."""

    name: str
    ordered: Mapping[str, SimulatedRows]
    backend: NativeBackend
    spec: EngineSpec
    seconds: dict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, seed: int, clock: Clock) -> None:
        for policy, rows in self.ordered.items():
            self.seconds[policy].append(_measure(rows, self.backend, seed, clock))

    def steps(self) -> dict[str, list[MeasuredStep]]:
        """Return the counts of each step by policy, and the least seconds that it took."""
        found = {}
        for policy, rows in self.ordered.items():
            counts = _count(rows, self.spec)
            # what else runs on the host only adds
            seconds = np.min(self.seconds[policy], axis=0).tolist()
            if len(counts) != len(seconds):
                raise MeasureError(
                    f"rows that are {self.name} took {len(seconds)} steps, simulated "
                    f"{len(counts)}: this engine schedules in another way, which is not simulated"
                )
            steps = zip(counts, seconds, strict=True)
            found[policy] = [replace(step, seconds=taken) for step, taken in steps]
        return found


class _Bench:
    """Engines of one model: one with memory for all that runs, and others that are short of it."""

    def __init__(self, model: str, engine: EngineConfig, stack: ExitStack) -> None:
        self._model, self._stack = model, stack
        self._engine = replace(engine, max_num_seqs=min(engine.max_num_seqs, _MAX_SEQS))
        self._roomy = self._load(engine.kv_cache_bytes)
        runner = self._roomy.runner
        self._token_bytes = kv_bytes_per_token(runner.spec, runner.cache.k.dtype)

    def case(self, name: str, rows: SimulatedRows, cost: CostModel, seconds: float) -> _Case:
        """Return as many of the rows as take about so long, and their engine."""
        backend = self._roomy
        if name == _SHORT_OF_MEMORY:
            kv_tokens = int((rows.prompt + rows.output).sum() * _TIGHT_SHARE)
            backend = self._load(kv_tokens * self._token_bytes)
        spec = EngineSpec(
            cost=replace(cost, limits=limits_of(backend, self._engine.token_budget)),
            full_step_tokens=backend.runner.full_step_tokens,
            enable_prefix_caching=self._engine.enable_prefix_caching,
        )
        rows = _as_many(rows, spec, seconds)
        ordered = {policy: rows.take(order(rows)) for policy, order in _POLICIES.items()}
        return _Case(name, ordered, backend, spec)

    def _load(self, kv_cache_bytes: int | None) -> NativeBackend:
        engine = replace(self._engine, kv_cache_bytes=kv_cache_bytes)
        return self._stack.enter_context(closing(create(self._model, engine)))


def _clock_for(engine: EngineConfig) -> Clock:
    """Return a clock of steps, in which other work on the same host counts little."""
    is_on_cpu = engine.device == "cpu"
    is_on_cpu |= engine.device == "auto" and not torch.cuda.is_available()
    return time.process_time if is_on_cpu and engine.num_threads == 1 else time.perf_counter


def _as_many(rows: SimulatedRows, spec: EngineSpec, seconds: float) -> SimulatedRows:
    """Return as many of the rows as take about so long."""
    num_rows = _MIN_ROWS
    while num_rows < len(rows):
        steps = _count(rows.take(np.arange(2 * num_rows)), spec)
        if sum(map(spec.cost.predict, steps)) > seconds:
            break
        num_rows *= 2
    return rows.take(np.arange(num_rows))


def _measure(rows: SimulatedRows, backend: NativeBackend, seed: int, clock: Clock) -> Floats:
    """Return the seconds of each step of an engine that has all rows at once."""
    random = np.random.default_rng(seed)
    lengths = zip(rows.prompt.tolist(), rows.output.tolist(), strict=True)
    requests = [
        Request(
            request_id=row,
            row_id=str(row),
            prompt_token_ids=random.integers(0, MIN_VOCAB_SIZE, prompt).astype(np.int32),
            sampling=Sampling(max_tokens=output, ignore_eos=True),
        )
        for row, (prompt, output) in enumerate(lengths)
    ]
    backend.submit(requests)
    seconds = []
    while backend.num_unfinished():
        began = clock()
        completions = backend.poll()
        seconds.append(clock() - began)
        if failed := [completion.error for completion in completions if completion.error]:
            raise MeasureError(f"a held-out row failed: {failed[0]}")
    return np.array(seconds)


def _count(rows: SimulatedRows, spec: EngineSpec) -> list[MeasuredStep]:
    """Return the counts of each step of such an engine."""
    engine, steps = SimulatedEngine(rows, spec), list[MeasuredStep]()
    engine.add(range(len(rows)))
    while len(engine.begin()):
        steps.append(engine.counts)
        engine.compute(1)
    return steps
