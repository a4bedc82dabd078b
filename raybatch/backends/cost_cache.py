"""Cost models on disk: measured when a backend is first used on a kind of host, then read.

Whoever calls runs the backend in its own process; `raybatch.actors.executors.ray_measure` does it
where a replica would run.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from raybatch.backends.base import Backend
from raybatch.backends.calibrate import MIN_VOCAB_SIZE, limits_of, measure_backend
from raybatch.backends.registry import create_backend, type_of
from raybatch.config import BackendConfig, EngineConfig, cache_dir
from raybatch.engine.profile.cached_file import cpu_name, versions, write_cached
from raybatch.errors import MeasureError, error_text
from raybatch.models.source import plain_name, without_content
from raybatch.policy.cost.cost_model import CostModel, EngineLimits, fit

# beyond the start: the program takes about 10 s, and longer only for models that are very slow
MEASURE_S = 300.0
NO_SPEED_OF_ENDPOINTS = "the speed of an endpoint is not measured: every request may cost money"

_FOLDER = "cost-models"
# of the time by the clock that an engine on a quiet host spends computing
QUIET_SHARE = 0.85
_GPU_INFO = "driver/nvidia/gpus/*/information"

_logger = logging.getLogger(__name__)


def load_or_measure(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    folder: Path | None = None,
    clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
    create: Callable[..., Backend] = create_backend,
) -> CostModel:
    """Return the cost model of a backend on this host, measured if there is none yet.

    Measuring loads the model and takes about 10 s more; a message says so. Where an engine on a CPU
    got much less of it than the time by the clock, others were using it, and what was measured is
    used once and not kept. Raises MeasureError where the backend cannot be started or measured.
    """
    path = cost_model_path(
        model, backend, engine, num_engines_on_host=num_engines_on_host, folder=folder
    )
    if (cached := load_cost_model(path)) is not None:
        return cached
    _logger.info("measuring what a step of %s costs here; this happens once", model)
    began = clock()
    try:
        # a draft is one row more of a step, so that a cost of rows is all there is to know of them
        plain = replace(engine, speculative_tokens=None)
        running = create(model, backend, plain, num_engines_on_host=num_engines_on_host)
        loaded, cpu_before = clock(), cpu_clock()
        with closing(running):
            budget = engine.token_budget if type_of(backend).has_weights else None
            limits = limits_of(running, budget)
            steps = measure_backend(running, limits, clock=clock, vocab_size=_vocab_size(model))
        measured = replace(fit(steps, limits), start_s=loaded - began)
    except MeasureError:
        raise
    except Exception as error:
        raise MeasureError(f"{model} could not be measured: {error_text(error)}") from error
    took_s, cpu_s = clock() - loaded, cpu_clock() - cpu_before
    _logger.info(
        "measured in %.1f s after %.1f s of loading, with a fit error of %.0f %%",
        took_s,
        loaded - began,
        100 * measured.fit_error,
    )
    is_on_cpu = type_of(backend).has_weights and (engine.device == "cpu" or not _gpu_names())
    if not is_on_cpu or _was_quiet(took_s, cpu_s):
        write_cached(path, json.dumps(asdict(measured), indent=1), what="cost model")
    return measured


def _was_quiet(took_s: float, cpu_s: float) -> bool:
    """Return whether an engine had its CPU for itself while it was measured; warn if not."""
    if cpu_s >= QUIET_SHARE * took_s:
        return True
    _logger.warning(
        "the host is busy: the engine got %.0f %% of a CPU while it was measured; its times are "
        "too long, and are measured again next time",
        100 * cpu_s / took_s,
    )
    return False


def cost_model_path(
    model: str,
    backend: BackendConfig,
    engine: EngineConfig,
    *,
    num_engines_on_host: int = 1,
    folder: Path | None = None,
) -> Path:
    """Return the file of a cost model of this host; its name is a hash of all it depends on."""
    folder = cache_dir() / _FOLDER if folder is None else folder
    described = {
        "model": _model_identity(model),
        "backend": {"kind": backend.kind, "options": dict(backend.options)},
        "engine": asdict(replace(engine, speculative_tokens=None)),
        # engines share the memory of a host where nobody has said how much each gets
        "num_engines_on_host": num_engines_on_host if engine.kv_cache_bytes is None else None,
        "host": {"cpu": cpu_name(), "gpus": [] if engine.device == "cpu" else _gpu_names()},
        "versions": versions(type_of(backend).packages),
    }
    text = json.dumps(described, sort_keys=True, default=repr)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def load_cost_model(path: Path) -> CostModel | None:
    """Read a cost model; None if there is none, or a broken one, which is warned about."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        limits = EngineLimits(**fields.pop("limits"))
        for name in ("knots", "token_s"):
            fields[name] = tuple(float(value) for value in fields[name])
        return CostModel(limits=limits, **fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _logger.warning(
            "the cost model %s cannot be read and is measured again: %s", path, error_text(error)
        )
        return None


def _model_identity(model: str) -> str:
    """Return what two checkpoints of equal speed have in common, wherever they lie."""
    folder = Path(without_content(model)).expanduser()
    config = folder / "config.json"
    if not config.is_file():
        return plain_name(model)
    num_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{hashlib.sha256(config.read_bytes()).hexdigest()}-{num_bytes}"


def _vocab_size(model: str) -> int:
    """Return the size of a local model's vocabulary, else what every model has."""
    try:
        config = Path(without_content(model)).expanduser() / "config.json"
        fields = json.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return MIN_VOCAB_SIZE
    return int(fields.get("vocab_size", MIN_VOCAB_SIZE))


def _gpu_names() -> list[str]:
    names = []
    for path in sorted(Path("/proc").glob(_GPU_INFO)):
        lines = path.read_text(encoding="utf-8").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]
    return names
