"""Compares simulated pools with pools of real engines: completion, and ratios of policies.

python benchmarks/simulator_error.py                       # two engines of the demo model
python benchmarks/simulator_error.py --rows 512 --rounds 4 --out result.json

Queue, plan and messages are those of the simulator on both sides. One side has simulated engines,
which compute the cost of their steps. The other side has native engines, whose steps take their CPU
seconds on the virtual clock. So other load on the host, which has fewer cores than a pool, delays
nothing. A reference engine measures the speed of the host: it runs some rows of each kind that
costs were fitted to, and steps in turns with the pool. The seconds of the pool are divided by the
slowness of the reference. The run fails unless the counters of both sides are equal. Policies that
decide the same, for example if no row moves, show the error of measurement alone.

Rows have a heavy tail like W4: prompts of 32 tokens, outputs log-normal with a median of 6.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import conditions
import meters
import numpy as np

from raybatch.backends.base import Backend
from raybatch.cli.flags import DEMO_MODEL
from raybatch.config import BackendConfig, EngineConfig
from raybatch.records.arrays import Floats
from raybatch.records.types import Request, Sampling, SequenceState
from raybatch_lab.calibrate import calibrate
from raybatch_lab.calibrated_engines import Engines, engines_of
from raybatch_lab.calibration_rows import training_rows
from raybatch_lab.measured_runs import Run
from raybatch_lab.simulated import validated_spec
from raybatch_lab.simulator.engine import EngineSpec, MovedSequence, SimulatedEngine
from raybatch_lab.simulator.events import Policies, PoolSpec
from raybatch_lab.simulator.pool import PoolOutcome, SimulatedPool
from raybatch_lab.simulator.rows import SimulatedRows

BACKEND = BackendConfig(kind="native")
REPLICAS, MAX_NUM_SEQS = 2, 16
PROMPT_TOKENS, MEDIAN_OUTPUT, SIGMA, LONGEST = 32, 6, 1.95, 400
# order of rows, and policies of the pool
POLICIES = {
    "as drawn": ("drawn", Policies()),
    "as drawn, without moves": ("drawn", Policies(moves_rows=False)),
    "longest first": ("longest", Policies()),
    "longest first, without moves": ("longest", Policies(moves_rows=False)),
}
# seconds between two turns of the reference, and of a turn
TURN_S = 0.02
REFERENCE_ROWS = 24
COUNTED = ("num_steps", "generated_tokens", "num_preemptions")


def rows_of(num_rows: int, order: str, seed: int) -> SimulatedRows:
    rng = np.random.Generator(np.random.PCG64(seed))
    output = rng.lognormal(np.log(MEDIAN_OUTPUT), SIGMA, num_rows)
    output = np.clip(np.rint(output), 1, LONGEST).astype(np.int64)
    if order == "longest":
        output = -np.sort(-output)
    rows = SimulatedRows.of(np.full(num_rows, PROMPT_TOKENS, np.int64), output)
    return replace(rows.with_oracle(), max_tokens=rows.output)


def requests_of(rows: SimulatedRows, random: np.random.Generator) -> list[Request]:
    lengths = zip(rows.prompt.tolist(), rows.output.tolist(), strict=True)
    return [
        Request(
            request_id=row,
            row_id=str(row),
            prompt_token_ids=random.integers(0, 128, prompt).astype(np.int32),
            sampling=Sampling(max_tokens=output, ignore_eos=True),
        )
        for row, (prompt, output) in enumerate(lengths)
    ]


class Reference:
    """Runs steps at intervals; reports how long steps take now, relative to their costs."""

    def __init__(self, backend: Backend, spec: EngineSpec, max_len: int) -> None:
        # rows of all workloads, because costs fit their sum better than each workload
        runs = [
            Run.of(name, order, rows.take(np.arange(REFERENCE_ROWS)), spec)
            for name, order, rows in training_rows(max_len)
        ]
        self._work = itertools.cycle(
            (run.rows, [spec.cost.predict(step) for step in run.counts]) for run in runs
        )
        self._backend, self._seeds = backend, itertools.count(1)
        self._prices: Iterator[float] = iter(())
        self.reset()

    @property
    def slowness(self) -> float:
        return self._measured_s / self._priced_s

    def reset(self) -> None:
        self._measured_s = self._priced_s = 0.0
        self._next_s = time.process_time()

    def may_step(self) -> None:
        """Run the steps of a turn if one is due."""
        if time.process_time() < self._next_s:
            return
        end_s = time.process_time() + TURN_S
        while (began := time.process_time()) < end_s:
            if not self._backend.num_unfinished():
                rows, prices = next(self._work)
                random = np.random.default_rng(next(self._seeds))
                self._backend.submit(requests_of(rows, random))
                self._prices = iter(prices)
                continue
            self._backend.poll()
            self._measured_s += time.process_time() - began
            self._priced_s += next(self._prices)
        self._next_s = time.process_time() + TURN_S


class RealEngine(SimulatedEngine):
    """A simulated engine that also runs each call on a real one, and takes its step times."""

    def __init__(
        self,
        rows: SimulatedRows,
        spec: EngineSpec,
        backend: Backend,
        requests: Sequence[Request],
        states: dict[int, SequenceState],
        reference: Reference,
    ) -> None:
        super().__init__(rows, spec)
        self.backend, self._before = backend, backend.stats()
        self._requests, self._states, self._reference = requests, states, reference
        self._finished: list[int] = []

    def add(self, rows: Iterable[int]) -> None:
        rows = list(rows)
        super().add(rows)
        self.backend.submit([self._requests[row] for row in rows])

    def restore(self, moved: Iterable[MovedSequence]) -> None:
        moved = list(moved)
        super().restore(moved)
        states = [(sequence, self._states[sequence.row]) for sequence in moved]
        self.backend.restore(
            [s if sequence.num_kv_tokens else replace(s, kv=None) for sequence, s in states]
        )

    def drain(self) -> list[int]:
        rows = super().drain()
        same(rows, [request.request_id for request in self.backend.drain()])
        return rows

    def export(self, rows: Sequence[int], *, with_kv: bool) -> list[MovedSequence]:
        moved = super().export(rows, with_kv=with_kv)
        states = self.backend.export(rows, with_kv=with_kv)
        self._states |= {state.request.request_id: state for state in states}
        same([s.num_generated for s in moved], [len(state.token_ids) for state in states])
        return moved

    def begin(self) -> Floats:
        if not len(super().begin()):
            return np.zeros(0)
        self._reference.may_step()
        began = time.process_time()
        completions = self.backend.poll()
        self._ends = np.array([time.process_time() - began])
        self._finished = [completion.request_id for completion in completions]
        return self._ends

    def compute(self, num_steps: int) -> list[int]:
        rows = super().compute(num_steps)
        same(sorted(rows), sorted(self._finished))
        return rows

    def check(self) -> None:
        simulated, real = self.stats(), self.backend.stats()
        for name in COUNTED:
            same(getattr(simulated, name), getattr(real, name) - getattr(self._before, name))


def same(simulated: object, real: object) -> None:
    if simulated != real:
        raise SystemExit(f"the simulated engine has {simulated}, but the real engine has {real}")


class RealPool(SimulatedPool):
    """A simulated pool with real engines."""

    def __init__(
        self,
        rows: SimulatedRows,
        engine: EngineSpec,
        spec: PoolSpec,
        backends: Sequence[Backend],
        reference: Reference,
        seed: int,
    ) -> None:
        super().__init__(rows, engine, spec)
        random = np.random.default_rng((7, seed))
        self._parts = requests_of(rows, random), dict[int, SequenceState](), reference
        self._backends = backends

    def _ready(self, rank: int) -> None:
        super()._ready(rank)
        replica = self.members[max(self.members)]
        replica.engine = RealEngine(self._rows, self._engine, self._backends[rank], *self._parts)

    def check(self) -> None:
        for replica in self.members.values():
            assert isinstance(replica.engine, RealEngine), "an engine that computes nothing"
            replica.engine.check()


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run of a real pool; seconds on the virtual clock, divided by the host's slowness."""

    completion_s: float
    slowness: float
    num_moved: int
    num_stolen: int


def seconds_of(outcome: PoolOutcome) -> float:
    return outcome.completion_s - outcome.ready_s


class Bench:
    """Runs real and simulated pools; all runs share the engines."""

    def __init__(self, engines: Engines, spec: EngineSpec, num_rows: int, stack: ExitStack) -> None:
        self._spec, self._num_rows = spec, num_rows
        limits = spec.cost.limits
        sizes = {"max_num_seqs": limits.max_num_seqs, "max_len": engines.max_len}
        backends = [
            stack.enter_context(closing(engines.start(limits.kv_tokens, **sizes)))
            for _ in range(REPLICAS + 1)
        ]
        *self._backends, last = backends
        self._reference = Reference(last, spec, engines.max_len)

    def simulated_s(self, policy: str, seed: int) -> float:
        return seconds_of(SimulatedPool(*self._parts(policy, seed)).run())

    def measured(self, policy: str, seed: int, number: int) -> Measured:
        # `number` 0 warms up: pages that were never used take longer
        self._reference.reset()
        backends = self._backends[:: 1 if number % 2 else -1]
        pool = RealPool(*self._parts(policy, seed), backends, self._reference, number)
        outcome = pool.run()
        pool.check()
        slowness = self._reference.slowness
        return Measured(
            completion_s=seconds_of(outcome) / slowness,
            slowness=slowness,
            num_moved=outcome.num_moved,
            num_stolen=outcome.num_stolen,
        )

    def _parts(self, policy: str, seed: int) -> tuple[SimulatedRows, EngineSpec, PoolSpec]:
        order, policies = POLICIES[policy]
        late = {rank: 0.01 * rank for rank in range(REPLICAS)}
        pool = PoolSpec(num_replicas=REPLICAS, late_s=late, policies=policies)
        return rows_of(self._num_rows, order, seed), self._spec, pool


def measure(bench: Bench, seed: int, rounds: int) -> dict[str, Any]:
    """Return errors of completions and of their ratios; policies take turns, A B B A."""
    runs: dict[str, list[Measured]] = {policy: [] for policy in POLICIES}
    for number in range(rounds + 1):
        for policy in [*POLICIES][:: -1 if number % 2 else 1]:
            found = bench.measured(policy, seed, number)
            if number:
                runs[policy].append(found)
                print(json.dumps({"policy": policy, **rounded(found)}), flush=True)
    measured = {p: statistics.median(r.completion_s for r in runs[p]) for p in POLICIES}
    simulated = {policy: bench.simulated_s(policy, seed) for policy in POLICIES}
    pairs = itertools.combinations(POLICIES, 2)
    return {
        "seed": seed,
        "policies": {
            policy: {
                "measured_s": round(measured[policy], 4),
                "simulated_s": round(simulated[policy], 4),
                "error": round(simulated[policy] / measured[policy] - 1, 4),
                "runs": [rounded(run) for run in runs[policy]],
            }
            for policy in POLICIES
        },
        "ratio_errors": {
            f"{a} / {b}": round(simulated[a] / simulated[b] / (measured[a] / measured[b]) - 1, 4)
            for a, b in pairs
        },
    }


def rounded(run: Measured) -> dict[str, float]:
    return {
        "completion_s": round(run.completion_s, 4),
        "slowness": round(run.slowness, 3),
        "num_moved": run.num_moved,
        "num_stolen": run.num_stolen,
    }


def calibrated(
    model: str, engine: EngineConfig, seconds: float, cost_model: Path | None
) -> tuple[EngineSpec, dict[str, float]]:
    """Return the spec of a simulated engine, and its errors on held-out runs of one engine."""
    if cost_model is not None:
        spec, validation = validated_spec(cost_model)
    else:
        found = calibrate(model, engine, seconds=seconds)
        print(found.to_text(), flush=True)
        validation = found.validation
        known = validation.full_step_tokens
        spec = EngineSpec(cost=found.cost, full_step_tokens=math.inf if known is None else known)
    names = ("step_error", "completion_error", "ratio_error", "cpu_share")
    return spec, {name: round(getattr(validation, name), 4) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--rows", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42])
    parser.add_argument("--seconds", type=float, default=1.0, help="per run of a calibration")
    parser.add_argument("--cost-model", type=Path, help="stored by a calibration of this engine")
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    engine = EngineConfig(
        device="cpu", max_num_seqs=MAX_NUM_SEQS, max_model_len=512, speculative_tokens=None
    )
    machine_s, own_s, began = meters.machine_cpu_s(), time.process_time(), time.perf_counter()
    spec, errors = calibrated(options.model, engine, options.seconds, options.cost_model)
    with ExitStack() as stack:
        bench = Bench(engines_of(options.model, BACKEND, engine), spec, options.rows, stack)
        results = [measure(bench, seed, options.rounds) for seed in options.seeds]
    own_s = time.process_time() - own_s
    foreign_s = meters.machine_cpu_s() - machine_s - own_s
    summary = {
        "completion_error": max(abs(p["error"]) for r in results for p in r["policies"].values()),
        "ratio_error": max(abs(e) for r in results for e in r["ratio_errors"].values()),
        "foreign_cores": round(foreign_s / (time.perf_counter() - began), 2),
    }
    print(json.dumps(summary, indent=1))
    conditions.write_result(
        options.out,
        "simulator_error.py",
        rows=options.rows,
        replicas=REPLICAS,
        calibration=errors,
        **summary,
        results=results,
    )


if __name__ == "__main__":
    main()
