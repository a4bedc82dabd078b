"""Where the measured cost of unlike lengths lies, and what is known of engines without a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.cost_cache import cost_model_path
from raybatch.engine.profile.cached_file import read_cached, write_cached
from raybatch_lab.stages.heterogeneity import MixCurve, MixPoint

# native decode attention on an AMD EPYC with AVX-512, the largest factors of all shapes: part
# "curves" of benchmarks/results/2026-11-26-length-mix-2core-avx512.json
_NATIVE_ON_CPUS = MixCurve(
    points=tuple(
        MixPoint(variation=v, factor=f)
        for v, f in ((0.0, 1.0), (0.49, 1.015), (0.96, 1.021), (1.38, 1.025), (1.98, 1.045))
    )
)

# where engines without Ray find GPUs
_GPUS = Path("/proc/driver/nvidia/gpus")


class MeasuredCurve(NamedTuple):
    """A curve, and a text that says where it was measured."""

    curve: MixCurve
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    curve: MixCurve


def curve_path(cost_model: Path) -> Path:
    """Return the file that has the curve of an engine, given the file of its cost model."""
    return cost_model.with_suffix(".lengths.json")


def store_curve(curve: MixCurve, cost_model: Path) -> None:
    write_cached(_Stored(curve=curve), curve_path(cost_model), what="cost of unlike lengths")


def measured_curve(
    spec: PoolSpec, *, num_gpus: float = 0.0, folder: Path | None = None
) -> MeasuredCurve | None:
    """Return the curve of an engine that `raybatch bench calibrate` has stored on this host.

    If there is none, return a built-in curve for native engines on CPUs, and None for others.

    Args:
        num_gpus: GPUs that Ray reserves for each engine.
        folder: folder of cost models; None is the default one.
    """
    path = curve_path(cost_model_path(spec.model, spec.backend, spec.engine, folder=folder))
    stored = read_cached(_Stored, path, what="cost of unlike lengths")
    if stored is not None:
        return MeasuredCurve(stored.curve, "measured on this host")
    device = spec.engine.device
    is_on_cpu = device == "cpu" or (device == "auto" and not (num_gpus or _GPUS.is_dir()))
    if spec.backend.kind == "native" and is_on_cpu:
        return MeasuredCurve(_NATIVE_ON_CPUS, "measured for native engines on CPUs")
    return None
