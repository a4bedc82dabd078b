"""Compares simulated groups that share feed-forward weights with figures of SiDP.

Run: python benchmarks/simulated_sharing.py --out FOLDER

Plans, ownership and the choice of modes are those of raybatch, passes and links are on a virtual
clock, and `published_hosts.py` computes the times of modules from data sheets. The paper's numbers
are those in its text; for a figure without numbers in the text, the table has only ours.

capacity    figure 5: KV tokens on H20, with 0.9 of the memory and 6 GB of that in reserve (assumed;
            `reserves` has 4 to 8). `aim` is our reading of the figure
saturation  section 3.1: the gain of larger batches, Qwen3-32B over 8 replicas on H20
copies      figure 9: a pass over reading all feed-forward weights, Llama-3.1-70B at TP=2, S=1K
slots       stalls by slots, order and ownership, ranks out of step, on H20
shifting    figure 10: passes in order compared with shifted ones. `in step` begins passes together
modes       figure 11: one pass or exchange by batch, Llama-3.1-70B on H20, TP=2, DP=2
tail        figure 14: one row of that setting, over a pass of a replica. `apart` sends rows and
            multiplies each rank's rows separately, between the paper's second and third step
throughput  figures 6, 7, 8: tokens/s of a job, over the best of TP=4 DP=2, TP=2 DP=4 and TP=1 DP=8
            with all weights; `dp8` is the group of 8 of the paper, `group` the best group,
            `of_same` is over replicas of the same layout. `assumed` computes modules by a roofline,
            `fitted` takes the paper's passes (see `published_hosts.py`)
budget      figure 12: the same on H200 with 0.6 of the memory
experts     mixtures of experts, whose shards are experts: KV, and passes and exchanges by shard on
            H20
switching   figures 13 and 15: the group of 8 on H20 with and without exchanges, over the best
            replicas; and W4, in which few rows are long. As in engines, the mode changes at the
            batch where exchanges take as long as copies

Rows of a job have prompts and outputs of half of S each, log-normal with a deviation of 0.5.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import conditions
from published_hosts import HOSTS, MODELS, Host, bytes_of, costs_of, fitted
from sharing_jobs import (
    HOP_S,
    LAYOUTS,
    LENGTHS,
    LLAMA,
    QWEN3,
    Row,
    budget,
    links_of,
    plan_of,
    rounded,
    row_bytes,
    switching,
    throughput,
)

from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.memory_plan import copied_bytes, saturation_rows
from raybatch_lab.sharing.shared_exchange import ExchangeRules, simulate_exchange
from raybatch_lab.sharing.shared_weights import GroupRun, SharedGroup, simulate_group
from raybatch_lab.simulator.gathered import gathered_pass_s

AIMS = {(QWEN3, 4, 2): 1.06, (LLAMA, 2, 4): 1.76, ("Qwen2.5-72B", 2, 4): 1.81}


def capacity(_: argparse.Namespace) -> Iterator[Row]:
    reported = {(QWEN3, 4, 2): 1.05, (LLAMA, 2, 4): 1.7, ("Qwen2.5-72B", 2, 4): 1.7}
    for model in MODELS:
        for tp, size in LAYOUTS:
            plan = plan_of(model, "H20", tp, size)
            ratios = [
                plan_of(model, "H20", tp, size, reserve_bytes=gb * 10**9).kv_ratio
                for gb in (4, 6, 8)
            ]
            yield {
                "case": f"{model} TP={tp} DP={size}",
                "replicated": plan.replicated.kv_tokens * size,
                "shared": plan.shared.kv_tokens * size,
                "by": plan.shared.by,
                "slots_gb": round(plan.shared.slot_bytes / 1e9, 2),
                "ratio": rounded(plan.kv_ratio),
                "reserves": [rounded(ratio) for ratio in ratios],
                "paper": reported.get((model, tp, size)),
                "aim": AIMS.get((model, tp, size)),
                "paper_tokens": 1_000_000 if plan.kv_ratio is None else None,
            }


def saturation(_: argparse.Namespace) -> Iterator[Row]:
    for tp, size in ((1, 8), (2, 4), (8, 1)):
        costs = costs_of(QWEN3, HOSTS["H20"], tp=tp, cached_tokens=1024)
        rates = {total: total / costs.pass_s(total // size) for total in (64, 1024, 1536)}
        yield {
            "case": f"{QWEN3} TP={tp} DP={size}",
            "B_e": round(size * (saturation_rows(costs.curve()) or 0)),
            "64 to 1024": round(rates[1024] / rates[64], 2),
            "1024 to 1536": round(rates[1536] / rates[1024], 2),
            "paper_B_e": {8: 1024, 1: 256}.get(size),
            "paper": (4.0, 1.06) if size == 8 else None,
        }


def copies(_: argparse.Namespace) -> Iterator[Row]:
    paper = {
        ("H20", 128): "above 1",
        ("H20", 256): "3 to 5",
        ("H20", 512): "3 to 5",
        ("H200", 256): "slightly above 1",
        ("H200", 512): "1.8",
        ("B200", 256): "about 1",
    }
    for name, host, rates in (
        *((name, host, "assumed") for name, host in HOSTS.items()),
        *((name, fitted(host), "fitted") for name, host in HOSTS.items()),
    ):
        costs = costs_of(LLAMA, host, tp=2, cached_tokens=1024)
        all_s = sum(bytes_of(LLAMA).ffn_bytes) / 2 / host.link_bytes_per_s
        of_four = copied_bytes(bytes_of(LLAMA), tp=2, size=4) / host.link_bytes_per_s
        curve = costs.curve(2048)
        for rows in (64, 128, 256, 512):
            yield {
                "case": f"{name} {rates}, {rows} rows",
                "pass_ms": round(1e3 * costs.pass_s(rows), 1),
                "copies_ms": round(1e3 * all_s, 1),
                "of_copies": round(costs.pass_s(rows) / all_s, 2),
                "paper": paper.get((name, rows)),
                "B_th": curve.hiding_rows(all_s),
                "B_th_of_4": curve.hiding_rows(of_four),
                "paper_B_th": {"H20": 128, "H200": 256, "B200": 256}[name],
            }


def _group(
    model: str,
    host: Host,
    ownership: Ownership,
    tp: int,
    rows: int,
    **more: Any,  # noqa: ANN401 - of many types
) -> GroupRun:
    """Return the run of a group whose ranks have `rows` rows each."""
    given = {"num_slots": ownership.default_slots, "links": links_of(host), "num_passes": 8, **more}
    group = SharedGroup(
        ownership=ownership,
        layer_bytes=bytes_of(model).ffn_bytes[0] / tp,
        rows=(rows,) * ownership.size,
        **given,
    )
    return simulate_group(costs_of(model, host, tp=tp, cached_tokens=1024), group)


def slots(options: argparse.Namespace) -> Iterator[Row]:
    host = HOSTS["H20"]
    for model, tp, size in ((LLAMA, 2, 2), (LLAMA, 2, 4), (QWEN3, 1, 8)):
        num_layers = MODELS[model].num_layers
        copied = copied_bytes(bytes_of(model), tp=tp, size=size) / host.link_bytes_per_s
        for rows in options.slot_batches:
            plain_s = costs_of(model, host, tp=tp, cached_tokens=1024).pass_s(rows)
            for by in ("layer", "shard"):
                for order in ("shifted", "in_order"):
                    ownership = Ownership(size=size, num_layers=num_layers, by=by, order=order)
                    for num in range(1, 2 * size + 1):
                        if num < ownership.least_slots:
                            continue
                        run = _group(
                            model,
                            host,
                            ownership,
                            tp,
                            rows,
                            num_slots=num,
                            num_passes=options.passes,
                        )
                        yield {
                            "case": f"{model} TP={tp} DP={size}, {rows} rows, by {by}, {order}",
                            "slots": num,
                            "is_default": num == ownership.default_slots,
                            "copies_of_pass": round(copied / plain_s, 2),
                            "stall": round(run.stall_share, 4),
                            "waits": round(run.num_waits, 1),
                            "of_replicated": round(run.pass_s / plain_s, 3),
                            "readers": round(run.readers, 2),
                            "most_readers": run.most_readers,
                        }


def shifting(options: argparse.Namespace) -> Iterator[Row]:
    host = HOSTS["H20"]
    for tp, size, paper in ((2, 4, 2.5), (1, 4, 2.5), (1, 8, 3.4)):
        for by in ("layer", "shard"):
            for rows in options.batches:
                pass_s = {}
                for order in ("shifted", "in_order"):
                    own = Ownership(size=size, num_layers=64, by=by, order=order)
                    for in_step in (False, True):
                        run = _group(
                            QWEN3, host, own, tp, rows, in_step=in_step, num_passes=options.passes
                        )
                        first = max(ended[0] for ended in run.ended_s)
                        pass_s[order, in_step] = run.pass_s
                        pass_s[order, "first"] = first
                yield {
                    "case": f"{QWEN3} TP={tp} DP={size}, {rows} rows, by {by}",
                    "shifted_ms": round(1e3 * pass_s["shifted", False], 1),
                    **{
                        name: round(pass_s["in_order", key] / pass_s["shifted", key], 2)
                        for name, key in (("free", False), ("in step", True), ("first", "first"))
                    },
                    "paper": paper,
                }


def modes(_: argparse.Namespace) -> Iterator[Row]:
    host, tp, size = HOSTS["H20"], 2, 2
    costs = costs_of(LLAMA, host, tp=tp, cached_tokens=1024)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        seconds = {"replicated": costs.pass_s(rows)}
        for by in ("layer", "shard"):
            own = Ownership(size=size, num_layers=80, by=by)
            hops = links_of(host, HOP_S)
            rounds = simulate_exchange(
                costs, own, (rows,) * size, row_bytes=row_bytes(LLAMA), links=hops
            )
            seconds[f"fetch by {by}"] = _group(LLAMA, host, own, tp, rows).pass_s
            seconds[f"exchange by {by}"] = rounds.seconds
        found = {name: round(1e3 * each, 1) for name, each in seconds.items()}
        paper = None
        if rows in (1, 128):
            paper = "exchange 1.12 of vLLM" if rows == 1 else "fetch as vLLM, exchange above"
        elif rows <= 32:
            paper = "exchange below fetch"
        yield {"case": f"{rows} rows, ms", **found, "paper": paper}


def tail(_: argparse.Namespace) -> Iterator[Row]:
    host, tp = HOSTS["H20"], 2
    costs = costs_of(LLAMA, host, tp=tp, cached_tokens=1024)
    # seconds in the paper; vLLM's follow from `CaS` V3 being 12 % above it
    paper = {"all-gather": 33, "copies": 25, "fused": 19, "skipped": 12, "replicated": 12 / 1.12}
    padded = ExchangeRules(skips_dummies=False)
    steps = {"apart": replace(padded, is_fused=False), "fused": padded, "skipped": ExchangeRules()}
    for size in (2, 4):
        for by in ("layer", "shard"):
            own, rows = Ownership(size=size, num_layers=80, by=by), (1,) + (0,) * (size - 1)
            layer_bytes, hops = bytes_of(LLAMA).ffn_bytes[0] / tp, links_of(host, HOP_S)
            seconds = {
                "all-gather": gathered_pass_s(
                    costs, own, rows, layer_bytes=layer_bytes, links=links_of(host)
                ),
                "copies": _group(LLAMA, host, own, tp, 1).pass_s,
            }
            for name, rules in steps.items():
                found = simulate_exchange(
                    costs, own, rows, row_bytes=row_bytes(LLAMA), links=hops, rules=rules
                )
                seconds[name] = found.seconds
            seconds["replicated"] = costs.pass_s(1)
            for name, each in seconds.items():
                is_paper = size == 2 and by == "layer" and name in paper
                yield {
                    "case": f"DP={size} by {by}, {name}",
                    "pass_ms": round(1e3 * each, 1),
                    "of_replicated": round(each / seconds["replicated"], 2),
                    "of_skipped": round(each / seconds["skipped"], 2),
                    "paper_s": round(paper[name], 1) if is_paper else None,
                    "paper": round(paper[name] / paper["replicated"], 2) if is_paper else None,
                }


def experts(_: argparse.Namespace) -> Iterator[Row]:
    host = HOSTS["H20"]
    for model, tp, size in (("Qwen3-30B-A3B", 1, 8), ("Qwen3-235B-A22B", 4, 2)):
        plan = plan_of(model, "H20", tp, size)
        costs = costs_of(model, host, tp=tp, cached_tokens=1024)
        own = Ownership(size=size, num_layers=costs.num_layers, by="shard")
        copied = copied_bytes(bytes_of(model), tp=tp, size=size) / host.link_bytes_per_s
        for rows in (1, 16, 128, 512, 2048):
            rounds = simulate_exchange(
                costs, own, (rows,) * size, row_bytes=row_bytes(model), links=links_of(host, HOP_S)
            )
            yield {
                "case": f"{model} TP={tp} DP={size}, {rows} rows",
                "ratio": rounded(plan.kv_ratio),
                "copies_ms": round(1e3 * copied, 1),
                "replicated_ms": round(1e3 * costs.pass_s(rows), 1),
                "was_ms": round(1e3 * _group(model, host, own, tp, rows).pass_s, 1),
                "cas_ms": round(1e3 * rounds.seconds, 1),
            }


TABLES = {
    each.__name__: each
    for each in (
        capacity,
        saturation,
        copies,
        slots,
        shifting,
        modes,
        tail,
        throughput,
        budget,
        experts,
        switching,
    )
}


def entries_of(options: argparse.Namespace) -> Iterator[Row]:
    for table in options.tables:
        for entry in TABLES[table](options):
            yield {"table": table, **entry}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=[*TABLES])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--lengths", type=int, nargs="+", default=[*LENGTHS])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--slot-batches", type=int, nargs="+", default=[160, 256])
    parser.add_argument("--passes", type=int, default=12, help="for `slots` and `shifting`")
    parser.add_argument("--num-rows", type=int, default=3000, help="rows of a job")
    parser.add_argument("--tail-rows", type=int, default=20_000, help="rows of W4")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, entries = time.process_time(), list[Row]()
    for table, found in groupby(entries_of(options), lambda entry: entry["table"]):
        print(f"\n{table}; simulated")
        for entry in found:
            entries.append(entry)
            cells = {name: value for name, value in entry.items() if value is not None}
            words = ", ".join(
                f"{name} {cells[name]}" for name in cells if name not in ("table", "case")
            )
            print(f"{entry['case']}: {words}", flush=True)
    seconds = round(time.process_time() - began, 1)
    print(f"\n{seconds} CPU seconds")
    conditions.write_result(
        options.out,
        "simulated_sharing.py",
        is_simulated=True,
        assumptions=__doc__,
        hosts=[asdict(some) for host in HOSTS.values() for some in (host, fitted(host))],
        cpu_s=seconds,
        entries=entries,
    )


if __name__ == "__main__":
    main()
