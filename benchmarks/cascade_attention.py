"""Times groups that decode over their prefixes, by three rules for the use of cascade attention.

Run: OMP_NUM_THREADS=1 python benchmarks/cascade_attention.py
          RAYBATCH_KERNEL_VECTORS=avx2 python benchmarks/cascade_attention.py --out result.json

The rules are the timed one of the engine, never, and a constant. One engine on random weights has
the prefixes in its pool. The same prompts (1,984 shared tokens, 32 distinct ones, 16 out) run once
per rule and round, in turns, and their tokens are compared. Times are CPU seconds of the process;
the script prints the minimum and the median of all rounds.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import conditions
import models
import numpy as np
import torch

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.config.environment import kernel_vectors
from raybatch.engine.loading import prepared
from raybatch.models.config import read_model_spec
from raybatch.policy.cost.cascade import CascadeThresholds
from raybatch.records.types import Request, Sampling

PREFIX, OWN, OUTPUT = 1984, 32, 16
GROUPS = ((64, 4), (16, 16), (4, 64))
NEVER = CascadeThresholds(num_rows=(2,), min_tokens=(float("inf"),))


class Constant(CascadeThresholds):
    """Uses cascade attention if it saves at least 128 reads."""

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        return (num_rows - 1) * num_tokens >= 128


class Switched:
    """Delegates to a rule that can be changed between runs."""

    def __init__(self) -> None:
        self.rule = NEVER

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        return self.rule.pays(num_rows, num_tokens)


def requests_of(groups: int, members: int, first_id: int) -> list[Request]:
    """Return the requests of all groups; prompts do not depend on the ids."""
    rng = np.random.default_rng(groups)
    requests: list[Request] = []
    for group in range(groups):
        prefix = rng.integers(10, models.VOCAB_SIZE, PREFIX)
        for _ in range(members):
            own = rng.integers(10, models.VOCAB_SIZE, OWN)
            requests.append(
                Request(
                    request_id=first_id + len(requests),
                    row_id=str(first_id + len(requests)),
                    prompt_token_ids=np.concatenate((prefix, own)).astype(np.int32),
                    sampling=Sampling(max_tokens=OUTPUT, ignore_eos=True),
                    group_id=group,
                    prefix_len=PREFIX,
                )
            )
    return requests


def run(engine: NativeBackend, requests: list[Request]) -> tuple[float, list[list[int]]]:
    """Return the CPU seconds of the requests, and their tokens."""
    engine.submit(requests)
    began, tokens = time.process_time(), {}
    while engine.num_unfinished():
        tokens.update({done.request_id: done.token_ids.tolist() for done in engine.poll()})
    seconds = time.process_time() - began
    return seconds, [tokens[request.request_id] for request in requests]


def measure(folder: str, groups: int, members: int, rounds: int) -> dict[str, object]:
    """Return the CPU seconds of each rule, and the thresholds of the timed rule."""
    spec = read_model_spec(Path(folder))
    num_tokens = groups * (PREFIX + members * (OWN + OUTPUT + 32)) + 4096
    kv_bytes = num_tokens * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4
    switched, timed_reads = Switched(), prepared.timed_reads
    found = []

    def timed(*args: object, **options: object) -> Switched:
        found.append(timed_reads(*args, **options))
        return switched

    prepared.timed_reads = timed
    config = EngineConfig(
        dtype="float32", device="cpu", kv_cache_bytes=kv_bytes, block_size_tokens=16
    )
    engine = create(folder, config)
    prepared.timed_reads = timed_reads
    rules = {
        "timed rule": found[0],
        "never together": NEVER,
        "128 saved reads": Constant(num_rows=(2,), min_tokens=(128,)),
    }
    run(engine, requests_of(groups, members, 0))
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    all_tokens = []
    for number in range(rounds):
        for place, (name, rule) in enumerate(rules.items()):
            switched.rule = rule
            first_id = (1 + number * len(rules) + place) * groups * members
            taken, tokens = run(engine, requests_of(groups, members, first_id))
            seconds[name].append(round(taken, 3))
            all_tokens.append(tokens)
    engine.close()
    least = [round(n, 1) if n < 1e9 else None for n in found[0].min_tokens]
    return {
        "groups": groups,
        "members": members,
        "cpu_s": seconds,
        "rule": dict(zip(map(str, found[0].num_rows), least, strict=True)),
        "are_tokens_equal": all(tokens == all_tokens[0] for tokens in all_tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="dense-4m", choices=models.SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        models.write(options.model, Path(folder))
        for groups, members in GROUPS:
            result = measure(folder, groups, members, options.rounds)
            results.append(result)
            print(f"{groups} groups of {members}, equal tokens: {result['are_tokens_equal']}")
            for name, seconds in result["cpu_s"].items():
                print(f"  {name:16} {min(seconds):7.2f} {statistics.median(seconds):7.2f} CPU s")
            print(f"  by rows, the least number of positions: {result['rule']}", flush=True)
    conditions.write_result(
        options.out,
        "cascade_attention.py",
        vectors=kernel_vectors() or "native",
        model=options.model,
        results=results,
    )


if __name__ == "__main__":
    main()
