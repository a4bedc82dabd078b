"""`raybatch bench gpu`: checks, layers beside the device's limits, engines beside each other."""

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from raybatch.backends.registry import type_of
from raybatch.bench.checkpoints import ON_CPU, ON_GPU, Shape, write_checkpoint
from raybatch.bench.engine_run import EngineJob, EngineResult, Rows
from raybatch.bench.layers import LayerFigures, measure_layers
from raybatch.bench.machine import Limits, machine_of, measure_limits
from raybatch.bench.report import BenchReport, CheckedTokens, ModelFigures
from raybatch.config import BackendConfig, EngineConfig, from_plain
from raybatch.errors import ConfigError, error_text

# of a small model in float32, where engines give equal tokens
_CHECKED = Rows(
    name="check", num_rows=8, prompt_tokens=96, output_tokens=16, rows_per_group=4, shared_tokens=64
)
ROWS_ON_GPU = (
    Rows(name="nothing shared", num_rows=256, prompt_tokens=512, output_tokens=128),
    Rows(name="long prompts", num_rows=32, prompt_tokens=4096, output_tokens=8),
    Rows(
        name="groups of 16",
        num_rows=512,
        prompt_tokens=1088,
        output_tokens=64,
        rows_per_group=16,
        shared_tokens=1024,
    ),
)
ROWS_ON_CPU = tuple(
    replace(
        rows,
        num_rows=max(2, rows.num_rows // 16),
        prompt_tokens=rows.prompt_tokens // 8,
        output_tokens=rows.output_tokens // 8,
        shared_tokens=rows.shared_tokens // 8,
    )
    for rows in ROWS_ON_GPU
)
_ON_A_CPU = (
    "these are rates of a processor, whose caches hold such small models: shares may be above 100 %"
)
# compiling takes minutes there
_VLLM_ON_CPU = {"engine_kwargs": {"enforce_eager": True}}
ENGINES = ("native", "vllm")
_NUM_REPEATS = 3
_MAX_MODEL_LEN = 8192
_CPU_KV_BYTES = 256 << 20
# of the seconds that are left, what the layers of one model may take, and at most
_LAYERS_SHARE, _MAX_LAYERS_S = 0.1, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBenchOptions:
    """What is measured; `device` as torch names it, or "auto" for a GPU where there is one."""

    device: str = "auto"
    minutes: float = 10.0
    engines: tuple[str, ...] = ENGINES


def bench_gpu(
    options: GpuBenchOptions,
    *,
    tell: Callable[[str], None] = lambda _: None,
    keep: Callable[[BenchReport], object] = lambda _: None,
    shapes: Mapping[str, Shape] | None = None,
    rows: Sequence[Rows] | None = None,
) -> BenchReport:
    """Measure a device within the minutes of the options; what fails or is skipped is told.

    Args:
        tell: called with what comes next.
        keep: called with the results so far, after each model and each engine.
        shapes: of the models, by name; None for those of the device's kind.
        rows: that engines answer; None for those of the device's kind.

    Raises:
        ConfigError: there is no such device, or no engine of such a name.
    """
    device = _device_of(options.device)
    is_gpu = device.type == "cuda"
    shapes = shapes or (ON_GPU if is_gpu else ON_CPU)
    bench = _Bench(
        device=device,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        end=time.monotonic() + 60 * options.minutes,
        tell=tell,
    )
    engines = bench.engines_of(options.engines)
    tell("rates of the device")
    limits = measure_limits(device, bench.dtype)
    machine = machine_of(device)
    models: list[ModelFigures] = []

    def report(*more: ModelFigures) -> BenchReport:
        return BenchReport(
            machine=machine,
            minutes=options.minutes,
            limits=limits,
            checked=checked,
            models=(*models, *more),
            failures=tuple(bench.failures),
            skipped=tuple(bench.skipped),
            notes=tuple(bench.missing) if is_gpu else (*bench.missing, _ON_A_CPU),
        )

    with tempfile.TemporaryDirectory(prefix="raybatch-bench-") as folder:
        checked = bench.check_tokens(Path(folder) / "check")
        keep(report())
        for i, (name, shape) in enumerate(shapes.items()):
            if not bench.has_time(name):
                continue
            path = Path(folder) / str(i)
            for figures in bench.measure(name, shape, path, limits, engines, rows or ()):
                keep(report(figures))
            models.append(figures)
    return report()


def _device_of(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"--device {name}: torch sees {count} GPUs here; --device cpu runs everything on "
                "the processor"
            )
    return device


class _Bench:
    """The parts of a measurement, each of which notes what fails or has no time, and goes on."""

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, end: float, tell: Callable[[str], None]
    ) -> None:
        self.dtype = dtype
        self.missing: list[str] = []
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self._device, self._end, self._tell = device, end, tell

    def engines_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the engines that are installed; the others are noted."""
        for name in names:
            if name not in ENGINES:
                raise ConfigError(f"--engines must be of {', '.join(ENGINES)}, got {name!r}")
        here = tuple(n for n in names if find_spec(type_of(BackendConfig(kind=n)).package))
        for name in set(names) - set(here):
            self.missing.append(f"{name} is not installed here, so it was not measured")
        return here

    def has_time(self, part: str) -> bool:
        """Return whether there is time for a part; one that there is none for is noted."""
        has_time = self._left_s() > 0
        if not has_time:
            self.skipped.append(part)
        return has_time

    def check_tokens(self, folder: Path) -> CheckedTokens | None:
        """Compare the tokens of the native engine with those of transformers, in float32."""
        self._tell("tokens beside those of transformers")
        shape = ON_CPU["dense, 4 layers of 256"]
        write_checkpoint(shape, folder, dtype=torch.float32, device="cpu")
        what = "the comparison of tokens"
        found = [
            self._run(what, kind, shape, folder, (_CHECKED,), num_repeats=0, dtype="float32")
            for kind in ("native", "transformers")
        ]
        if None in found:
            return None
        native, reference = (result.runs[0].token_ids for result in found if result)
        equal = sum(one == other for one, other in zip(native, reference, strict=True))
        return CheckedTokens(equal_rows=equal, num_rows=len(native))

    def measure(
        self,
        name: str,
        shape: Shape,
        folder: Path,
        limits: Limits,
        engines: Sequence[str],
        rows: Sequence[Rows],
    ) -> Iterator[ModelFigures]:
        """Time layers and engines of one model; yield what there is after each."""
        self._tell(f"weights of {name}")
        num_parameters = write_checkpoint(shape, folder, dtype=self.dtype, device=str(self._device))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        layers: LayerFigures | None = None
        if self.has_time(f"{name}, layers"):
            self._tell(f"layers of {name}")
            budget_s = min(_MAX_LAYERS_S, _LAYERS_SHARE * self._left_s())
            try:
                layers = measure_layers(folder, self._engine(), limits, budget_s=budget_s)
            except Exception as error:
                self.failures.append(f"{name}, layers: {error_text(error)}")
        if layers is not None:
            if layers.not_timed:
                left_out = "; ".join(layers.not_timed)
                self.missing.append(f"{name}, layers: no time or memory for {left_out}")
            self.failures += [
                f"{name}: the kernel of {op.name} {op.failure or f'differs by {op.error:.2g}'}"
                for op in layers.ops
                if not op.agrees
            ]
        self._free()
        rows = rows or (ROWS_ON_GPU if self._device.type == "cuda" else ROWS_ON_CPU)
        figures = ModelFigures(name=name, num_parameters=num_parameters, layers=layers, engines=())
        yield figures
        for kind in engines:
            self._tell(f"{kind} on {name}")
            result = self._run(name, kind, shape, folder, rows, num_repeats=_NUM_REPEATS)
            if result is not None:
                figures = replace(figures, engines=(*figures.engines, result))
                yield figures

    def _left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _engine(self) -> EngineConfig:
        return EngineConfig(**self._engine_options("native"))

    def _engine_options(self, kind: str, dtype: str | None = None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "dtype": dtype or str(self.dtype).removeprefix("torch."),
            "max_model_len": _MAX_MODEL_LEN,
        }
        if kind != "vllm":
            options["device"] = str(self._device)
        if self._device.type == "cpu":
            options["kv_cache_bytes"] = _CPU_KV_BYTES
        return options

    def _run(
        self,
        what: str,
        kind: str,
        shape: Shape,
        folder: Path,
        rows: Sequence[Rows],
        *,
        num_repeats: int,
        dtype: str | None = None,
    ) -> EngineResult | None:
        """Run one engine in a process of its own; return the rows that it was done with.

        What ended it early is noted.
        """
        if not self.has_time(f"{what}, {kind}"):
            return None
        job = EngineJob(
            kind=kind,
            model=str(folder),
            rows=tuple(rows),
            vocab_size=shape.vocab_size,
            num_repeats=num_repeats,
            engine=self._engine_options(kind, dtype),
            options=_VLLM_ON_CPU if kind == "vllm" and self._device.type == "cpu" else {},
        )
        command = [sys.executable, "-m", "raybatch.bench.engine_run", job.to_json()]
        failure, is_late = "", False
        try:
            timeout_s = max(1.0, self._left_s())
            done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
            output = done.stdout
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                failure = (last or [f"exit code {done.returncode}"])[0]
        except subprocess.TimeoutExpired as error:
            output, is_late = error.stdout or b"", True
        result: EngineResult | None = None
        # a line that was cut off has no end
        for line in output.rpartition(b"\n")[0].splitlines()[-1:]:
            try:
                result = from_plain(EngineResult, json.loads(line), where="the result")
            except ValueError as error:
                failure = failure or f"gave no result ({error_text(error)})"
        missing = ", ".join(each.name for each in rows[len(result.runs) if result else 0 :])
        if missing and is_late:
            self.skipped.append(f"{what}, {kind}: {missing}")
        elif missing or failure:
            self.failures.append(f"{what}, {kind}: {failure or 'gave no result'}")
        return result
