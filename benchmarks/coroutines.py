"""Measures the gain if experts get more rows than the device has KV for, and the engine's choice.

python benchmarks/coroutines.py                              # moe-100m, KV for 8 rows, 512 rows
python benchmarks/coroutines.py --models moe-8m dense-60m --device-rows 4 8 16 64 --rows 256
python benchmarks/coroutines.py --preset grid --fresh --out result.json # 36 settings, 1/2 hour
python benchmarks/coroutines.py --preset held-out --out result.json  # 6 other shapes, 8 minutes
python benchmarks/coroutines.py --preset ablation --out result.json  # rows at the experts
python benchmarks/coroutines.py --preset grid --estimate             # how long it would take
python benchmarks/coroutines.py --show result.json           # tables, and a picture next to it
python benchmarks/coroutines.py --h100                       # no run: forecasts for an H100

The native engine runs on one thread with KV memory for some rows on the device, in these execution
modes: preemption by recompute, by swap, and KV in host memory (`kv_offload`). The bound is a device
with memory for all rows. Modes take turns, tokens are checked row by row, and seconds are CPU
seconds of the engine's steps. Each mode is compared with its forecast by `choose_engine`. Regret is
the extra time of the chosen mode over the best measured one. The file is written after every
setting, so an interrupted run continues. `--vllm PYTHON` adds vLLM with the same KV memory.
`--fresh` measures layers again, because stored costs do not fit a host that has become busier.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import conditions
import coroutine_report
import coroutine_vllm
import gpu_forecast
import meters
import models
import swap
import torch
from coroutine_settings import (
    BLOCK_SIZE,
    PRESETS,
    WAYS,
    WORKLOADS,
    Setting,
    known,
    kv_bytes,
    settings_of,
)
from pydantic import TypeAdapter
from workloads_e2e import Workload, row_digest

from raybatch.backends.native import create
from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.profile.module_profile import measured_profile, profile_options
from raybatch.engine.step import StepForward
from raybatch.models.config import read_model_spec
from raybatch.policy.choose_engine import EngineChoice, EngineInputs, choose_engine
from raybatch.policy.cost.layers import ModelShape, ModuleCosts, RowsAhead, RowShape
from raybatch.records.types import Request, Sampling

_BUDGET = 2048
# largest share of rows whose tokens may differ because of rounding
_MAX_OTHER = 0.02
CONFIG = EngineConfig(
    dtype="float32",
    device="cpu",
    block_size_tokens=BLOCK_SIZE,
    max_batched_tokens=_BUDGET,
    speculative_tokens=0,
)


def options_of(way: str, short: int, need: int) -> dict[str, Any]:
    on_device = {"host_kv_bytes": 0, "kv_offload": False}
    return {
        "recompute": {"kv_cache_bytes": short, **on_device},
        "swap": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": False},
        "offload": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": True},
        "ample": {"kv_cache_bytes": need, **on_device},
        "auto": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": "auto"},
    }[way]


def forecast(
    model: ModelShape,
    costs: ModuleCosts,
    workload: Workload,
    requests: Sequence[Request],
    options: Mapping[str, Any],
) -> EngineChoice:
    """Return the forecast choice of an engine with these options.

    Prompt lengths are the tokens that are left to compute after sharing.
    """
    members = workload.queries_per_doc
    shared = workload.doc_len * (1 - 1 / members)
    outputs = [request.sampling.max_tokens for request in requests]
    lengths = [len(request.prompt_token_ids) for request in requests]
    prompt = statistics.mean(lengths) - shared
    return choose_engine(
        EngineInputs(
            model=model,
            costs=costs,
            device_kv_bytes=options["kv_cache_bytes"],
            host_kv_bytes=options["host_kv_bytes"],
            max_num_seqs=options.get("max_num_seqs", CONFIG.max_num_seqs),
            token_budgets=(_BUDGET,),
            block_size=BLOCK_SIZE,
            rows=RowsAhead(
                shape=RowShape(
                    prompt_tokens=round(prompt),
                    output_tokens=max(1, round(statistics.mean(outputs))),
                ),
                num_rows=len(requests),
                output_lengths=tuple(map(float, outputs)),
                longest_tokens=max(p + o for p, o in zip(lengths, outputs, strict=True)),
                shared_tokens=shared,
                group_rows=members,
            ),
            kv_offload=None if options["kv_offload"] == "auto" else options["kv_offload"],
        )
    )


class ForeignLoad:
    """Context manager that measures how many cores other processes kept busy."""

    def __enter__(self) -> "ForeignLoad":
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, foreign_s = (b - a for a, b in zip(self._before, self._now(), strict=True))
        self.cores = round(max(0.0, foreign_s) / max(wall_s, 1e-9), 2)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), meters.machine_cpu_s() - time.process_time()


@contextlib.contextmanager
def counted_steps() -> Iterator[list[tuple[int, int]]]:
    """Yield a list that gets the decoding rows and the prompt tokens of each step."""
    steps: list[tuple[int, int]] = []
    run = StepForward.run

    def counting(self: StepForward, schedule: Any, *args: Any) -> Any:  # noqa: ANN401
        steps.append((len(schedule.decode_slots), int(schedule.chunk_lens.sum())))
        return run(self, schedule, *args)

    StepForward.run = counting  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        StepForward.run = run  # type: ignore[method-assign]


def expert_rows(steps: Sequence[tuple[int, int]], num_experts: int, top_k: int) -> dict[str, float]:
    """Return tokens for each expert that a step reaches, on average over steps that decode alone
    and over all steps.

    All experts are assumed equally likely: T tokens reach E * (1 - (1 - K / E)^T) of E experts.
    """

    def mean(counts: Sequence[int]) -> float:
        reached = sum(num_experts * (1 - (1 - top_k / num_experts) ** count) for count in counts)
        return round(top_k * sum(counts) / reached, 1) if reached else 0.0

    decoding = [rows for rows, prompt in steps if rows and not prompt]
    return {
        "tokens_per_expert_decode": mean(decoding),
        "tokens_per_expert": mean([rows + prompt for rows, prompt in steps if rows + prompt]),
    }


def measure(
    folder: Path, requests: Sequence[Request], ways: Mapping[str, dict[str, Any]], repetitions: int
) -> tuple[dict[str, list[dict[str, Any]]], list[Any]]:
    """Run all modes in turn; exit if more than a few rows have different tokens.

    KV that is recomputed in chunks of other sizes is rounded differently. If two tokens are almost
    equally likely, the engine may then generate the other one. Such rows are counted.
    """
    spec = read_model_spec(folder)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    expected: list[Any] = []
    for repetition in range(repetitions):
        order = list(ways) if repetition % 2 == 0 else list(ways)[::-1]
        for way in order:
            backend = create(str(folder), dataclasses.replace(CONFIG, **ways[way]))
            swap.take_pages(backend)
            swap.run(backend, [dataclasses.replace(requests[0], sampling=Sampling(max_tokens=4))])
            with counted_steps() as steps, ForeignLoad() as foreign:
                result, tokens = swap.run(backend, requests)
            backend.close()
            expected = expected or tokens
            num_other = sum(a != b for a, b in zip(tokens, expected, strict=True))
            if num_other > _MAX_OTHER * len(tokens):
                raise SystemExit(f"{num_other} of {len(tokens)} rows of {way!r} differ in tokens")
            generated = result["generated_tokens"]
            measured = {
                "cpu_s": round(result["cpu_s"], 3),
                "tokens_per_cpu_s": round(generated / result["cpu_s"]),
                "foreign_cores": foreign.cores,
                "num_steps": result["num_steps"],
                "num_recomputed_tokens": result["num_recomputed_tokens"],
                "mean_running": result["mean_running"],
                "moved_bytes_per_token": round(result["swapped_bytes"] / generated),
                "num_other_rows": num_other,
            }
            if spec.moe is not None:
                measured |= expert_rows(steps, spec.moe.num_experts, spec.moe.top_k)
            found[way].append(measured)
            print(way, json.dumps(measured), flush=True)
    return found, expected


def forecasts(
    setting: Setting, requests: Sequence[Request], model: ModelShape, costs: ModuleCosts
) -> tuple[dict[str, dict[str, Any]], dict[str, float], EngineChoice]:
    """Return the options of each mode, its forecast seconds, and the choice among modes."""
    token_bytes = model.layer.kv_bytes_per_token * model.num_layers
    short, need = kv_bytes(requests, setting.device_rows, token_bytes, model.num_layers)
    bound = {} if setting.max_num_seqs is None else {"max_num_seqs": setting.max_num_seqs}
    ways = {way: options_of(way, short, need) | bound for way in setting.ways}
    workload = setting.resolved()

    def ask(options: Mapping[str, Any]) -> EngineChoice:
        return forecast(model, costs, workload, requests, options)

    seconds = {way: ask(options).best.seconds for way, options in ways.items()}
    return ways, seconds, ask(options_of("auto", short, need) | bound)


def forecast_again(result: dict[str, Any]) -> dict[str, Any]:
    """Return measured results with forecasts of the current code, from the costs of that run."""
    for one in result["settings"]:
        fields = one["setting"] | {"ways": tuple(one["setting"]["ways"])}
        setting = Setting(**fields)
        model = TypeAdapter(ModelShape).validate_python(one["model"])
        costs = TypeAdapter(ModuleCosts).validate_python(one["costs"])
        requests = swap.requests_of(setting.resolved())
        _, expected_s, choice = forecasts(setting, requests, model, costs)
        one["forecast_s"] = {way: round(s, 3) for way, s in expected_s.items()}
        one["choice"] = dataclasses.asdict(choice)
        is_host = choice.best.kv_offload
        one |= coroutine_report.judge(one["median_cpu_s"], expected_s, is_host=is_host)
    return result


class Bench:
    """Measures settings of one checkpoint; holds the costs of its layers on this host."""

    def __init__(self, folder: Path, *, fresh: bool) -> None:
        self.folder = folder
        loaded = load_model(str(folder), CONFIG)
        options = profile_options(CONFIG)
        self.profile, _ = measured_profile(loaded.spec, loaded.weights, options, fresh=fresh)
        self.token_bytes = kv_bytes_per_token(loaded.spec, torch.float32)
        self.num_layers = loaded.spec.num_layers

    def forecasts(
        self, setting: Setting, requests: Sequence[Request]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, float], EngineChoice]:
        """Return the options of each mode, its forecast seconds, and the choice among modes."""
        return forecasts(setting, requests, self.profile.model, self.profile.costs())

    def run(self, setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
        """Measure one setting."""
        requests = swap.requests_of(setting.resolved())
        ways, expected_s, choice = self.forecasts(setting, requests)
        print(f"{setting.name}: {choice.reason}", flush=True)
        found, tokens = measure(self.folder, requests, ways, args.repetitions)
        seconds = {way: statistics.median(r["cpu_s"] for r in runs) for way, runs in found.items()}
        result = {
            "key": setting.key,
            "setting": dataclasses.asdict(setting),
            "workload": dataclasses.asdict(setting.resolved()),
            # the bytes of the longest row, if it needs more than the rows of the setting
            "device_kv_bytes": min(options["kv_cache_bytes"] for options in ways.values()),
            "generated_tokens": sum(len(row) for row in tokens),
            "runs": found,
            "median_cpu_s": seconds,
            "forecast_s": {way: round(s, 3) for way, s in expected_s.items()},
            "choice": dataclasses.asdict(choice),
            "model": dataclasses.asdict(self.profile.model),
            "costs": dataclasses.asdict(self.profile.costs()),
            **coroutine_report.judge(seconds, expected_s, is_host=choice.best.kv_offload),
        }
        if args.vllm is not None:
            result["vllm"] = coroutine_vllm.measure(
                args.vllm,
                self.folder,
                setting.resolved(),
                kv_tokens=result["device_kv_bytes"] // self.token_bytes,
                repetitions=args.repetitions,
                expected=[row_digest(row) for row in tokens],
            )
        kept = ("median_cpu_s", "forecast_s", "regret", "completion_error", "ratio_error", "vllm")
        print(json.dumps({key: result[key] for key in kept if key in result}), flush=True)
        return result


def chosen_settings(args: argparse.Namespace) -> list[Setting]:
    """Return the settings of the command line; settings of one model are adjacent."""
    if args.preset is not None:
        settings = settings_of(args.preset)
        if args.ways:
            settings = [dataclasses.replace(one, ways=tuple(args.ways)) for one in settings]
        return settings
    plain = [
        Setting(
            model=model,
            workload=args.workload,
            rows=args.rows,
            device_rows=device_rows,
            ways=tuple(args.ways or WAYS),
        )
        for model in args.models
        for device_rows in args.device_rows
    ]
    gates = [
        dataclasses.replace(setting, ways=("offload",), max_num_seqs=gate)
        for setting in plain
        for gate in args.gates
    ]
    return sorted([*plain, *gates], key=lambda setting: args.models.index(setting.model))


def benchmarks_of(settings: Sequence[Setting], *, fresh: bool) -> Iterator[tuple[Setting, Bench]]:
    """Yield each setting with its model, which is written and measured once."""
    for model in dict.fromkeys(setting.model for setting in settings):
        with tempfile.TemporaryDirectory() as folder:
            models.write(model, Path(folder))
            bench = Bench(Path(folder), fresh=fresh)
            yield from ((setting, bench) for setting in settings if setting.model == model)


def estimate(settings: Sequence[Setting], repetitions: int) -> None:
    """Print the forecast seconds of the steps of all settings."""
    total = 0.0
    for setting, bench in benchmarks_of(settings, fresh=False):
        _, seconds, _ = bench.forecasts(setting, swap.requests_of(setting.resolved()))
        total += repetitions * sum(seconds.values())
        shown = ", ".join(f"{way} {s:.1f}" for way, s in seconds.items())
        print(f"{setting.name}: {shown} s; {total / 60:.1f} minutes so far", flush=True)


def run_all(settings: Sequence[Setting], args: argparse.Namespace) -> dict[str, Any]:
    """Measure settings and write each result; settings that the file has are not repeated."""
    described = conditions.gather(
        Path(__file__).parent.parent, sys.argv[1:], script="coroutines.py"
    )
    done: dict[str, Any] = {}
    if args.out is not None and args.out.exists():
        done = known(json.loads(args.out.read_text(encoding="utf-8")), described)
    left = [setting for setting in settings if setting.key not in done]
    for setting, bench in benchmarks_of(left, fresh=args.fresh):
        done[setting.key] = bench.run(setting, args)
        if args.out is not None:
            part = args.out.with_suffix(".part")
            conditions.write_result(part, "coroutines.py", settings=list(done.values()))
            os.replace(part, args.out)
    return {"conditions": described, "settings": list(done.values())}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, help="a named list of settings")
    parser.add_argument("--estimate", action="store_true", help="forecast the time; no run")
    parser.add_argument("--show", type=Path, help="print the tables of a file; no run")
    parser.add_argument("--again", action="store_true", help="with --show: new forecasts")
    parser.add_argument("--h100", action="store_true", help="forecast for an H100; no run")
    parser.add_argument("--models", nargs="+", choices=sorted(models.SHAPES), default=["moe-100m"])
    parser.add_argument("--device-rows", nargs="+", type=float, default=[8])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="random")
    parser.add_argument("--rows", type=int, help="rows of the workload; default: its own")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all, or the preset's")
    parser.add_argument("--gates", nargs="*", type=int, default=[], help="rows at the experts")
    parser.add_argument("--repetitions", type=int, help="1 for a preset, else 3")
    parser.add_argument("--fresh", action="store_true", help="measure layers again, for each model")
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM, measured as well")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.repetitions is None:
        args.repetitions = 3 if args.preset is None else 1
    return args


def main() -> None:
    """Print and write the measurements."""
    args = read_arguments()
    if args.h100:
        gpu_forecast.show()
        return
    if args.show is not None:
        result = json.loads(args.show.read_text(encoding="utf-8"))
        if args.again:
            coroutine_report.show(forecast_again(result)["settings"])
            return
        coroutine_report.show(result["settings"])
        coroutine_report.draw(result["settings"], args.show.with_suffix(".svg"))
        return
    settings = chosen_settings(args)
    if args.estimate:
        estimate(settings, args.repetitions)
        return
    coroutine_report.show(run_all(settings, args)["settings"])


if __name__ == "__main__":
    main()
