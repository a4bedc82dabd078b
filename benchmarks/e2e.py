"""Compares raybatch with its peers end to end: same model, prompts and lengths, greedy, float32.

python benchmarks/e2e.py                        the quick suite
python benchmarks/e2e.py --suite full           the suite of the published tables
python benchmarks/e2e.py --peers raybatch,vllm-eager --models dense-4m --workloads random

The same command continues an interrupted run. README.md explains the columns.
"""

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import conditions
import tables
import venvs
from bench_run import Bench
from models import SHAPES
from peer_loop import Settings
from runlog import RunLog
from suites import DEFAULT_PEERS, PEERS, SUITES, WORKLOADS, parts
from summary import Cell, failures, refusals, summarize

_T = TypeVar("_T")

RESULTS = venvs.ROOT / "benchmarks" / "results"


def parse_args(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare raybatch with its peers.")
    parser.add_argument("--suite", choices=sorted(SUITES), default="quick")
    parser.add_argument("--peers", help=f"comma separated, of {', '.join(PEERS)}")
    parser.add_argument(
        "--models", help=f"comma separated, of {', '.join(SHAPES)}, demo, or checkpoint folders"
    )
    parser.add_argument("--workloads", help=f"comma separated, of {', '.join(WORKLOADS)}")
    parser.add_argument("--requests", type=int, help="requests of every workload")
    parser.add_argument("--repetitions", type=int, default=3)
    add_run_options(parser)
    return parser.parse_args(arguments)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that set where and how a benchmark runs, not what it measures."""
    parser.add_argument("--venv", action="append", default=[], help="NAME=FOLDER: use this venv")
    parser.add_argument("--quiet-wait-s", type=float, default=30.0)
    parser.add_argument("--run", help="name of the run to begin or continue")
    parser.add_argument("--fresh", action="store_true", help="delete an earlier run of this name")
    parser.add_argument("--no-results", action="store_true", help="print only, write no files")


def names(value: str | None, known: Sequence[str], option: str) -> list[str]:
    """Split a comma separated option; unknown names end the program with the known ones."""
    chosen = [name for name in (value or "").split(",") if name]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"{option}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return chosen


def named_models(value: str | None) -> tuple[list[str], dict[str, Path]]:
    """Split --models into names, and the folders of those that are folders.

    A folder is named by the last part of its path, so that results hold no paths of the machine.
    """
    models, folders = [], {}
    for model in filter(None, (value or "").split(",")):
        folder = Path(model).absolute()
        if model not in (*SHAPES, "demo"):
            if not (folder / "config.json").exists():
                raise SystemExit(
                    f"--models: {model} is neither a checkpoint folder nor one of "
                    f"{', '.join(SHAPES)}, demo"
                )
            model = folder.name
            folders[model] = folder
        models.append(model)
    return models, folders


def main(arguments: Sequence[str]) -> int:
    """Run missing measurements, print tables, write results; 1 if a speed is refused or missing."""
    args = parse_args(arguments)
    peers = names(args.peers, list(PEERS), "--peers") or list(DEFAULT_PEERS[args.suite])
    workloads = names(args.workloads, list(WORKLOADS), "--workloads")
    models, given_models = named_models(args.models)
    facts = conditions.gather(venvs.ROOT, arguments)
    folder = venvs.WORK / "runs" / (args.run or f"{args.suite}-{facts['commit']}")
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    settings = Settings()
    identity = dataclasses.asdict(settings) | {"suite": args.suite, "requests": args.requests}
    try:
        given_venvs = venvs.parse_given(args.venv)
        log = RunLog(folder / "results.jsonl", identity | {"commit": facts["commit"]})
    except ValueError as error:
        raise SystemExit(str(error)) from None
    bench = Bench(
        peers=tuple(PEERS[name] for name in peers),
        settings=settings,
        num_repetitions=args.repetitions,
        given_venvs=given_venvs,
        given_models=given_models,
        folder=folder,
        log=log,
        quiet_wait_s=args.quiet_wait_s,
    )
    is_cut = not run_all(parts(args.suite, models, workloads, args.requests), bench.run)
    report(log, facts | {"settings": identity} | {"versions": versions(log)}, args)
    if is_cut:
        return 2
    return 1 if refusals(log) or failures(log) else 0


def run_all(todo: Iterable[_T], run: Callable[[_T], None]) -> bool:
    """Run parts of a benchmark one after another; return False if the user interrupts it."""
    try:
        for part in todo:
            run(part)
    except KeyboardInterrupt:
        print("interrupted; run the same command to resume from here", file=sys.stderr)
        return False
    return True


def publish(
    name: str,
    text: str,
    rows: Sequence[tables.HasRows],
    refused: Mapping[Cell, str],
    facts: dict[str, Any],
    log: RunLog,
) -> None:
    """Write the result files of a benchmark and print their paths."""
    paths = tables.write_results(
        RESULTS, name, tables=text, rows=rows, refused=refused, conditions=facts, records=list(log)
    )
    for path in paths:
        print(f"written: {path.relative_to(venvs.ROOT)}")


def report(log: RunLog, facts: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables and write the result files."""
    rows, refused = summarize(log), refusals(log)
    text = tables.render(rows, refused, failures(log))
    print(text)
    if args.no_results:
        return
    name = f"{facts['date'][:10]}-e2e-{args.suite}-{conditions.label(facts)}"
    publish(name, text, rows, refused, facts, log)


def versions(log: RunLog) -> dict[str, str]:
    """Return the versions that each peer reported."""
    return {
        record["peer"]: " ".join(f"{name} {v}" for name, v in record["versions"].items())
        for record in log
        if record.get("versions")
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
