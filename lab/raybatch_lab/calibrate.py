"""Fits costs to the steps of this host's engine, and says how far simulations are off.

The scheduler is the same in both, so that a simulated step has the counts of the measured one.
Costs are fitted to the program of estimates and to the steps of whole runs; they are judged by runs
of other workloads, each with its longest rows first and with its shortest, so that the ratio of two
policies is judged as well.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from raybatch.backends.base import Backend
from raybatch.backends.cost_cache import cost_model_path, measure_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.profile.cached_file import write_cached
from raybatch.errors import MeasureError
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import full, percent
from raybatch.policy.cost.cost_model import CostModel, MeasuredStep, fit
from raybatch_lab.calibrated_engines import Engines, engines_of
from raybatch_lab.calibration_rows import (
    ALIKE,
    ORDERS,
    SHORT_OF_MEMORY,
    held_out_rows,
    training_rows,
)
from raybatch_lab.measured_runs import Clock, Run, as_many, run_round
from raybatch_lab.simulator.rows import SimulatedRows
from raybatch_lab.simulator.validation import HeldOutRun, Validation, validation_path
from raybatch_lab.stages.heterogeneity import MixCurve
from raybatch_lab.stages.measured import store_curve
from raybatch_lab.unlike_lengths import measure_curve

_NATIVE = BackendConfig(kind="native")
# rows that run at once, so that others wait and an order of rows matters
_MAX_SEQS = 32
# after one that is not kept: memory is used for the first time in it, which takes long
NUM_ROUNDS = 6
_MIN_ROWS = 64
# of whose time the program of estimates takes as much
_PROGRAM_RUNS = 8
_PROGRAM_TOKENS = 1 << 16
# of the KV memory that all rows of the workload that is short of it would take together
_TIGHT_SHARE = 1 / 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Result of `calibrate`: the costs of an engine, and the errors of simulations with them.

    Args:
        cost_model: file of the cost model, written only if `is_stored`.
        is_stored: the errors of `validation` are small enough, so the cost model was written.
        num_steps: measured steps that the costs were fitted to.
        curve: factor on the time of attention for a batch of unequal lengths, stored in any case;
            None if it could not be measured.
    """

    model: str
    cost: CostModel
    cost_model: Path
    is_stored: bool
    num_steps: int
    validation: Validation
    curve: MixCurve | None

    def _apart(self) -> float:
        """Return by how much two orders of rows that are all alike are said to differ."""
        first, second = (r.measured_s for r in self.validation.runs if r.workload == ALIKE)
        return abs(first / second - 1)

    def _unlike(self) -> str:
        """Return what lengths cost that vary by their mean, which `pool.stages` asks."""
        if self.curve is None:
            return "unknown: attention is too small a part of the steps"
        return f"{float(self.curve.at(1.0)):.2f} times the attention over one length"

    def to_text(self) -> str:
        found = self.validation
        facts = (
            ("fitted to", f"{full(self.num_steps)} steps, within {percent(self.cost.fit_error)}"),
            ("a step is off by", f"{percent(found.step_error)} (median of held-out runs)"),
            ("a completion", f"{percent(found.completion_error)} (worst run)"),
            ("the ratio of two orders", f"{percent(found.ratio_error)} (worst workload)"),
            ("the same rows twice", f"{percent(self._apart())} apart, by measuring alone"),
            ("unlike lengths", self._unlike()),
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
    backend: BackendConfig = _NATIVE,
    seconds: float = 1.0,
    folder: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure an engine, fit a cost model, and store it with its errors on held-out runs.

    A cost model with too large errors is not stored, since estimates would read it too. An engine
    of one thread on a CPU is timed in CPU seconds, so that other processes may use the host.

    Args:
        seconds: approximate length of each run; there are eight runs to fit and eight held-out
            runs, and each is repeated seven times.
        folder: folder of cost models; None is the default one.
        tell: called with a line about each phase, to show progress.

    Raises:
        ConfigError: there is no simulated scheduler for this backend.
        MeasureError: the engine fails a row, is too small, or does not take the simulated steps.
    """
    path = cost_model_path(model, backend, engine, folder=folder)
    tell("loading the model")
    engines = engines_of(model, backend, replace(engine, speculative_tokens=None))
    clock = _clock_for(engine)
    began, cpu_began = time.perf_counter(), time.process_time()
    tell("measuring steps")
    steps = _measure_program(engines, engine.max_num_seqs, clock, _PROGRAM_RUNS * seconds)
    with ExitStack() as stack:
        bench = _Bench(engines, engine, fit(steps, engines.limits), seconds, stack)
        fitted = [bench.case(name, rows, [o]) for name, o, rows in training_rows(engines.max_len)]
        judged = [bench.case(*each, [*ORDERS]) for each in held_out_rows(engines.max_len)]
        _measure_cases([*fitted, *judged], clock, tell)
    steps += [step for case in fitted for run in case.runs for step in run.steps()]
    cost = fit(steps, engines.limits, for_sums=True)
    held_out = [_held_out(run, cost) for case in judged for run in case.runs]
    cpu_share = (time.process_time() - cpu_began) / (time.perf_counter() - began)
    tell("measuring unlike lengths")
    curve = _measure_curve(engines, engine.max_num_seqs, clock)
    validation = Validation.of(
        held_out,
        backend=backend.kind,
        full_step_tokens=known if math.isfinite(known := engines.full_step_tokens) else None,
        cpu_share=cpu_share,
        kv_token_bytes=engines.kv_token_bytes,
    )
    is_stored = not validation.failures()
    if is_stored:
        write_cached(cost, path, what="cost model")
        write_cached(validation, validation_path(path), what="validation")
    if curve is not None:
        store_curve(curve, path)
    return Calibration(
        model=model,
        cost=cost,
        cost_model=path,
        is_stored=is_stored,
        num_steps=len(steps),
        validation=validation,
        curve=curve,
    )


@dataclass(frozen=True, slots=True)
class _Case:
    """A workload in some orders, and as many engines, which are alike."""

    runs: Sequence[Run]
    backends: Sequence[Backend]

    def pairs(self, number: int) -> list[tuple[Run, Backend]]:
        """Return a (run, engine) pair for each order of rows in round `number`.

        Engines rotate, so that an order runs on another one in the next round.
        """
        count = len(self.runs)
        return [(run, self.backends[(i + number) % count]) for i, run in enumerate(self.runs)]


class _Bench:
    """Makes cases: some have memory for all rows that run, others are short of it."""

    def __init__(
        self,
        engines: Engines,
        engine: EngineConfig,
        cost: CostModel,
        seconds: float,
        stack: ExitStack,
    ) -> None:
        self._engines, self._cost, self._seconds, self._stack = engines, cost, seconds, stack
        self._max_num_seqs = min(engine.max_num_seqs, _MAX_SEQS)

    def case(self, name: str, rows: SimulatedRows, orders: Sequence[str]) -> _Case:
        """Return a case with an engine for each order, and with rows for about `seconds` each.

        `name` is the workload's, and `orders` are keys of `ORDERS`.
        """
        kv_tokens = self._max_num_seqs * (rows.longest_tokens + self._engines.limits.block_size)
        if name == SHORT_OF_MEMORY:
            kv_tokens = int((rows.prompt + rows.output).sum() * _TIGHT_SHARE)
        backends = [self._start(kv_tokens, rows.longest_tokens) for _ in orders]
        spec = self._engines.spec(backends[0], self._cost)
        rows = as_many(rows, spec, self._seconds, least=_MIN_ROWS)
        runs = [Run.of(name, order, rows.take(ORDERS[order](rows)), spec) for order in orders]
        return _Case(runs, backends)

    def _start(self, kv_tokens: int, max_len: int) -> Backend:
        backend = self._engines.start(kv_tokens, max_num_seqs=self._max_num_seqs, max_len=max_len)
        return self._stack.enter_context(closing(backend))


def _measure_program(
    engines: Engines, max_num_seqs: int, clock: Clock, budget_s: float
) -> list[MeasuredStep]:
    """Return the steps of the program of estimates, from memory that was used before."""
    kv_tokens = min(engines.limits.kv_tokens, _PROGRAM_TOKENS)
    backend = engines.start(kv_tokens, max_num_seqs=max_num_seqs, max_len=engines.max_len)
    with closing(backend):
        limits = engines.limits_of(backend)
        # with new prompts, so that none is cached
        measure_backend(backend, limits, clock=clock, budget_s=budget_s / 2, seed=1)
        return measure_backend(backend, limits, clock=clock, budget_s=budget_s)


def _measure_curve(engines: Engines, max_num_seqs: int, clock: Clock) -> MixCurve | None:
    """Return what unlike lengths cost, None where steps do not tell."""
    kv_tokens = min(engines.limits.kv_tokens, _PROGRAM_TOKENS)
    backend = engines.start(kv_tokens, max_num_seqs=max_num_seqs, max_len=engines.max_len)
    with closing(backend):
        try:
            return measure_curve(backend, engines.limits_of(backend), clock)
        except MeasureError:
            return None


def _measure_cases(cases: Sequence[_Case], clock: Clock, tell: Callable[[str], None]) -> None:
    for number in range(NUM_ROUNDS + 1):
        tell(f"running rows, round {number + 1} of {NUM_ROUNDS + 1}")
        pairs = [pair for case in cases for pair in case.pairs(number)]
        run_round(pairs, clock, number, is_kept=number > 0)


def _held_out(run: Run, cost: CostModel) -> HeldOutRun:
    steps = run.steps()
    return HeldOutRun(
        workload=run.workload,
        policy=run.policy,
        measured_s=np.array([step.seconds for step in steps]),
        simulated_s=np.array([cost.predict(step) for step in steps]),
    )


def _clock_for(engine: EngineConfig) -> Clock:
    """Return a clock of steps, in which other work on the same host counts little."""
    is_on_cpu = engine.device == "cpu"
    is_on_cpu |= engine.device == "auto" and not torch.cuda.is_available()
    # as it is once the model is loaded
    return time.process_time if is_on_cpu and torch.get_num_threads() == 1 else time.perf_counter
