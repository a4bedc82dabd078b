"""Compares engine seconds that the cost model of an engine estimates with measured ones.

Run: OMP_NUM_THREADS=1 python benchmarks/cost_model.py [--models dense-4m,moe-8m] [--requests 64]
Each round measures the steps of a model, as for an explanation of a job, and then runs every
workload, with other prompts each time. Costs are fitted only to the steps of the run's own round,
as an explanation of a job does it, and never to runs. The error of a workload is the median over
its runs. `spread` is the relative range of a workload's measured runs, and `planned_spread` that of
their estimates. Prompts differ but counts hardly do, so both are noise of the host, and no estimate
can be more precise.

Workloads: `random` and `mixed` of the e2e suite; `shared` with one prefix group per document;
`tight`: like `random` with twice the output, in a KV cache of a quarter of what all rows need, so
that rows wait for memory and some are recomputed; and `crowded`: like `shared` with four times the
output, in a cache that one document fills by half.

`without` shows the value of each term of the model: the errors of the same runs without the term,
with the other costs fitted again. Without "own round" the costs are fitted to the steps of all
rounds. `contention.py` measures how engines on one host slow each other down.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import swap
from e2e import named_models
from peer_loop import PeerConfig, Settings
from peer_raybatch import engine_config
from suites import MIXED, RANDOM, SHARED
from venvs import WORK
from workloads_e2e import Workload, build, scaled

from raybatch.backends.base import Backend
from raybatch.backends.cost_cache import limits_of, measure_backend
from raybatch.backends.native import create
from raybatch.policy.cost.cost_model import EngineLimits, MeasuredStep, fit
from raybatch.policy.cost.estimate import estimate
from raybatch.policy.cost.step_forecast import forecast_steps
from raybatch.policy.cost.work import WorkTotals, work_totals
from raybatch.records.types import ReplicaStats, Request, Sampling

Clock = Callable[[], float]

# a busy machine distorts wall time, and CPU seconds less
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
TIGHT = replace(RANDOM, name="tight", output_len=2 * RANDOM.output_len)
CROWDED = replace(SHARED, name="crowded", output_len=4 * SHARED.output_len)
WORKLOADS = {w.name: w for w in (RANDOM, MIXED, SHARED, TIGHT, CROWDED)}
# terms of the model and the forecast that can be left out one by one
TERMS = ("blocks", "memory", "cached keys", "own round")
GOAL = 0.05
DEFAULT_MODELS = "dense-4m,dense-60m,moe-100m"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Requests of one run, and the totals of their work in a plan."""

    requests: list[Request]
    work: WorkTotals


def prepare(workload: Workload, seed: int, first_id: int) -> Prompts:
    """Make the requests of a workload, and the totals of their plan."""
    built = build(replace(workload, seed=seed))
    shared_len, num_members = workload.doc_len, workload.queries_per_doc
    documents: dict[tuple[int, ...], int] = {}
    requests, cached = [], []
    for i, request in enumerate(built):
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
        shared_tokens=np.full(len(built), shared_len),
        num_members=np.full(len(built), num_members),
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


def kv_tokens_of(workload: Workload) -> int | None:
    """Return the KV tokens of a workload that is short of memory, None for other workloads."""
    if workload.name == TIGHT.name:
        return workload.num_requests * (workload.prompt_len + workload.output_len) // 4
    return 2 * workload.doc_len if workload.name == CROWDED.name else None


def without(term: str, run: "Run", all_steps: Sequence[MeasuredStep]) -> float:
    """Estimate the engine seconds of a run, with a term left out."""
    limits, work, steps = run.limits, run.work, run.steps
    if term == "blocks":
        limits = replace(limits, block_size=1)
    elif term == "memory":
        limits = replace(limits, kv_tokens=1 << 40)
    elif term == "cached keys":
        # cached keys cost as much as those of the chunk itself
        steps = [replace(s, pairs=s.pairs + s.past_pairs, past_pairs=0.0) for s in steps]
        work = replace(work, pairs=work.pairs + work.past_pairs, past_pairs=0.0)
    elif term == "own round":
        steps = all_steps
    return estimate(fit(steps, limits), work).engine_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run of a workload: forecast and measurement."""

    workload: str
    limits: EngineLimits
    work: WorkTotals
    steps: Sequence[MeasuredStep]  # steps measured in the same round
    stats: ReplicaStats


def summarise(runs: Sequence[Run], steps: Sequence[MeasuredStep]) -> dict[str, Any]:
    """Compare the runs of one workload with their forecasts."""
    models = [fit(run.steps, run.limits) for run in runs]
    planned = [estimate(model, run.work) for model, run in zip(models, runs, strict=True)]
    engine_s = [run.stats.engine_s for run in runs]
    done = [
        run.work.actual(
            computed_tokens=run.stats.prompt_tokens - run.stats.cached_tokens,
            generated_tokens=run.stats.generated_tokens,
        )
        for run in runs
    ]
    actual = [estimate(m, work).engine_s for m, work in zip(models, done, strict=True)]
    middle = sorted(range(len(runs)), key=lambda i: engine_s[i])[len(runs) // 2]

    def error(seconds: Iterable[float]) -> float:
        return median_error(list(seconds), engine_s)

    last = planned[middle]
    _, low_s, high_s = last.engine_range()
    ahead = forecast_steps(runs[middle].work, runs[middle].limits)
    return {
        "workload": runs[0].workload,
        "rows": runs[0].work.num_rows,
        "engine_s": round(engine_s[middle], 3),
        "engine_s_runs": [round(seconds, 3) for seconds in engine_s],
        "planned_s": round(last.engine_s, 3),
        "spread": spread(engine_s),
        "planned_spread": spread([p.engine_s for p in planned]),
        "planned_error": error(p.engine_s for p in planned),
        "actual_error": error(actual),
        "is_in_band": low_s <= engine_s[middle] <= high_s,
        "without": {term: error(without(term, run, steps) for run in runs) for term in TERMS},
        "steps": runs[middle].stats.num_steps,
        "planned_steps": round(ahead.num_steps),
        "recomputed_tokens": runs[middle].stats.num_recomputed_tokens,
        "planned_recomputed_tokens": round(ahead.recomputed_tokens),
    }


def median_error(expected: Sequence[float], measured: Sequence[float]) -> float:
    """Return the median relative error of the forecasts."""
    pairs = zip(expected, measured, strict=True)
    return round(statistics.median(e / m for e, m in pairs) - 1, 3)


def spread(seconds: Sequence[float]) -> float:
    """Return the longest over the shortest time, minus 1."""
    return round(max(seconds) / min(seconds) - 1, 3)


def load(folder: Path, settings: Settings) -> Backend:
    config = engine_config(PeerConfig(model=str(folder), variant="engine", settings=settings))
    backend = create(str(folder), config)
    swap.take_pages(backend)
    return backend


def validate(
    name: str, folder: Path, workloads: Sequence[Workload], rounds: int, clock: Clock
) -> dict[str, Any]:
    """Measure one model and run all workloads, in turn; return errors by workload."""
    settings = Settings()
    roomy, small = load(folder, settings), dict[str, Backend]()
    limits, steps, fit_errors = limits_of(roomy, settings.max_batched_tokens), [], []
    runs: dict[str, list[Run]] = {workload.name: [] for workload in workloads}
    began, before = time.perf_counter(), time.process_time()
    for number in range(rounds):
        measured = measure_backend(roomy, limits, clock=clock, seed=number)
        steps += measured
        fit_errors.append(round(fit(measured, limits).fit_error, 3))
        for place, workload in enumerate(workloads):
            kv_tokens = kv_tokens_of(workload)
            if kv_tokens is not None and workload.name not in small:
                small[workload.name] = load(folder, replace(settings, kv_tokens=kv_tokens))
            backend = small.get(workload.name, roomy)
            seed = number * len(workloads) + place
            prompts = prepare(workload, seed, first_id=(seed + 1) << 32)
            stats = run(backend, prompts.requests, clock)
            known = limits_of(backend, settings.max_batched_tokens)
            runs[workload.name].append(
                Run(
                    workload=workload.name,
                    limits=known,
                    work=prompts.work,
                    steps=measured,
                    stats=stats,
                )
            )
    cpu_share = (time.process_time() - before) / (time.perf_counter() - began)
    results = [summarise(of_workload, steps) for of_workload in runs.values()]
    for row in results:
        print_row(name, row)
    return {
        "model": name,
        "cpu_share": round(cpu_share, 2),  # share of one core that the engine got
        "measured_steps": len(steps),
        "fit_errors": fit_errors,
        "cost_model": asdict(fit(steps, limits)),
        "runs": results,
    }


def score(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many runs are within 5 %, and the worst error; with all terms and without each."""
    rows = [row for result in results for row in result["runs"]]
    errors = {"all": [row["planned_error"] for row in rows]}
    errors |= {f"without {term}": [row["without"][term] for row in rows] for term in TERMS}
    return {
        name: {
            "within_5_percent": sum(abs(error) <= GOAL for error in found),
            "runs": len(found),
            "worst": max(found, key=abs),
        }
        for name, found in errors.items()
    }


def print_row(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:10} {row['workload']:8} {row['rows']:4} rows  engine {row['engine_s']:8.2f} s  "
        f"planned {row['planned_s']:8.2f} s ({row['planned_error']:+.1%})  "
        f"spread {row['spread']:.0%}/{row['planned_spread']:.0%}  "
        f"actual {row['actual_error']:+.1%}  steps {row['planned_steps']}/{row['steps']}  "
        f"again {row['planned_recomputed_tokens']}/{row['recomputed_tokens']}",
        flush=True,
    )


def checkpoints(value: str) -> Iterator[tuple[str, Path]]:
    """Yield names and folders of the models; those that do not exist yet are made."""
    names, folders = named_models(value)
    for name in names:
        if name == "demo":
            raise SystemExit("--models: this benchmark does not run the demo model")
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
    parser.add_argument("--requests", type=int, help="number of requests of every workload")
    parser.add_argument("--rounds", type=int, default=3)
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
        validate(name, folder, workloads, args.rounds, clock)
        for name, folder in checkpoints(args.models)
    ]
    scores = score(results)
    for term, found in scores.items():
        within, worst = f"{found['within_5_percent']} of {found['runs']}", found["worst"]
        print(f"{term:26} {within:>8} runs within 5 %, worst {worst:+.1%}")
    conditions.write_result(args.out, "cost_model.py", scores=scores, results=results)


if __name__ == "__main__":
    main()
