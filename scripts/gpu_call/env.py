"""Records the host: its GPU, versions, and which APIs of torch and Triton exist."""

import importlib
import importlib.metadata
import inspect
import os
import platform
import shutil
import subprocess
from importlib.util import find_spec

import torch

from gpu_call.stage import Stage, run_stage

_PACKAGES = (
    *("torch", "triton", "transformers", "numpy", "tokenizers", "safetensors", "pyarrow"),
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "pydantic", "ray", "vllm"),
)
_QUERY = "name,driver_version,memory.total,memory.used,clocks.max.sm,clocks.max.mem,power.limit"
# names that this project uses, by module
_PROBES = {
    "torch.nn.functional": ("grouped_mm", "scaled_dot_product_attention"),
    "torch.nn.attention.varlen": ("varlen_attn", "varlen_attn_out", "AuxRequest"),
    "triton.knobs": ("compilation", "nvidia", "runtime"),
    "triton.runtime.jit": ("create_function_from_signature",),
    "triton.tools.tensor_descriptor": ("TensorDescriptor",),
}


def main(stage: Stage) -> None:
    stage.put(versions=_versions(), python=platform.python_version(), cuda=torch.version.cuda)
    stage.put(probes=_probes(), cpus=os.cpu_count(), disk=shutil.disk_usage(stage.work)._asdict())
    card = stage.attempt("nvidia-smi", _smi) if stage.is_gpu else "no GPU asked for"
    stage.put(smi=card)
    name = platform.processor() or platform.machine()
    if stage.is_gpu:
        facts = torch.cuda.get_device_properties(0)
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        name = facts.name
        stage.put(
            name=name,
            capability=f"sm_{facts.major}{facts.minor}",
            multiprocessors=facts.multi_processor_count,
            l2_bytes=facts.L2_cache_size,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )
    versions = stage.found["versions"]
    here = ", ".join(f"{each} {versions[each]}" for each in ("torch", "triton", "transformers"))
    stage.figure(f"{name}; Python {stage.found['python']}, CUDA {stage.found['cuda']}, {here}")
    missing = [probe for probe, value in stage.found["probes"].items() if value is None]
    stage.figure(f"missing: {', '.join(missing) or 'nothing'}")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _probes() -> dict[str, str | None]:
    """Return the signature of each name, "there" if it has none, None if the name is missing."""
    found: dict[str, str | None] = {}
    for module, names in _PROBES.items():
        try:
            holder = importlib.import_module(module) if find_spec(module) else None
        except ImportError:
            holder = None
        for name in names:
            value = getattr(holder, name, None)
            try:
                text = None if value is None else str(inspect.signature(value))
            except (TypeError, ValueError):
                text = "there"
            found[f"{module}.{name}"] = text
    return found


def _smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    run_stage("env", main)
