"""Where the engines of a job run: as actors of Ray, or as processes of the driver's host alone."""

from dataclasses import dataclass
from typing import Literal

ExecutorName = Literal["auto", "local", "ray"]

# On one host Ray has as many engines as a local run, and is later by its start: 12 s on two cores,
# with 10 rows as with 10,000 (benchmarks/executors.py). From here on a job takes long enough for
# the other benefits of Ray: hosts that join, feeders in processes of their own, metrics.
_MAX_LOCAL_ROWS = 10_000
_MAX_LOCAL_BYTES = 32 << 20
# an engine takes seconds to start
_ROWS_PER_ENGINE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorFacts:
    """What decides where engines run."""

    is_connected: bool  # a cluster is connected, or named by the environment
    needs_ray: str  # an option that only Ray can follow, with its value; "" for none
    num_rows: int
    num_bytes: int
    max_driver_bytes: int  # of an input that the driver plans by itself


def choose_executor(facts: ExecutorFacts) -> tuple[bool, str]:
    """Return whether a job whose executor is "auto" runs without Ray, and why."""
    if facts.is_connected:
        return False, "a Ray cluster is connected"
    if facts.needs_ray:
        return False, f"{facts.needs_ray} needs Ray"
    for what, number, most in (
        ("rows", facts.num_rows, _MAX_LOCAL_ROWS),
        ("bytes", facts.num_bytes, min(facts.max_driver_bytes, _MAX_LOCAL_BYTES)),
    ):
        if number > most:
            return False, f"{number} {what} are more than {most}"
    return True, "no cluster is connected, and the input is small"


def engines_for(num_rows: int, most: int) -> int:
    """Return how many engines of one host are worth their start for so many rows."""
    return max(1, min(most, -(-num_rows // _ROWS_PER_ENGINE)))
