"""Times steps of one long row on one engine, and on a TP group of two or more processes.

python benchmarks/tp_group.py                                 # moe-100m and dense-60m, two ranks
python benchmarks/tp_group.py --models dense-60m --steps 200 --out result.json

One thread per process, float32. The row decodes alone and in a TP group in turns, and a step's time
is the median of its kind. The script also shows the decisions of the pool's policy for a row with
4,000 tokens left: before any such group (whether it tries one), and with the measured times
(whether it forms the group again, and ends it). Tokens are compared with those of the row alone.
Logits differ by about 3e-6, so a router with a near tie may choose another expert, and then another
token may follow. Ranks wait for each other by spinning, so other load on the host's cores slows the
steps of a group.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import torch

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.models.config import read_model_spec
from raybatch.policy.pool.snapshot import RunningRows
from raybatch.records.types import Request, Sampling
from raybatch_extensions.ranks.records import FormingCost, RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous, RendezvousStore
from raybatch_extensions.tp_groups.engine import TPExtension
from raybatch_extensions.tp_groups.group import GlooGroup, RankGroup, connect
from raybatch_extensions.tp_groups.policy import (
    TPGroupKind,
    TPGroupTimes,
    TPReplica,
    TPSnapshot,
    choose_tp_group,
    tp_groups_to_end,
)

TIMEOUT_S = 60.0
NUM_TURNS = 3
# tokens left of the row for which the policy decides
STEPS_LEFT = 4000
# rows and hidden sizes of the measured sums
SUMS = ((1, 512), (1, 4096), (64, 512), (64, 4096))
CPU = torch.device("cpu")


def tp_groups_of(backend: NativeBackend) -> TPExtension:
    tp_groups = backend.extensions["tp_groups"]
    assert isinstance(tp_groups, TPExtension), "an engine that may be in TP groups"
    return tp_groups


def engine_of(folder: str) -> NativeBackend:
    config = EngineConfig(
        device="cpu", dtype="float32", kv_cache_bytes=256 << 20, speculative_tokens=0
    )
    return create(folder, config, may_form_tp_groups=True)


def follow(folder: str, pipe: Connection) -> None:
    backend = engine_of(folder)
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        pipe.send(tp_groups_of(backend).follow(call))


def run_steps(backend: NativeBackend, steps: int) -> list[float]:
    """Run decode steps; return the seconds of each."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        backend.poll()
        seconds.append(time.perf_counter() - began)
    return seconds


def tokens_of(backend: NativeBackend) -> list[int]:
    done = []
    while backend.num_unfinished():
        done += backend.poll()
    (completion,) = done
    assert not completion.error, completion.error
    return completion.token_ids.tolist()


def measure(name: str, folder: str, *, size: int, prompt_len: int, steps: int) -> dict[str, Any]:
    """Decode a row alone and in a TP group in turns; return the times of both."""
    context, workers = multiprocessing.get_context("spawn"), []
    for _ in range(size - 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=follow, args=(folder, theirs), daemon=True)
        process.start()
        workers.append((process, ours))
    backend, spec = engine_of(folder), read_model_spec(Path(folder))
    for _, pipe in workers:
        pipe.recv()
    request = request_of(spec.vocab_size, prompt_len, max_tokens=2 * NUM_TURNS * steps + 8)
    backend.submit([request])
    expected = tokens_of(backend)
    backend.submit([request])
    for _ in range(4):
        backend.poll()
    alone, together, costs, reunited = list[float](), list[float](), list[FormingCost](), []
    for turn in range(NUM_TURNS):
        alone += run_steps(backend, steps)
        calls = tp_groups_of(backend).rank_inits(
            turn + 1, size, host="127.0.0.1", timeout_s=TIMEOUT_S
        )
        for (_, pipe), call in zip(workers, calls[1:], strict=True):
            pipe.send(call)
        costs.append(tp_groups_of(backend).lead(calls[0]))
        together += run_steps(backend, steps)
        began = time.perf_counter()
        tp_groups_of(backend).reunite()
        reunited.append(time.perf_counter() - began)
        for _, pipe in workers:
            pipe.recv()
    is_equal, capacity = expected == tokens_of(backend), backend.capacity()
    for process, pipe in workers:
        pipe.send(None)
        process.join()
    cost = sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]
    return {
        "model": name,
        "ranks": size,
        "context_tokens": [prompt_len, prompt_len + len(expected)],
        "tokens_equal": is_equal,
        "group": cost.group,
        "alone_ms": _milliseconds(alone),
        "team_ms": _milliseconds(together),
        "form_s": round(cost.seconds, 3),
        "slice_mb": round(cost.slice_bytes / 1e6, 1),
        "slice_s": round(cost.slice_s, 3),
        "kv_mb": round(cost.kv_bytes / 1e6, 2),
        "kv_s": round(cost.kv_s, 3),
        "reunite_s": round(statistics.median(reunited), 3),
        "num_layers": spec.num_layers,
        "model_dim": spec.model_dim,
        "bytes": (capacity.weight_bytes, capacity.kv_token_bytes),
    }


def request_of(vocab_size: int, prompt_len: int, *, max_tokens: int) -> Request:
    prompt = np.random.default_rng(3).integers(3, vocab_size, prompt_len)
    return Request(
        request_id=0,
        row_id="0",
        prompt_token_ids=prompt.astype(np.int32),
        sampling=Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"median": round(1e3 * middle, 3), "quartiles": [round(1e3 * x, 3) for x in (low, high)]}


def verdicts(found: dict[str, Any], *, weight_bytes: int, kv_token_bytes: int) -> dict[str, Any]:
    """Return the pool's decisions before any such group, and with the measured step times."""
    alone_s, tp_s = (found[key]["median"] / 1e3 for key in ("alone_ms", "team_ms"))
    switch_s = found["form_s"] + found["reunite_s"]
    tokens = sum(found["context_tokens"]) // 2
    rows = RunningRows(
        ids=np.array([0]),
        tokens=np.array([tokens]),
        left=np.array([float(STEPS_LEFT)]),
        can_move=np.array([True]),
    )
    idle = [
        TPReplica(
            replica_id=rank, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes, free_seqs=8
        )
        for rank in range(1, found["ranks"])
    ]
    driver = replace(
        idle[0],
        replica_id=0,
        num_held=1,
        rows=rows,
        token_s=alone_s,
        num_measurements=3,
        tp_sizes=(found["ranks"],),
    )
    pulling = frozenset(replica.replica_id for replica in idle)
    pool = TPSnapshot(replicas=(driver, *idle), pulling=pulling, measured={})
    tried = choose_tp_group(pool)
    kind = TPGroupKind(found["ranks"], True)
    measured = {kind: TPGroupTimes(tp_s / alone_s, switch_s)}
    led = replace(driver, tp_size=found["ranks"], tp_ratio=tp_s / alone_s)
    return {
        "saved_s": round(STEPS_LEFT * (alone_s - tp_s) - switch_s, 2),
        "is_tried": None if tried is None else tried.reason,
        "forms_again": choose_tp_group(replace(pool, measured=measured)) is not None,
        "ends": tp_groups_to_end(TPSnapshot(replicas=(led,), measured={})).get(0),
    }


def sum_in(call: RankInit, by_gloo: bool, store: RendezvousStore | None) -> dict[str, float]:
    """Return the least microseconds of a sum of each size, over three runs."""
    torch.set_num_threads(1)
    rendezvous = Rendezvous(call, store)
    group: RankGroup = GlooGroup(call, rendezvous) if by_gloo else connect(call, rendezvous, CPU)
    found = {}
    for rows, dim in SUMS:
        x, runs = torch.zeros(rows, dim), []
        for _ in range(4):
            began = time.perf_counter()
            for _ in range(100):
                group.sum_(x)
            runs.append((time.perf_counter() - began) / 100)
        found[f"{rows} x {dim}"] = round(1e6 * min(runs[1:]), 1)
    group.close()
    return found


def measure_sums(size: int) -> dict[str, Any]:
    """Time sums between processes, over shared memory and over gloo."""
    store, context, found = RendezvousStore(), multiprocessing.get_context("spawn"), {}
    for generation, (name, by_gloo) in enumerate((("shared memory", False), ("gloo", True))):
        calls = store.calls(generation, size, timeout_s=TIMEOUT_S)
        processes = [
            context.Process(target=sum_in, args=(call, by_gloo, None)) for call in calls[1:]
        ]
        for process in processes:
            process.start()
        found[name] = sum_in(calls[0], by_gloo, store)
        for process in processes:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["moe-100m", "dense-60m"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sums = measure_sums(options.ranks)
    print("microseconds of a sum", sums, flush=True)
    results = []
    with tempfile.TemporaryDirectory() as root:
        for name in options.models:
            folder = Path(root) / name
            models.write(name, folder)
            size, prompt_len, steps = options.ranks, options.prompt, options.steps
            found = measure(name, str(folder), size=size, prompt_len=prompt_len, steps=steps)
            weight_bytes, kv_token_bytes = found.pop("bytes")
            found |= verdicts(found, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes)
            print(found, flush=True)
            results.append(found)
    conditions.write_result(options.out, "tp_group.py", sums_us=sums, rows=results)


if __name__ == "__main__":
    main()
