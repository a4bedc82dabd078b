"""Measures the best rates of this machine, on an engine's threads: arithmetic and memory."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# large enough for the best rate, small enough for a sample of a tenth of a second
_GEMM_SIZES = (1024, 2048)
# several times any last-level cache
_BUFFER_BYTES = 512 << 20
_NUM_SAMPLES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """Best rates, per CPU second of one process.

    Args:
        operations_per_s: operations of a float32 matrix product; a multiply-add counts as two.
        read_bytes_per_s: bytes read from memory that no cache holds.
        copied_bytes_per_s: bytes read and written together in a copy of such memory.
    """

    operations_per_s: float
    read_bytes_per_s: float
    copied_bytes_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """Return the higher rate of memory, which gives the stricter bound."""
        return max(self.read_bytes_per_s, self.copied_bytes_per_s)

    def least_s(self, operations: float, moved_bytes: float) -> float:
        """Return the seconds that work needs, if arithmetic and memory overlap entirely."""
        return max(operations / self.operations_per_s, moved_bytes / self.bytes_per_s)


def measure_limits() -> MachineLimits:
    """Measure this machine; takes a few seconds and a gigabyte of memory."""
    source = torch.ones(_BUFFER_BYTES // 4)
    target = torch.zeros_like(source)
    return MachineLimits(
        operations_per_s=max(2 * n**3 / _median_s(_product(n)) for n in _GEMM_SIZES),
        read_bytes_per_s=_BUFFER_BYTES / _median_s(lambda: source.sum()),
        copied_bytes_per_s=2 * _BUFFER_BYTES / _median_s(lambda: target.copy_(source)),
    )


def _product(size: int) -> Callable[[], object]:
    x, weight = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return lambda: torch.mm(x, weight, out=out)


def _median_s(work: Callable[[], object]) -> float:
    work()
    samples = []
    for _ in range(_NUM_SAMPLES):
        began = time.process_time()
        work()
        samples.append(time.process_time() - began)
    return statistics.median(samples)
