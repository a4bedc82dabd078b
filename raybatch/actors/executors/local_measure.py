"""Measures the cost model of the engines of a local pool in a separate process.

python -m raybatch.actors.executors.local_measure reads a pickled query from stdin and writes a
pickled answer to stdout.
"""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

from raybatch.actors.executors.local_pools import plan_local_placement
from raybatch.actors.executors.local_runtime import end_group, start_python
from raybatch.actors.replicas.runtime import obey_log_level, use_threads
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.cost_cache import (
    MEASURE_S,
    cost_model_path,
    load_cost_model,
    load_or_measure,
)
from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError, MeasureError
from raybatch.models.source import has_weights_here, is_local_model
from raybatch.policy.cost.cost_model import CostModel


def measure_local(spec: PoolSpec) -> CostModel:
    """Return the cost model of one engine of a local pool, cached or measured now.

    Raises:
        MeasureError: the engine fails to start, dies, or is too slow; with the reason.
    """
    num_engines = plan_local_placement(spec).num_replicas
    if (cached := cached_model(spec, num_engines)) is not None:
        return cached
    timeout_s = patience_s(spec)
    failure = f"{spec.model} was not measured"
    process = start_python(
        "raybatch.actors.executors.local_measure", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        answer, _ = process.communicate(pickle.dumps((spec, num_engines)), timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MeasureError(
            f"{failure}: starting and measuring an engine took longer than {timeout_s} s; raise "
            "pool.start_timeout_s"
        ) from error
    finally:
        code = end_group(process)
    if code:
        raise MeasureError(
            f"{failure}: the process that measures it exited with code {code}; its output above "
            "says why"
        )
    return model_in(pickle.loads(answer))


def cached_model(spec: PoolSpec, num_engines: int, folder: Path | None = None) -> CostModel | None:
    path = cost_model_path(
        spec.model, spec.backend, spec.engine, num_engines_on_host=num_engines, folder=folder
    )
    return load_cost_model(path)


def patience_s(spec: PoolSpec) -> float | None:
    """Return the timeout of a measurement: five minutes more than that of an engine start."""
    start_s = spec.pool.start_timeout_s
    return None if start_s is None else start_s + MEASURE_S


def model_or_reason(
    spec: PoolSpec, num_engines: int, folder: Path | None = None
) -> CostModel | str:
    """Return the cost model of an engine on this host, cached or measured, or why there is none.

    The reason is a text, since exceptions may not be picklable. Weights are not fetched for a
    measurement. `num_engines` is the number of engines that share the host.
    """
    try:
        if why_not := _why_not_measured(spec):
            return f"{spec.model} was not measured, {why_not}"
        return load_or_measure(
            spec.model, spec.backend, spec.engine, num_engines_on_host=num_engines, folder=folder
        )
    except (MeasureError, ConfigError) as error:
        return str(error)


def _why_not_measured(spec: PoolSpec) -> str:
    """Return why no engine is started to measure a model, "" if one is."""
    backend_type, model = type_of(spec.backend), spec.model
    is_read, is_here = backend_type.reads_safetensors(spec.backend), is_local_model(model)
    if not backend_type.has_weights or has_weights_here(model) or (is_here and not is_read):
        return ""
    if is_here:
        return f"as its folder has no weights on host {socket.gethostname()}"
    if not is_read:
        return "as with its load_format the engine loads the weights itself when a run starts"
    way_out = f"only a run fetches them; `raybatch fetch {model}` does it before"
    return f"as its weights are not on the host and {way_out}"


def model_in(answer: CostModel | str) -> CostModel:
    """Return the result of `model_or_reason`; raise MeasureError if it is a reason."""
    if isinstance(answer, str):
        raise MeasureError(answer)
    return answer


def _answer() -> None:
    # output of libraries must not mix with the answer
    answers = os.dup(1)
    os.dup2(2, 1)
    spec, num_engines = pickle.load(sys.stdin.buffer)
    use_threads(spec)
    obey_log_level()
    with os.fdopen(answers, "wb") as out:
        pickle.dump(model_or_reason(spec, num_engines), out)


if __name__ == "__main__":
    _answer()
