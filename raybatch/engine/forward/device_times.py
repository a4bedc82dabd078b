"""How long a function takes on a device, for choices that are made at the start."""

import time
from collections.abc import Callable

import torch

_NUM_RUNS = 8
# by so much another form must be faster to be taken
LEAST_GAIN = 0.03


def seconds_on(device: torch.device, run: Callable[[], object]) -> float:
    """Return the mean seconds of a few runs, behind one that does not count."""
    run()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_NUM_RUNS):
        run()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / _NUM_RUNS
