"""Chooses where the engines of a job run: as Ray actors, or as local processes."""

from typing import Literal

ExecutorName = Literal["auto", "local", "ray"]

# On one host Ray has as many engines as a local run and starts 12 s later, on two cores
# (benchmarks/executors.py). Above this size a job is long enough for the other benefits of Ray:
# joining hosts, separate feeder processes, metrics.
_MAX_LOCAL_ROWS = 10_000
_MAX_LOCAL_BYTES = 32 << 20
# an engine takes seconds to start
_ROWS_PER_ENGINE = 256


def choose_executor(
    *, is_connected: bool, needs_ray: str, num_rows: int, num_bytes: int, max_driver_bytes: int
) -> tuple[bool, str]:
    """Return (whether it runs without Ray, the reason) for a job whose executor is "auto".

    Args:
        is_connected: a cluster is connected, or set in the environment.
        needs_ray: an option that requires Ray, with its value; "" for none.
        max_driver_bytes: largest input that the driver plans by itself.
    """
    if is_connected:
        return False, "a Ray cluster is connected"
    if needs_ray:
        return False, f"{needs_ray} needs Ray"
    for what, number, most in (
        ("rows", num_rows, _MAX_LOCAL_ROWS),
        ("bytes", num_bytes, min(max_driver_bytes, _MAX_LOCAL_BYTES)),
    ):
        if number > most:
            return False, f"{number} {what} exceed {most}"
    return True, "no cluster is connected, and the input is small"


def engines_for(num_rows: int, most: int) -> int:
    """Return how many engines, at most `most`, are worth starting on a host for `num_rows`."""
    return max(1, min(most, -(-num_rows // _ROWS_PER_ENGINE)))
