"""How far simulations are from real runs: errors on workloads that nothing was fitted to.

A figure without that is a claim that nobody can judge, so none is printed without (BlendServe,
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

# what a simulation may be off by before its figures are worth nothing
MAX_STEP_ERROR, MAX_COMPLETION_ERROR, MAX_RATIO_ERROR = 0.10, 0.05, 0.02


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOutRun:
    """One workload under one policy: steps of an engine, and of its simulation; seconds.

    Args:
        measured_s: of each step.
        simulated_s: of each step.
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
        """Return the median over the steps, or the first of them where counts differ."""
        num_steps = min(len(self.measured_s), len(self.simulated_s))
        ratios = self.simulated_s[:num_steps] / self.measured_s[:num_steps]
        return float(np.median(np.abs(ratios - 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunErrors:
    """One held-out run, as it is stored."""

    workload: str
    policy: str
    measured_s: float
    completion_error: float
    step_error: float
    num_steps: int
    num_simulated_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Errors over all held-out runs, none with a sign.

    Args:
        step_error: median over runs.
        completion_error: the worst run.
        ratio_error: the worst workload: of one policy's completion over the other's.
        backend: kind of the engine, whose scheduler is simulated.
        full_step_tokens: of the engine that was measured, see `EngineSpec`; None where no step is
            full.
        cpu_share: of a core that it got meanwhile.
        kv_token_bytes: of a row that moves with its KV; 0 where it is computed again.
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
        """Return the errors of runs, two or more policies of each workload."""
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
        """Return what is too far off for figures to be printed."""
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
    """Return the file beside a cost model that holds its validation."""
    return cost_model.with_suffix(".validation.json")


def to_json(validation: Validation) -> str:
    return json.dumps(asdict(validation), indent=1)


def read_validation(cost_model: Path) -> Validation:
    """Read the validation of a cost model. Raises ConfigError: there is none, or a broken one."""
    path = validation_path(cost_model)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        runs = tuple(RunErrors(**run) for run in fields.pop("runs"))
        return Validation(runs=runs, **fields)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{cost_model}: no run was ever compared with its simulation, so its figures would be "
            "claims that nobody can judge; run: raybatch bench calibrate MODEL"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; run: raybatch bench calibrate"
        ) from error
