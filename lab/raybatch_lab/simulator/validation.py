"""Errors of simulations against real runs, on held-out workloads.

A figure without its error cannot be judged, so none is printed without (BlendServe,
arXiv:2411.16102, states 0.91 % for its own simulator).
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from raybatch.errors import ConfigError
from raybatch.records.arrays import Floats

# the largest error of a simulation whose figures are worth anything
MAX_STEP_ERROR, MAX_COMPLETION_ERROR, MAX_RATIO_ERROR = 0.10, 0.05, 0.02


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOutRun:
    """A held-out run of an engine, and its simulation.

    Args:
        policy: name of the order of the rows.
        measured_s: measured seconds of each step.
        simulated_s: simulated seconds of each step.
    """

    workload: str
    policy: str
    measured_s: Floats
    simulated_s: Floats

    @property
    def completion_error(self) -> float:
        return float(self.simulated_s.sum() / self.measured_s.sum() - 1)

    @property
    def step_error(self) -> float:
        """Return the median relative error of the seconds of a step, without sign.

        If the run and its simulation differ in their number of steps, the first ones count.
        """
        num_steps = min(len(self.measured_s), len(self.simulated_s))
        ratios = self.simulated_s[:num_steps] / self.measured_s[:num_steps]
        return float(np.median(np.abs(ratios - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunErrors:
    """The errors of one held-out run, as stored; `completion_error` has a sign."""

    workload: str
    policy: str
    measured_s: float
    completion_error: float
    step_error: float
    num_steps: int
    num_simulated_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Relative errors of simulations over all held-out runs, without signs.

    Args:
        step_error: error of the seconds of a step, median over runs.
        completion_error: error of the seconds of a run, of the worst run.
        ratio_error: error of the ratio of two orders' seconds, of the worst workload.
        full_step_tokens: of the measured engine, see `EngineSpec`; None if it has no such limit.
        cpu_share: CPU seconds of the measurement per second of wall time.
        backend: kind of the measured engine, whose scheduler is simulated.
        kv_token_bytes: KV bytes per token when a row moves to another engine; 0 if its KV is
            recomputed there.
    """

    step_error: float
    completion_error: float
    ratio_error: float
    full_step_tokens: float | None
    cpu_share: float
    runs: tuple[RunErrors, ...]
    backend: str = "native"
    kv_token_bytes: int = 0

    @classmethod
    def of(
        cls,
        runs: Sequence[HeldOutRun],
        *,
        full_step_tokens: float | None,
        cpu_share: float,
        backend: str = "native",
        kv_token_bytes: int = 0,
    ) -> Self:
        """Return the errors over held-out runs, which need at least two orders per workload."""
        ratio_errors = []
        for workload in dict.fromkeys(run.workload for run in runs):
            first, *others = (run for run in runs if run.workload == workload)
            for other in others:
                measured = other.measured_s.sum() / first.measured_s.sum()
                simulated = other.simulated_s.sum() / first.simulated_s.sum()
                ratio_errors.append(abs(float(simulated / measured) - 1))
        return cls(
            step_error=statistics.median(run.step_error for run in runs),
            completion_error=max(abs(run.completion_error) for run in runs),
            ratio_error=max(ratio_errors),
            full_step_tokens=full_step_tokens,
            cpu_share=cpu_share,
            backend=backend,
            kv_token_bytes=kv_token_bytes,
            runs=tuple(
                RunErrors(
                    workload=run.workload,
                    policy=run.policy,
                    measured_s=float(run.measured_s.sum()),
                    completion_error=run.completion_error,
                    step_error=run.step_error,
                    num_steps=len(run.measured_s),
                    num_simulated_steps=len(run.simulated_s),
                )
                for run in runs
            ),
        )

    def failures(self) -> list[str]:
        """Return a text about each error that exceeds its limit; [] if all are small enough."""
        limits = (
            ("a step", self.step_error, MAX_STEP_ERROR),
            ("a completion", self.completion_error, MAX_COMPLETION_ERROR),
            ("the ratio of two policies", self.ratio_error, MAX_RATIO_ERROR),
        )
        return [
            f"{name} is off by {error:.1%}, and may be by {limit:.0%}"
            for name, error, limit in limits
            if not error <= limit
        ]


def validation_path(cost_model: Path) -> Path:
    """Return the file next to a cost model that holds its validation."""
    return cost_model.with_suffix(".validation.json")


def to_json(validation: Validation) -> str:
    return json.dumps(asdict(validation), indent=1)


def read_validation(cost_model: Path) -> Validation:
    """Read the validation of a cost model; raise ConfigError if it is missing or broken."""
    path = validation_path(cost_model)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        runs = tuple(RunErrors(**run) for run in fields.pop("runs"))
        return Validation(runs=runs, **fields)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{cost_model}: the errors of simulations with this cost model are unknown, as it was "
            "never validated; run: raybatch bench calibrate MODEL"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; run: raybatch bench calibrate"
        ) from error
