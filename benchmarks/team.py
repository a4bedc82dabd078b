"""One long row on one engine, and spread over two or more processes: times of a step of each.

python benchmarks/team.py                                 # moe-100m and dense-60m, two ranks
python benchmarks/team.py --models dense-60m --steps 200 --out result.json

One thread each, float32. The row decodes alone and in a team by turns, and a step's time is the
median of its kind. The pool's policy is asked what it does for a row of 4,000 tokens to come:
before there was such a team (it may try one), and with these times (it forms again, it ends).
Tokens are compared with those of the row alone; logits differ by some 3e-6, and where a router
nearly ties another expert, and so token, may follow. Ranks wait for each other awake: on a host
whose cores others use as well, a team's steps tell of those others.
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

from raybatch.actors.ext.teams.policy import (
    TeamKind,
    TeamPace,
    TeamReplica,
    TeamSnapshot,
    choose_team,
    teams_to_end,
)
from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.engine.ext.teams.extension import Teamwork
from raybatch.engine.ext.teams.group import GlooGroup, TeamGroup, connect
from raybatch.engine.ranks.meeting import Meeting, TeamStore
from raybatch.models.config import read_model_spec
from raybatch.policy.pool.snapshot import RunningRows
from raybatch.records.team import FormingCost, TeamCall
from raybatch.records.types import Request, Sampling

TIMEOUT_S = 60.0
NUM_TURNS = 3
# the tail that the verdicts are asked for
STEPS_LEFT = 4000
# rows and hidden sizes of the sums that are measured
SUMS = ((1, 512), (1, 4096), (64, 512), (64, 4096))
CPU = torch.device("cpu")


def teams_of(backend: NativeBackend) -> Teamwork:
    teams = backend.extensions["teams"]
    assert isinstance(teams, Teamwork), "an engine that may be in teams"
    return teams


def engine_of(folder: str) -> NativeBackend:
    config = EngineConfig(
        device="cpu", dtype="float32", kv_cache_bytes=256 << 20, speculative_tokens=0
    )
    return create(folder, config, may_form_teams=True)


def follow(folder: str, pipe: Connection) -> None:
    backend = engine_of(folder)
    pipe.send("ready")
    while (call := pipe.recv()) is not None:
        pipe.send(teams_of(backend).follow(call))


def run_steps(backend: NativeBackend, steps: int) -> list[float]:
    """Run steps of rows that decode; return the seconds of each."""
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
    """Let a row decode alone and in a team by turns; return the times of both."""
    context, followers = multiprocessing.get_context("spawn"), []
    for _ in range(size - 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=follow, args=(folder, theirs), daemon=True)
        process.start()
        followers.append((process, ours))
    backend, spec = engine_of(folder), read_model_spec(Path(folder))
    for _, pipe in followers:
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
        calls = teams_of(backend).team_calls(turn + 1, size, host="127.0.0.1", timeout_s=TIMEOUT_S)
        for (_, pipe), call in zip(followers, calls[1:], strict=True):
            pipe.send(call)
        costs.append(teams_of(backend).lead(calls[0]))
        together += run_steps(backend, steps)
        began = time.perf_counter()
        teams_of(backend).reunite()
        reunited.append(time.perf_counter() - began)
        for _, pipe in followers:
            pipe.recv()
    is_equal, capacity = expected == tokens_of(backend), backend.capacity()
    for process, pipe in followers:
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
    """Return what the pool decides: before there was such a team, and by the steps it measured."""
    alone_s, team_s = (found[key]["median"] / 1e3 for key in ("alone_ms", "team_ms"))
    switch_s = found["form_s"] + found["reunite_s"]
    tokens = sum(found["context_tokens"]) // 2
    rows = RunningRows(
        ids=np.array([0]),
        tokens=np.array([tokens]),
        left=np.array([float(STEPS_LEFT)]),
        can_move=np.array([True]),
    )
    idle = [
        TeamReplica(
            replica_id=rank, weight_bytes=weight_bytes, kv_token_bytes=kv_token_bytes, free_seqs=8
        )
        for rank in range(1, found["ranks"])
    ]
    leader = replace(
        idle[0],
        replica_id=0,
        num_held=1,
        rows=rows,
        token_s=alone_s,
        num_paces=3,
        team_sizes=(found["ranks"],),
    )
    pulling = frozenset(replica.replica_id for replica in idle)
    pool = TeamSnapshot(replicas=(leader, *idle), pulling=pulling, paces={})
    tried = choose_team(pool)
    kind = TeamKind(found["ranks"], True)
    paces = {kind: TeamPace(team_s / alone_s, switch_s)}
    led = replace(leader, team_size=found["ranks"], team_ratio=team_s / alone_s)
    return {
        "saved_s": round(STEPS_LEFT * (alone_s - team_s) - switch_s, 2),
        "is_tried": None if tried is None else tried.reason,
        "forms_again": choose_team(replace(pool, paces=paces)) is not None,
        "ends": teams_to_end(TeamSnapshot(replicas=(led,), paces={})).get(0),
    }


def sum_in(call: TeamCall, by_gloo: bool, store: TeamStore | None) -> dict[str, float]:
    """Return the least microseconds of a sum of each size, over three runs."""
    torch.set_num_threads(1)
    meeting = Meeting(call, store)
    group: TeamGroup = GlooGroup(call, meeting) if by_gloo else connect(call, meeting, CPU)
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
    """Time sums between processes, by shared memory and by gloo."""
    store, context, found = TeamStore(), multiprocessing.get_context("spawn"), {}
    for epoch, (name, by_gloo) in enumerate((("shared memory", False), ("gloo", True))):
        calls = store.calls(epoch, size, timeout_s=TIMEOUT_S)
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
    conditions.write_result(options.out, "team.py", sums_us=sums, rows=results)


if __name__ == "__main__":
    main()
