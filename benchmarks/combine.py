"""Measures the gain of COMBINE at the experts: rows of several parts together, and part by part.

python benchmarks/combine.py                        # moe-100m, 8 parts of 32 tokens
python benchmarks/combine.py --model moe-8m --out result.json

Times are CPU seconds of the engine's feed-forward blocks, all layers in turn, so that no layer's
weights stay in the cache. Both ways take turns. The script also times combining and splitting.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conditions
import models
import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.runner import ModelRunner


def parts_of(num_parts: int, tokens: int, width: int) -> list[torch.Tensor]:
    """Return random hidden states of each part."""
    random = torch.Generator().manual_seed(1)
    return [torch.randn(tokens, width, generator=random) for _ in range(num_parts)]


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of this process for one run of `work`."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure_experts(
    runner: ModelRunner, parts: list[torch.Tensor], repetitions: int
) -> dict[str, Any]:
    """Return CPU seconds of the feed-forward blocks of all layers, combined and apart."""
    decoder = runner.decoder

    def together() -> None:
        for layer in range(decoder.num_layers):
            decoder.ffn_(layer, torch.cat(parts))

    def apart() -> None:
        for layer in range(decoder.num_layers):
            for part in parts:
                decoder.ffn_(layer, part.clone())

    ways = {"combined": together, "apart": apart}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for work in ways.values():
        work()
    for _ in range(repetitions):
        for name, work in ways.items():
            seconds[name].append(cpu_seconds(work))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["apart"] / medians["combined"]
    return {"cpu_s": seconds, "median_cpu_s": medians, "ratio": round(ratio, 2)}


def measure_primitives(parts: list[torch.Tensor], times: int) -> dict[str, float]:
    """Return CPU microseconds of combining and splitting, for all parts at once."""
    together, sizes = torch.cat(parts), [len(part) for part in parts]
    primitives: dict[str, Callable[[], Any]] = {
        "combine": lambda: torch.cat(parts),
        "split": lambda: torch.split(together, sizes),
    }
    found = {}
    for name, work in primitives.items():
        work()
        seconds = cpu_seconds(lambda work=work: [work() for _ in range(times)])  # type: ignore[misc]
        found[name] = round(seconds / times * 1e6, 1)
    return found


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(models.SHAPES), default="moe-100m")
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each part")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models.write(args.model, Path(folder))
        config = EngineConfig(dtype="float32", device="cpu", kv_cache_bytes=64 << 20)
        runner = ModelRunner.load(folder, config)
        parts = parts_of(args.parts, args.tokens, models.SHAPES[args.model].hidden_size)
        result = {
            "model": args.model,
            "parts": args.parts,
            "tokens_per_part": args.tokens,
            "experts": measure_experts(runner, parts, args.repetitions),
            "primitives_cpu_us": measure_primitives(parts, 200),
        }
    print(json.dumps(result["experts"], indent=2))
    print(json.dumps(result["primitives_cpu_us"], indent=2))
    conditions.write_result(args.out, "combine.py", **result)


if __name__ == "__main__":
    main()
