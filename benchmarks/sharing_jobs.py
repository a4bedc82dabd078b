"""Simulates jobs of SiDP's evaluation on hosts with replicated or shared weights.

Assumptions are those of `simulated_sharing.py`, which prints and stores these results.
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from published_hosts import ALL, HOSTS, RESERVE_BYTES, UTILISATION, Host, bytes_of, costs_of, fitted

from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.memory_plan import MemoryPlan, copied_bytes, plan_memory
from raybatch_lab.sharing.shared_exchange import exchange_threshold
from raybatch_lab.sharing.shared_job import HostSpec, JobRun, run_job
from raybatch_lab.sharing.shared_weights import GroupLinks
from raybatch_lab.simulator import workloads
from raybatch_lab.simulator.rows import SimulatedRows

Row = dict[str, Any]
# seconds to begin a copy of weights, and a hop of rows with its control
COPY_S, HOP_S = 10e-6, 40e-6
LAYOUTS = ((4, 2), (2, 4), (1, 8))
# lengths of the paper, and a longer one
LENGTHS = (1024, 2048, 4096, 8192)
LLAMA, QWEN3 = "Llama-3.1-70B", "Qwen3-32B"
# deviation of the logarithms of lengths
SIGMA = 0.5


def links_of(host: Host, latency_s: float = COPY_S) -> GroupLinks:
    return GroupLinks(bytes_per_s=host.link_bytes_per_s, latency_s=latency_s)


def row_bytes(model: str) -> float:
    return 2.0 * ALL[model].model_dim


@cache
def plan_of(
    model: str,
    host: str,
    tp: int,
    size: int,
    utilisation: float = UTILISATION,
    reserve_bytes: int = RESERVE_BYTES,
) -> MemoryPlan:
    budget = HOSTS[host].budget(utilisation, reserve_bytes)
    return plan_memory(bytes_of(model), budget, tp=tp, size=size)


def rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 3)


def make_rows(length: int, num_rows: int, seed: int) -> SimulatedRows:
    rng = np.random.Generator(np.random.PCG64(seed))
    lengths = rng.lognormal(np.log(length / 2) - SIGMA**2 / 2, SIGMA, (2, num_rows))
    prompt, output = np.maximum(1, np.rint(lengths)).astype(np.int64)
    return SimulatedRows.of(prompt, output)


def job(
    model: str,
    host: Host,
    tp: int,
    size: int,
    way: str,
    rows: SimulatedRows,
    *,
    utilisation: float = UTILISATION,
) -> JobRun | None:
    """Return the run of a job, None if its replicas do not fit."""
    plan = plan_of(model, host.name, tp, size, utilisation)
    holding = plan.replicated if way == "replicated" else plan.shared
    if holding.kv_tokens < int((rows.prompt + rows.output).max()):
        return None
    tokens = int((rows.prompt + rows.output / 2).mean())
    costs = costs_of(model, host, tp=tp, cached_tokens=tokens)
    spec = HostSpec(
        sharing="replicated",
        num_ranks=size,
        costs=costs,
        kv_tokens=holding.kv_tokens,
        row_bytes=row_bytes(model),
    )
    if way == "replicated":
        return run_job(rows.prompt, rows.output, spec)
    own = Ownership(size=size, num_layers=costs.num_layers, by=holding.by)
    fetch_s = copied_bytes(bytes_of(model), tp=tp, size=size) / host.link_bytes_per_s
    hops = links_of(host, HOP_S)
    below = exchange_threshold(
        costs,
        own,
        fetch_s,
        row_bytes=row_bytes(model),
        links=hops,
        most=1024,
        max_exchange_rows=spec.max_exchange_rows,
    )
    return run_job(
        rows.prompt,
        rows.output,
        replace(
            spec, sharing=way, ownership=own, links=hops, fetch_s=fetch_s, threshold_rows=below
        ),
    )


def best(runs: dict[tuple[int, int], JobRun | None]) -> tuple[str, float]:
    rates = {f"TP={tp} DP={dp}": run.tokens_per_s for (tp, dp), run in runs.items() if run}
    return max(rates.items(), key=lambda pair: pair[1]) if rates else ("none", 0.0)


def _throughput(
    options: argparse.Namespace, hosts: tuple[str, ...], paper: dict[int, str], utilisation: float
) -> Iterator[Row]:
    for name, rates in itertools.product(hosts, ("assumed", "fitted")):
        host = HOSTS[name] if rates == "assumed" else fitted(HOSTS[name])
        for model, length in itertools.product(options.models, options.lengths):
            rows = make_rows(length, options.num_rows, options.seed)
            sides = {
                way: {
                    layout: job(model, host, *layout, way, rows, utilisation=utilisation)
                    for layout in LAYOUTS
                }
                for way in ("replicated", "both")
            }
            alone, group = best(sides["replicated"]), best(sides["both"])
            same = {
                f"TP={tp} DP={dp}": _ratio(run, sides["replicated"][tp, dp])
                for (tp, dp), run in sides["both"].items()
            }
            yield {
                "case": f"{name} {rates}, {model}, S={length}",
                "replicated": alone[0],
                "tokens_per_s": round(alone[1]),
                "group": group[0],
                "of_replicated": rounded(group[1] / alone[1] if alone[1] else None),
                "dp8": _ratio(sides["both"][1, 8], alone[1]),
                "of_same": same,
                "paper": paper.get(length),
            }


def _ratio(run: JobRun | None, other: JobRun | float | None) -> float | None:
    rate = other.tokens_per_s if isinstance(other, JobRun) else other
    return round(run.tokens_per_s / rate, 3) if run and rate else None


def throughput(options: argparse.Namespace) -> Iterator[Row]:
    paper = {1024: "closely matches", 4096: "1.3 to 1.5"}
    yield from _throughput(options, tuple(HOSTS), paper, UTILISATION)


def budget(options: argparse.Namespace) -> Iterator[Row]:
    lengths = dict.fromkeys(LENGTHS[:3], "1.24 to 1.51")
    large = argparse.Namespace(
        **{**vars(options), "models": [m for m in options.models if m != QWEN3]}
    )
    yield from _throughput(large, ("H200",), lengths, 0.6)


def switching(options: argparse.Namespace) -> Iterator[Row]:
    jobs = {"S=4096": make_rows(4096, options.num_rows, options.seed)}
    jobs["W4"] = workloads.make_rows("W4", num_rows=options.tail_rows, seed=options.seed)
    for host, rates in ((HOSTS["H20"], "assumed"), (fitted(HOSTS["H20"]), "fitted")):
        for (name, rows), model in itertools.product(jobs.items(), options.models):
            alone = best({some: job(model, host, *some, "replicated", rows) for some in LAYOUTS})
            for way in ("fetch", "both"):
                run = job(model, host, 1, 8, way, rows)
                if run is None:
                    continue
                paper = {"fetch": "1.07 to 1.09", "both": "1.27 to 1.32, 0.9 by fetch"}[way]
                yield {
                    "case": f"{name}, {rates}, {model} TP=1 DP=8, {way}",
                    "replicated": alone[0],
                    "of_replicated": _ratio(run, alone[1]),
                    "tail": round(run.tail_s / run.completion_s, 3),
                    "fetch_share": round(run.fetch_share, 3),
                    "switches": run.num_switches,
                    "mean_batch": round(run.mean_batch, 1),
                    "paper": paper if name != "W4" else None,
                }
