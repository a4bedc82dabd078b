"""Runs of real engines, step by step, in turns: what disturbs the host disturbs all of them alike.

Others on a host change step times, CPU seconds included, by tens of percent from one second
to the next. One run after the other would be compared with other moments of the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from raybatch.backends.base import Backend
from raybatch.backends.cost_cache import MIN_VOCAB_SIZE
from raybatch.errors import MeasureError
from raybatch.policy.cost.cost_model import MeasuredStep
from raybatch.records.types import ReplicaStats, Request, Sampling
from raybatch_lab.simulator.engine import EngineSpec, SimulatedEngine
from raybatch_lab.simulator.rows import SimulatedRows

# turn of one run, before another one continues: its first step finds cold caches
_TURN_S = 0.05
_COUNTED = ("generated_tokens", "cached_tokens", "num_preemptions")

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run of one engine on rows in one order, all submitted at once: simulated and measured.

    Args:
        policy: name of the order.
        counts: counts of each simulated step, whose seconds are 0.
        simulated: counters of the simulated engine after the last step.
        done: share of the run's predicted seconds that is over after each step, up to 1.
        seconds: measured seconds of each step, a list for each round.
    """

    workload: str
    policy: str
    rows: SimulatedRows
    counts: Sequence[MeasuredStep]
    simulated: ReplicaStats
    done: Sequence[float]
    seconds: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, workload: str, policy: str, rows: SimulatedRows, spec: EngineSpec) -> Self:
        counts, stats = simulate_steps(rows, spec)
        predicted = np.cumsum([spec.cost.predict(step) for step in counts])
        return cls(
            workload=workload,
            policy=policy,
            rows=rows,
            counts=counts,
            simulated=stats,
            done=(predicted / predicted[-1]).tolist(),
        )

    def steps(self) -> list[MeasuredStep]:
        """Return the counts of each step, with the median over the rounds as its seconds."""
        seconds = np.median(self.seconds, axis=0).tolist()
        return [replace(step, seconds=s) for step, s in zip(self.counts, seconds, strict=True)]


def simulate_steps(
    rows: SimulatedRows, spec: EngineSpec
) -> tuple[list[MeasuredStep], ReplicaStats]:
    """Return the counts of each step of a simulated engine on all rows, and its final counters."""
    engine, steps = SimulatedEngine(rows, spec), list[MeasuredStep]()
    engine.add(range(len(rows)))
    while len(engine.begin()):
        steps.append(engine.counts)
        engine.compute(1)
    return steps, engine.stats()


def run_round(
    pairs: Sequence[tuple[Run, Backend]], clock: Clock, seed: int, *, is_kept: bool
) -> None:
    """Run each of `pairs` once on its engine, in turns, so that all end at about the same time.

    Raises MeasureError if an engine fails a row, or does not take the simulated steps.

    Args:
        seed: seed of the prompts and of the order of turns.
        is_kept: add the seconds of the steps to the runs; False for a warm-up round.
    """
    lanes = [
        _Lane(run, backend, np.random.default_rng((seed, number)))
        for number, (run, backend) in enumerate(pairs)
    ]
    # random order: the first of those with equal progress finds caches as others left them
    np.random.default_rng(seed).shuffle(lanes)
    while waiting := [lane for lane in lanes if lane.backend.num_unfinished()]:
        min(waiting, key=lambda lane: lane.done).take_turn(clock)
    for lane in lanes:
        lane.check()
        if is_kept:
            lane.run.seconds.append(lane.seconds)


class _Lane:
    """One run of a round. No two of an engine have equal prompts, which it would find again."""

    def __init__(self, run: Run, backend: Backend, random: np.random.Generator) -> None:
        self.run, self.backend = run, backend
        self.seconds: list[float] = []
        self._before = backend.stats()
        lengths = zip(run.rows.prompt.tolist(), run.rows.output.tolist(), strict=True)
        backend.submit(
            [
                Request(
                    request_id=row,
                    row_id=str(row),
                    prompt_token_ids=random.integers(0, MIN_VOCAB_SIZE, prompt).astype(np.int32),
                    sampling=Sampling(max_tokens=output, ignore_eos=True),
                )
                for row, (prompt, output) in enumerate(lengths)
            ]
        )

    @property
    def done(self) -> float:
        """Return the share of the run's predicted seconds that its steps so far cover, 0 to 1."""
        num_steps = min(len(self.seconds), len(self.run.done))
        return self.run.done[num_steps - 1] if num_steps else 0.0

    def take_turn(self, clock: Clock) -> None:
        end_s = clock() + _TURN_S
        while self.backend.num_unfinished():
            began = clock()
            completions = self.backend.poll()
            ended = clock()
            self.seconds.append(ended - began)
            if failed := [completion.error for completion in completions if completion.error]:
                raise MeasureError(f"a row of a measured run failed in the engine: {failed[0]}")
            if ended >= end_s:
                break

    def check(self) -> None:
        stats, run = self.backend.stats(), self.run
        found = {"num_steps": len(self.seconds)} | {
            name: getattr(stats, name) - getattr(self._before, name) for name in _COUNTED
        }
        simulated = {name: getattr(run.simulated, name) for name in found}
        if found != simulated:
            raise MeasureError(
                f"the engine does not schedule as it is simulated, so it cannot be calibrated: the "
                f"workload '{run.workload}', {run.policy}, took {found}, and simulated {simulated}"
            )


def as_many(rows: SimulatedRows, spec: EngineSpec, seconds: float, *, least: int) -> SimulatedRows:
    """Return the first rows, as many as take at most about `seconds` on a simulated engine.

    Their number is `least` times a power of 2, and at least `least`.
    """
    num_rows = least
    while num_rows < len(rows):
        steps, _ = simulate_steps(rows.take(np.arange(2 * num_rows)), spec)
        if sum(map(spec.cost.predict, steps)) > seconds:
            break
        num_rows *= 2
    return rows.take(np.arange(num_rows))
