"""Assumed rates of GPUs with NVLink, by Ray's accelerator names; not measured.

Memory size and bandwidth, bfloat16 FLOP/s and NVLink bandwidth per direction are from NVIDIA's data
sheets of SXM modules. PCIe cards have the same names; engines without peer access refuse to share.
Kernels reach the shares below; links reach the full rate, as in figure 9 of SiDP.
"""

from dataclasses import dataclass

from raybatch.policy.decode_times import GpuRates

COMPUTE_SHARE, MEMORY_SHARE = 0.55, 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind:
    """Memory and rates of one kind of GPU."""

    memory_bytes: int
    rates: GpuRates


def _kind(memory: float, bytes_per_s: float, flops: float, link_bytes_per_s: float) -> GpuKind:
    rates = GpuRates(
        bytes_per_s=MEMORY_SHARE * bytes_per_s,
        flops=COMPUTE_SHARE * flops,
        link_bytes_per_s=link_bytes_per_s,
    )
    return GpuKind(memory_bytes=round(memory), rates=rates)


GPU_KINDS = {
    # Ray uses this name for those with 80 GB, too
    "A100": _kind(40e9, 1.555e12, 312e12, 300e9),
    "A100-40G": _kind(40e9, 1.555e12, 312e12, 300e9),
    "A100-80G": _kind(80e9, 2.039e12, 312e12, 300e9),
    "H20": _kind(96e9, 4.0e12, 148e12, 450e9),
    "H100": _kind(80e9, 3.35e12, 989e12, 450e9),
    "H200": _kind(141e9, 4.8e12, 989e12, 450e9),
    "B200": _kind(180e9, 8.0e12, 2250e12, 900e9),
}
