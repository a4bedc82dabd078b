"""How well the cost model of an engine predicts runs: estimated against measured engine seconds.

Run: OMP_NUM_THREADS=1 python benchmarks/cost_model.py [--models dense-4m,moe-8m] [--requests 64]
Each model is measured once, as for an explanation of a job; then every workload runs on the same
engine, some times with other prompts. "planned" estimates from what is known before a run,
"actual" from the counters after it; errors are against the median run.

Workloads: `random` and `mixed` of the e2e suite, `shared` with one prefix group per document, and
`tight`: like `random` with twice the output, in a KV cache of a quarter of what all rows need, so
that rows wait for memory and some are computed again.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
from e2e import named_models
from peer_loop import PeerConfig, Settings
from peer_raybatch import engine_config
from suites import MIXED, RANDOM, SHARED
from venvs import WORK
from workloads_e2e import Workload, build, scaled

from raybatch.backends.base import Backend
from raybatch.backends.calibrate import limits_of, measure_backend
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig
from raybatch.policy.cost.cost_model import CostModel, fit
from raybatch.policy.cost.estimate import estimate
from raybatch.policy.cost.work import WorkTotals, work_totals
from raybatch.records.types import ReplicaStats, Request, Sampling

Clock = Callable[[], float]

# a busy machine spoils the wall clock, and CPU seconds less
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
TIGHT = replace(RANDOM, name="tight", output_len=2 * RANDOM.output_len)
WORKLOADS = {w.name: w for w in (RANDOM, MIXED, SHARED, TIGHT)}
DEFAULT_MODELS = "dense-4m,dense-60m,moe-100m"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Requests of one run, and what a plan knows about them."""

    requests: list[Request]
    work: WorkTotals


def prepare(workload: Workload, seed: int, first_id: int) -> Prompts:
    """Make the requests of a workload, and the totals of their plan."""
    asked = build(replace(workload, seed=seed))
    shared_len, num_members = workload.doc_len, workload.queries_per_doc
    documents: dict[tuple[int, ...], int] = {}
    requests, cached = [], []
    for i, request in enumerate(asked):
        document = request.prompt_ids[:shared_len]
        cached.append(shared_len if document in documents else 0)
        group = documents.setdefault(document, first_id + len(documents))
        requests.append(
            Request(
                request_id=first_id + i,
                row_id=str(i),
                prompt_token_ids=np.asarray(request.prompt_ids, np.int32),
                sampling=Sampling(max_tokens=request.output_len, ignore_eos=True),
                group_id=group if shared_len else None,
                prefix_len=shared_len,
            )
        )
    work = work_totals(
        np.array([len(r.prompt_token_ids) for r in requests]),
        np.array([r.sampling.max_tokens for r in requests]),
        cached_tokens=np.array(cached) if shared_len else None,
        shared_tokens=np.full(len(asked), shared_len),
        num_members=np.full(len(asked), num_members),
    )
    return Prompts(requests=requests, work=work)


def run(backend: Backend, requests: Sequence[Request], clock: Clock) -> ReplicaStats:
    """Run the requests; return the counters of this run alone, its seconds by `clock`."""
    before = backend.stats()
    backend.submit(requests)
    began = clock()
    while backend.num_unfinished():
        for completion in backend.poll():
            if completion.error:
                raise RuntimeError(f"row {completion.request_id}: {completion.error}")
    spent = clock() - began
    after = backend.stats()
    counters = ("prompt_tokens", "cached_tokens", "num_recomputed_tokens")
    counters = (*counters, "generated_tokens", "num_steps", "num_preemptions")
    counts = {n: getattr(after, n) - getattr(before, n) for n in counters}
    seconds = after.engine_s - before.engine_s if clock is CLOCKS["wall"] else spent
    return replace(after, **counts, engine_s=seconds)


def compare(
    model: CostModel, backend: Backend, workload: Workload, runs: int, clock: Clock
) -> dict[str, Any]:
    """Run a workload `runs` times; return estimates and measurements."""
    measured = []
    for seed in range(runs):
        prompts = prepare(workload, seed, first_id=(seed + 1) << 32)
        measured.append(run(backend, prompts.requests, clock))
    stats = sorted(measured, key=lambda s: s.engine_s)[len(measured) // 2]
    work = prompts.work
    planned = estimate(model, work)
    engine_s = statistics.median(s.engine_s for s in measured)
    done = work.actual(
        computed_tokens=stats.prompt_tokens - stats.cached_tokens,
        generated_tokens=stats.generated_tokens,
    )
    return {
        "workload": workload.name,
        "rows": workload.num_requests,
        "engine_s": round(engine_s, 3),
        "engine_s_runs": [round(s.engine_s, 3) for s in measured],
        "planned_s": round(planned.engine_s.expected, 3),
        "planned_error": round(planned.engine_s.expected / engine_s - 1, 3),
        "actual_s": round(estimate(model, done).engine_s.expected, 3),
        "is_in_band": planned.engine_s.low <= engine_s <= planned.engine_s.high,
        "steps": stats.num_steps,
        "planned_steps": round(planned.num_steps),
        "recomputed_tokens": stats.num_recomputed_tokens,
        "planned_recomputed_tokens": round(planned.recomputed_tokens),
        "parts_s": {
            "prefill": round(planned.prefill_s, 3),
            "decode": round(planned.decode_s, 3),
            "overhead": round(planned.overhead_s, 3),
        },
    }


def load(folder: Path, settings: Settings) -> Backend:
    config = engine_config(PeerConfig(model=str(folder), variant="engine", settings=settings))
    return create_backend(str(folder), BackendConfig(kind="native"), config)


def measure(backend: Backend, settings: Settings, clock: Clock) -> tuple[CostModel, float, int]:
    """Return the cost model, the seconds that it took to measure, and the number of steps."""
    limits = limits_of(backend, settings.max_batched_tokens)
    began = time.perf_counter()
    steps = measure_backend(backend, limits, clock=clock)
    return fit(steps, limits), time.perf_counter() - began, len(steps)


def validate(
    name: str, folder: Path, workloads: Sequence[Workload], runs: int, clock: Clock
) -> dict[str, Any]:
    """Measure one model and compare it over all workloads."""
    settings = Settings()
    backend = load(folder, settings)
    model, took_s, num_steps = measure(backend, settings, clock)
    results = []
    for workload in workloads:
        if workload.name == TIGHT.name:
            backend.close()
            need = workload.num_requests * (workload.prompt_len + workload.output_len)
            tight = replace(settings, kv_tokens=need // 4)
            backend = load(folder, tight)
            model = replace(model, limits=limits_of(backend, tight.max_batched_tokens))
        results.append(compare(model, backend, workload, runs, clock))
        print_row(name, results[-1])
    backend.close()
    return {
        "model": name,
        "measuring_s": round(took_s, 2),
        "measured_steps": num_steps,
        "cost_model": asdict(model),
        "runs": results,
    }


def print_row(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:10} {row['workload']:8} {row['rows']:4} rows  engine {row['engine_s']:8.2f} s  "
        f"planned {row['planned_s']:8.2f} s ({row['planned_error']:+.1%})  "
        f"actual {row['actual_s']:8.2f} s  steps {row['planned_steps']}/{row['steps']}  "
        f"again {row['planned_recomputed_tokens']}/{row['recomputed_tokens']}",
        flush=True,
    )


def checkpoints(value: str) -> Iterator[tuple[str, Path]]:
    """Yield names and folders of the models; those that do not exist yet are made."""
    names, folders = named_models(value)
    for name in names:
        if name == "demo":
            raise SystemExit("--models: the demo model is not one of this benchmark")
        folder = folders.get(name, WORK / "models" / name)
        if not (folder / "tokenizer.json").exists():
            models.write(name, folder)
        yield name, folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models",
        default=DEFAULT_MODELS,
        help=f"comma separated, of {', '.join(models.SHAPES)}, or checkpoint folders",
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--requests", type=int, help="another size for every workload")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    args = parser.parse_args()
    unknown = set(args.workloads.split(",")) - set(WORKLOADS)
    if unknown:
        parser.error(f"--workloads: unknown {', '.join(sorted(unknown))}")
    workloads = [WORKLOADS[name] for name in WORKLOADS if name in args.workloads.split(",")]
    if args.requests:
        workloads = [scaled(workload, args.requests) for workload in workloads]
    clock = CLOCKS[args.clock]
    results = [
        validate(name, folder, workloads, args.runs, clock)
        for name, folder in checkpoints(args.models)
    ]
    conditions.write_result(args.out, "cost_model.py", results=results)


if __name__ == "__main__":
    main()
