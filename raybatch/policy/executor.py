"""Chooses where the engines of a job run: as Ray actors, or as local processes."""

from dataclasses import dataclass
from typing import Literal

ExecutorName = Literal["auto", "local", "ray"]

# On one host Ray has as many engines as a local run and starts 12 s later, on two cores
# (benchmarks/executors.py). Above this size a job is long enough for the other benefits of Ray:
# joining hosts, separate feeder processes, metrics.
_MAX_LOCAL_ROWS = 10_000
_MAX_LOCAL_BYTES = 32 << 20
# an engine takes seconds to start
_ROWS_PER_ENGINE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorInputs:
    """Inputs of `choose_executor`."""

    is_connected: bool  # a cluster is connected, or set in the environment
    needs_ray: str  # an option that requires Ray, with its value; "" for none
    num_rows: int
    num_bytes: int
    max_driver_bytes: int  # largest input that the driver plans by itself


def choose_executor(inputs: ExecutorInputs) -> tuple[bool, str]:
    """Return (whether it runs without Ray, the reason) for a job whose executor is "auto"."""
    if inputs.is_connected:
        return False, "a Ray cluster is connected"
    if inputs.needs_ray:
        return False, f"{inputs.needs_ray} needs Ray"
    for what, number, most in (
        ("rows", inputs.num_rows, _MAX_LOCAL_ROWS),
        ("bytes", inputs.num_bytes, min(inputs.max_driver_bytes, _MAX_LOCAL_BYTES)),
    ):
        if number > most:
            return False, f"{number} {what} exceed {most}"
    return True, "no cluster is connected, and the input is small"


def engines_for(num_rows: int, most: int) -> int:
    """Return how many engines, at most `most`, are worth starting on a host for `num_rows`."""
    return max(1, min(most, -(-num_rows // _ROWS_PER_ENGINE)))
