"""Compares raybatch with its peers on prompts that share prefixes, with little KV memory.

python benchmarks/prefix.py                      the published tables, about 17 minutes
python benchmarks/prefix.py --suite full         every workload, KV size, order and peer; hours
python benchmarks/prefix.py --workloads W2 --kv 50 --peers raybatch-plan,vllm-eager --orders sorted

The same command continues an interrupted run. README.md explains the columns.
"""

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import conditions
import prefix_tables
import venvs
from bench_run import Bench, sized_to_vocabulary
from e2e import add_run_options, named_models, names, publish, run_all
from models import SHAPES
from peer_loop import Settings
from prefix_orders import PROMPT_ORDERS, kv_tokens_for, sharing
from prefix_sides import SIDES, VLLM_BLOCK_SIZE
from prefix_suites import SUITES, WORKLOADS, Trial, chosen
from prefix_summary import summarize
from runlog import RunLog
from suites import Part
from summary import failures, refusals

# each trial sets the fields that are 0
SETTINGS = Settings(kv_tokens=0, max_model_len=0, max_batched_tokens=0, block_size=16)
PER_TRIAL = {
    "kv_tokens": "by workload, see the tables",
    "max_model_len": "longest request of the workload",
    "max_batched_tokens": "2048, for W2 256",
    "block_size_of_vllm": VLLM_BLOCK_SIZE,
}


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare peers on prompts that share prefixes.")
    parser.add_argument("--suite", choices=sorted(SUITES), default="default")
    parser.add_argument("--peers", help=f"comma separated, of {', '.join(SIDES)}")
    parser.add_argument("--orders", help=f"comma separated, of {', '.join(PROMPT_ORDERS)}")
    parser.add_argument("--kv", help="comma separated: KV in percent of the prefixes, such as 25")
    parser.add_argument("--workloads", help=f"comma separated, of {', '.join(WORKLOADS)}")
    parser.add_argument("--models", help=f"comma separated, of {', '.join(SHAPES)}, or folders")
    parser.add_argument("--repetitions", type=int, help="default: the suite's")
    parser.add_argument("--block-size", type=int, default=16, help="raybatch's, in tokens")
    add_run_options(parser)
    return parser.parse_args(arguments)


def percents(value: str | None) -> list[int]:
    """Read --kv."""
    parts = [part for part in (value or "").split(",") if part]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise SystemExit(f"--kv takes whole percentages above 0, such as 25,150; got {value!r}")
    return [int(part) for part in parts]


def run_trial(bench: Bench, trial: Trial) -> None:
    """Run the missing measurements of one trial, and log how much its prompts share."""
    part = Part(
        model=trial.model, engine=(trial.workload,), job=(trial.workload,), pool=(trial.workload,)
    )
    part = sized_to_vocabulary(part, bench.model_folder(trial.model))
    (workload,) = part.engine
    shared = sharing(workload, bench.settings.block_size)
    kv_tokens = kv_tokens_for(shared, trial.kv_percent / 100)
    key = (trial.model, workload.name, f"kv{trial.kv_percent}")
    if not bench.log.find("facts", *key):
        bench.log.add("facts", *key, {"kv_tokens": kv_tokens, **dataclasses.asdict(shared)})
    settings = dataclasses.replace(
        bench.settings,
        kv_tokens=kv_tokens,
        max_batched_tokens=trial.max_batched_tokens,
        # vLLM needs a cache that holds a request of `max_model_len` tokens
        max_model_len=shared.longest,
    )
    peers = tuple(contestant.peer(trial.kv_percent) for contestant in trial.contestants)
    dataclasses.replace(
        bench, peers=peers, settings=settings, num_repetitions=trial.repetitions
    ).run(part)


def main(arguments: Sequence[str]) -> int:
    """Run missing measurements, print tables, write results; 1 if a speed is refused or missing."""
    args = parse_args(arguments)
    models, given_models = named_models(args.models)
    trials = chosen(
        args.suite,
        models=models,
        workloads=names(args.workloads, list(WORKLOADS), "--workloads"),
        kv_percents=percents(args.kv),
        sides=names(args.peers, list(SIDES), "--peers"),
        orders=names(args.orders, PROMPT_ORDERS, "--orders"),
        repetitions=args.repetitions,
    )
    described = conditions.gather(venvs.ROOT, arguments, script="prefix.py")
    folder = venvs.WORK / "runs" / (args.run or f"prefix-{args.suite}-{described['commit']}")
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    settings = dataclasses.replace(SETTINGS, block_size=args.block_size)
    identity = dataclasses.asdict(settings) | {"suite": args.suite, "commit": described["commit"]}
    try:
        given_venvs = venvs.parse_given(args.venv)
        log = RunLog(folder / "results.jsonl", identity)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(
        peers=(),
        settings=settings,
        num_repetitions=0,
        given_venvs=given_venvs,
        given_models=given_models,
        folder=folder,
        log=log,
        quiet_wait_s=args.quiet_wait_s,
    )
    is_cut = not run_all(trials, partial(run_trial, bench))
    described |= {"settings": identity | PER_TRIAL, "versions": versions(log)}
    report(log, described, args)
    if is_cut:
        return 2
    return 1 if refusals(log) or failures(log) else 0


def report(log: RunLog, described: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables and write the result files."""
    rows, refused = summarize(log), refusals(log)
    text = prefix_tables.render(rows, refused, failures(log))
    print(text)
    if args.no_results:
        return
    suite = "" if args.suite == "default" else f"-{args.suite}"
    name = f"{described['date'][:10]}-prefix{suite}-{conditions.label(described)}"
    publish(name, text, rows, refused, described, log)


def versions(log: RunLog) -> dict[str, str]:
    """Return the versions that the peers reported, by environment."""
    found: dict[str, dict[str, str]] = {}
    for record in log:
        side = record["peer"].partition("/")[0].partition("-kv")[0]
        if record.get("versions") and side in SIDES:
            found.setdefault(SIDES[side].venv, {}).update(record["versions"])
    return {
        venv: " ".join(f"{name} {version}" for name, version in packages.items())
        for venv, packages in found.items()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
