"""`raybatch bench gpu`: checks ops, compares layers with device limits, and engines."""

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from raybatch.backends.registry import type_of
from raybatch.bench.checkpoints import ON_CPU, ON_GPU, Shape, write_checkpoint
from raybatch.bench.engine_run import EngineJob, EngineResult, Rows, RowsRun
from raybatch.bench.machine import Limits, Machine, machine_of, measure_limits
from raybatch.config import BackendConfig, EngineConfig, from_plain
from raybatch.engine.forward.ops_choice import OpCheck, check_ops, pick_ops
from raybatch.engine.loading.loaded_model import LoadedModel, load_model
from raybatch.engine.profile.module_profile import profile_layer, profile_options
from raybatch.errors import ConfigError, error_text
from raybatch.kernels.dispatch import ops_for
from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import count, full, percent
from raybatch.policy.cost.layers import Workload

_KINDS = {
    "decode over 512": Workload(cached_tokens=511),
    "decode over 4,096": Workload(cached_tokens=4095),
    "prefill of 512": Workload(tokens_per_sequence=512),
}
_MAX_KV_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
# rows of a small float32 model, for which engines give equal tokens
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
_ON_A_CPU = "rates of a CPU, whose caches hold such small models: shares may exceed 100 %"
# compiling takes minutes on a CPU
_VLLM_ON_CPU = {"engine_kwargs": {"enforce_eager": True}}
ENGINES = ("native", "vllm")
_NUM_REPEATS = 3
_MAX_MODEL_LEN = 8192
_CPU_KV_BYTES = 256 << 20
# time for the layers of one model: share of the remaining seconds, and limit
_LAYERS_SHARE, _MAX_LAYERS_S = 0.1, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Time of one module at one batch size; `share` is its roofline time divided by its time."""

    module: str
    tokens: int
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFigures:
    """Checks of the ops of one model, and times of its layers."""

    ops: tuple[OpCheck, ...]
    times: tuple[LayerTime, ...]
    # modules and sizes skipped for lack of time or memory
    not_timed: tuple[str, ...] = ()


def measure_layers(
    folder: Path, engine: EngineConfig, limits: Limits, *, budget_s: float
) -> LayerFigures:
    """Compare the ops of a model with their references, and time its modules within `budget_s`.

    Raises ConfigError: the model or an option is not supported.
    """
    model = load_model(str(folder), engine)
    block_size = engine.block_size_tokens
    if model.device.type == "cuda":
        form = ops_for(model.device)
    else:
        form = pick_ops(model.spec, model.weights, block_size=block_size, may_compile=True)
    ops = check_ops(
        form, model.spec, model.weights, block_size=block_size, kv_dtype=model.resolved.kv_dtype
    )
    times, not_timed = _times(model, engine, limits, budget_s)
    return LayerFigures(ops=tuple(ops), times=times, not_timed=not_timed)


def _times(
    model: LoadedModel, engine: EngineConfig, limits: Limits, budget_s: float
) -> tuple[tuple[LayerTime, ...], tuple[str, ...]]:
    """Time attention with its linears, and the feed-forward block; also return skipped sizes."""
    is_gpu = model.device.type == "cuda"
    sizes = (1, 16, 64, 256, 1024) if is_gpu else (1, 16, 64)
    options = replace(
        profile_options(engine),
        workloads=tuple(_KINDS.values()),
        attention_tokens=sizes,
        ffn_tokens=(*sizes, 4096) if is_gpu else sizes,
        budget_s=budget_s,
        max_kv_bytes=_MAX_KV_BYTES[model.device.type],
    )
    profile = profile_layer(model.spec, model.weights, options)
    layer = profile.model.layer
    names = {
        (n, layer.attention_work(n, kind)): name for name, kind in _KINDS.items() for n in sizes
    }
    attention = (
        (f"attention, {names[point.tokens, point.work]}", point) for point in profile.attention
    )
    blocks = "experts" if layer.num_experts > 1 else "feed-forward"
    requested = {f"attention, {name}": sizes for name in _KINDS} | {blocks: options.ffn_tokens}
    order = list(requested)
    times = tuple(
        LayerTime(
            module=module,
            tokens=point.tokens,
            seconds=point.seconds,
            share=limits.least_s(point.work) / point.seconds,
        )
        for module, point in sorted(
            [*attention, *((blocks, point) for point in profile.ffn)],
            key=lambda timed: (order.index(timed[0]), timed[1].tokens),
        )
    )
    done = {(each.module, each.tokens) for each in times}
    missing = {
        module: [n for n in ns if (module, n) not in done] for module, ns in requested.items()
    }
    not_timed = (f"{m} of {', '.join(map(str, ns))} tokens" for m, ns in missing.items() if ns)
    return times, tuple(not_timed)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTokens:
    """How many float32 rows have equal tokens from the native engine and from transformers."""

    equal_rows: int
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFigures:
    """Results for one model; `layers` is None if that failed or was skipped."""

    name: str
    num_parameters: int
    layers: LayerFigures | None
    engines: tuple[EngineResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """Results of all measurements within the time limit.

    `checked` is None if that failed or was skipped; see `failures` and `skipped`.
    """

    machine: Machine
    minutes: float
    limits: Limits
    checked: CheckedTokens | None
    models: tuple[ModelFigures, ...]
    failures: tuple[str, ...]
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @property
    def is_right(self) -> bool:
        """Whether nothing failed and all compared tokens equal those of transformers.

        Parts skipped for lack of time are not failures.
        """
        checked = self.checked
        return not self.failures and (checked is None or checked.equal_rows == checked.num_rows)

    def to_text(self) -> str:
        machine, checked = self.machine, self.checked
        memory = "" if machine.memory_gib is None else f", {machine.memory_gib:g} GiB"
        threads = "" if machine.num_threads is None else f", {count(machine.num_threads, 'thread')}"
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        tokens = (
            "not compared, see below"
            if checked is None
            else f"equal for {checked.equal_rows} of {checked.num_rows} rows"
        )
        facts = (
            ("device", f"{machine.device} ({machine.capability}{memory}{threads})"),
            ("versions", versions + (f", CUDA {machine.cuda}" if machine.cuda else "")),
            (
                f"best rates, {self.limits.dtype}",
                f"{self.limits.operations_per_s / 1e12:.3g} TFLOP/s, "
                f"{self.limits.bytes_per_s / 1e9:,.0f} GB/s",
            ),
            ("tokens against transformers", tokens),
        )
        sections = [Section(title="", facts=facts)]
        for model in self.models:
            sections += _sections(model)
        notes = (
            *(f"FAILED: {text}" for text in self.failures),
            *(f"skipped, --minutes {self.minutes:g} reached: {text}" for text in self.skipped),
            *self.notes,
        )
        sections.append(Section(title="", notes=notes))
        return to_text("raybatch bench gpu", sections)


def _sections(model: ModelFigures) -> list[Section]:
    name = f"{model.name} ({model.num_parameters / 1e6:,.0f}M parameters)"
    layers = Table(
        header=("module", "tokens", "time, ms", "of the best"),
        rows=tuple(
            (each.module, full(each.tokens), f"{1e3 * each.seconds:.3g}", percent(each.share, 0))
            for each in (model.layers.times if model.layers else ())
        ),
    )
    ops = () if model.layers is None else model.layers.ops
    agreeing = ", ".join(f"{op.name} {op.error:.1g}" for op in ops if op.agrees)
    kinds = [f"{engine.kind}, s (tokens/s)" for engine in model.engines]
    both = ["equal rows"] * (len(kinds) > 1)
    engines = Table(
        header=("rows", "number", "tokens in + out", *kinds, *both),
        rows=tuple(
            (*_facts(some), *map(_cell, some), *[_equal(some)] * len(both))
            for some in zip_longest(*(engine.runs for engine in model.engines))
        ),
    )
    facts = (
        ("model", name),
        ("ops agree with torch within", agreeing or ("none" if ops else "not compared")),
    )
    sections = [Section(title="", facts=facts)]
    if layers.rows:
        sections.append(Section(title="", table=layers))
    if engines.rows:
        sections.append(Section(title="", table=engines))
    return sections


def _facts(some: Sequence[RowsRun | None]) -> tuple[str, str, str]:
    run = next(run for run in some if run is not None)
    tokens = (run.prompt_tokens // run.num_rows, run.output_tokens // run.num_rows)
    return run.name, full(run.num_rows), " + ".join(map(full, tokens))


def _cell(run: RowsRun | None) -> str:
    if run is None:
        return "no time"
    seconds = statistics.median(run.seconds)
    return f"{seconds:.3g} ({full((run.prompt_tokens + run.output_tokens) / seconds)})"


def _equal(some: Sequence[RowsRun | None]) -> str:
    """Return how many compared rows have equal tokens from all engines."""
    if None in some:
        return ""
    rows = list(zip(*(run.token_ids for run in some if run), strict=True))
    return f"{sum(len(set(tokens)) == 1 for tokens in rows)} of {len(rows)}"


def bench_gpu(
    *,
    device: str = "auto",
    minutes: float = 10.0,
    engines: Sequence[str] = ENGINES,
    tell: Callable[[str], None] = lambda _: None,
    keep: Callable[[BenchReport], object] = lambda _: None,
    shapes: Mapping[str, Shape] | None = None,
    rows: Sequence[Rows] | None = None,
) -> BenchReport:
    """Measure a device within a time limit; failures and skipped parts are in the report.

    Args:
        device: torch device name, or "auto" for a GPU if there is one.
        engines: kinds of backends to time.
        tell: called with the name of each part before it runs.
        keep: called with the results so far, after each model and each engine.
        shapes: sizes of the models to generate, by name; None for the defaults of the device.
        rows: rows for engines; None for the defaults of the device.

    Raises:
        ConfigError: there is no such device or engine.
    """
    measured = _device_of(device)
    is_gpu = measured.type == "cuda"
    shapes = shapes or (ON_GPU if is_gpu else ON_CPU)
    bench = _Bench(
        device=measured,
        dtype=torch.bfloat16 if is_gpu else torch.float32,
        end=time.monotonic() + 60 * minutes,
        tell=tell,
    )
    kinds = bench.engines_of(engines)
    tell("rates of the device")
    limits = measure_limits(measured, bench.dtype)
    machine = machine_of(measured)
    models: list[ModelFigures] = []

    def report(*more: ModelFigures) -> BenchReport:
        return BenchReport(
            machine=machine,
            minutes=minutes,
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
            for figures in bench.measure(name, shape, path, limits, kinds, rows or ()):
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
                f"--device {name}: torch sees {count} GPUs here; use --device cpu to run on the CPU"
            )
    return device


class _Bench:
    """Runs the parts of a measurement; records failures and skipped parts, and continues."""

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, end: float, tell: Callable[[str], None]
    ) -> None:
        self.dtype = dtype
        self.missing: list[str] = []
        self.failures: list[str] = []
        self.skipped: list[str] = []
        self._device, self._end, self._tell = device, end, tell

    def engines_of(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of the named engines that are installed; record the others as missing."""
        for name in names:
            if name not in ENGINES:
                raise ConfigError(f"--engines must be among {', '.join(ENGINES)}, got {name!r}")
        here = tuple(n for n in names if find_spec(type_of(BackendConfig(kind=n)).package))
        for name in set(names) - set(here):
            self.missing.append(f"{name} is not installed and was not measured")
        return here

    def has_time(self, part: str) -> bool:
        """Return whether time is left for a part; if not, record it as skipped."""
        has_time = self._left_s() > 0
        if not has_time:
            self.skipped.append(part)
        return has_time

    def check_tokens(self, folder: Path) -> CheckedTokens | None:
        """Compare the tokens of the native engine with those of transformers, in float32."""
        self._tell("tokens against transformers")
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
        """Time layers and engines of one model; yield its results so far after each measurement."""
        self._tell(f"weights of {name}")
        num_parameters = write_checkpoint(shape, folder, dtype=self.dtype, device=str(self._device))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        layers: LayerFigures | None = None
        if self.has_time(f"{name}, layers"):
            self._tell(f"layers of {name}")
            budget_s = min(_MAX_LAYERS_S, _LAYERS_SHARE * self._left_s())
            engine = EngineConfig(**self._engine_options("native"))
            try:
                layers = measure_layers(folder, engine, limits, budget_s=budget_s)
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
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
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
        """Run one engine in a separate process; return the results so far.

        Records why it ended early.
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
        # drop a truncated last line
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
