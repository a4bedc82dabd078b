"""Measures the pause of a row that moves with its KV to another engine process while it decodes.

python benchmarks/move_pause.py --out FILE [--tokens 1024 4096 16384 65536] [--moves 5]

A pool has two processes on this host, one thread each, and one row moves back and forth by the
pool's moves. The script times the calls of the replicas. The pause lasts from the call that stops
the row until a token of the other engine is seen. It includes the rest of the current step (half a
step on average) and the first step on the other engine. So the pause minus one and a half steps is
the time without computation, except for rows that are recomputed. `num_blocks_left` counts the
blocks that are still to be copied when the row stops. The time of a block is that of as many decode
steps as a block has tokens, measured before each move. Rows of up to 4,096 tokens also move without
KV, once each. The script fails unless every row has the tokens of a row that does not move.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import conditions
import models
import numpy as np

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.coordinator.rebalancer import MoveRows
from raybatch.actors.executors.calls import CallHandle, LocalLoop
from raybatch.actors.executors.local_pools import LocalRuntime, plan_local_placement
from raybatch.actors.pool import make_submission
from raybatch.actors.replicas.runtime import Started
from raybatch.actors.wire.columns import combine_results, decode_completions, request_table
from raybatch.actors.wire.records import LeftRow, Piece, PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.policy.pool.snapshot import RowMove
from raybatch.records.types import ReplicaStats, Sampling

# 2 KiB of KV per token, and small enough that a core computes a prompt within two minutes
SHAPE = replace(
    models.SHAPES["dense-4m"], num_layers=2, num_heads=4, num_kv_heads=2, max_len=1 << 17
)
BLOCK = 64
MAX_RECOMPUTED = 4096
# tokens per move: some to measure a step, others while KV is copied
TOKENS_OF_MOVE = 400
# first block with which `peek` looks for a row and copies none of its blocks
_NO_BLOCK = 1 << 30


class Call(NamedTuple):
    """One call of a move by the coordinator; step "first" is the poll that saw the row decode."""

    step: str
    began: float
    ended: float
    answer: Any


class TimedReplica:
    """A replica that times its calls; after `begin` it is polled until the row decodes."""

    def __init__(self, started: Started, runtime: "TimedRuntime") -> None:
        self._actor, self.end, self._runtime = started.actor, started.end, runtime

    @property
    def actor(self) -> CallHandle:
        return CallHandle(lambda name, *args: asyncio.create_task(self._call(name, *args)))

    async def _call(self, name: str, *args: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        answer = await getattr(self._actor, name)(*args)
        if name == "move":
            self._runtime.calls.append(Call(args[0], began, time.perf_counter(), answer))
            if args[0] == "begin":
                self._runtime.looking = asyncio.create_task(self._look(args[1]))
        return answer

    async def _look(self, request_id: int) -> None:
        began, seen = time.perf_counter(), None
        while seen is None:
            seen = await self._actor.move("peek", request_id, _NO_BLOCK)
        self._runtime.calls.append(Call("first", began, time.perf_counter(), seen))


class TimedRuntime(LocalRuntime):
    def __init__(self, loop: LocalLoop) -> None:
        super().__init__(loop)
        self.calls: list[Call] = []
        self.looking: asyncio.Task[None]

    def start(self, *args: Any, **options: Any) -> TimedReplica:  # noqa: ANN401
        return TimedReplica(super().start(*args, **options), self)


class Pool:
    """Two engines and their coordinator, on the loop that runs this."""

    def __init__(self, spec: PoolSpec, loop: LocalLoop) -> None:
        self._spec, self._runtime = spec, TimedRuntime(loop)
        self.coordinator = Coordinator(spec, plan_local_placement(spec), self._runtime)
        self._runtime.owner = self.coordinator
        self._members = self.coordinator._replicas.members

    async def start(self) -> None:
        await self.coordinator.start()
        while sum(member.is_ready for member in self._members.values()) < 2:
            await asyncio.sleep(0.01)
        # the coordinator's ticks would begin other moves and TP groups
        self.coordinator._ticking.cancel()

    async def run(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        """Return the tokens of one row."""
        table = request_table(["0"], [prompt], seeds=np.zeros(1, np.uint64))
        samplings = (Sampling(temperature=0, max_tokens=num_tokens, ignore_eos=True),)
        submission = make_submission(table, samplings, "c", self._spec.engine)
        answer = await self.coordinator.generate(submission, (table, samplings))
        while answer.status == "pending":
            answer = await self.coordinator.collect(submission.token)
        assert answer.status == "done", answer.cause
        (completion,) = decode_completions(combine_results(answer.results, answer.attempts))
        assert not completion.error, completion.error
        return completion.token_ids.tolist()

    async def step_s(self) -> tuple[float, RowMove]:
        """Return the mean seconds of a decode step over a block, and the row's next move."""
        while (place := self._place()) is None:
            await asyncio.sleep(0.01)
        row_id, source = place
        (target,) = (r for r in self._members if r != source)
        before = stats = await self._stats(source)
        while stats.num_steps < before.num_steps + BLOCK:
            assert self._place() is not None, "the row ended before it moved"
            stats = await self._stats(source)
        step_s = (stats.engine_s - before.engine_s) / (stats.num_steps - before.num_steps)
        return step_s, RowMove(row_id, source, target, with_kv=True)

    async def move(self, move: RowMove) -> list[Call]:
        """Move a row, and return the calls for it."""
        rebalancer, calls = self.coordinator._rebalancer, self._runtime.calls
        calls.clear()
        num_moved = rebalancer.moves.num_moved
        rebalancer.apply(MoveRows((move,), self._snapshot()))
        while rebalancer.view.is_moving(move.row_id):
            await asyncio.sleep(0.001)
        assert rebalancer.moves.num_moved == num_moved + 1, "the row did not move"
        await self._runtime.looking
        return list(calls)

    async def _stats(self, replica_id: int) -> ReplicaStats:
        """Return a replica's report."""
        member = self._members[replica_id]
        before = member.stats
        await member.actor.drain()
        while member.stats is before:
            await asyncio.sleep(0.001)
        return member.stats

    def _snapshot(self) -> Any:  # noqa: ANN401
        view = self.coordinator._rebalancer.view
        return view.snapshot(self._members.values(), (), with_rows=True)

    def _place(self) -> tuple[int, int] | None:
        """Return the row that decodes, and its replica; None if none is reported."""
        for replica in self._snapshot().replicas:
            if replica.rows is not None and replica.rows.can_move.any():
                return int(replica.rows.ids[0]), replica.replica_id
        return None


def spec_of(folder: str, most_tokens: int, moves: int) -> PoolSpec:
    """Return a pool whose engines have room for the longest row twice."""
    token_bytes = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4
    num_tokens = 2 * (most_tokens + moves * TOKENS_OF_MOVE + 4 * BLOCK)
    engine = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size_tokens=BLOCK,
        kv_cache_bytes=num_tokens * token_bytes,
        speculative_tokens=0,
    )
    backend, pool = BackendConfig(kind="native"), PoolConfig(replicas=2)
    return PoolSpec(model=folder, backend=backend, engine=engine, pool=pool)


def figures_of(calls: Sequence[Call], step_s: float, prompt_len: int) -> dict[str, Any]:
    """Return the figures of one move."""
    by_step = {call.step: call for call in calls}
    pieces = [call for call in calls if isinstance(call.answer, Piece) and call.answer.refs]
    copies = [call for call in calls if call.step in ("peek", "reserve", "receive")]
    left = by_step["depart"].answer
    assert isinstance(left, LeftRow)
    kv, first = left.refs[0].states[0].kv, by_step["first"]
    pause_s = first.ended - by_step["depart"].began
    parts = {step: by_step[step].ended - by_step[step].began for step in ("depart", "arrive")}
    parts |= {"begin": first.began - by_step["arrive"].ended, "first": first.ended - first.began}
    return {
        "tokens": prompt_len + len(left.checkpointed.column("token_ids")[0]),
        "copied_ahead_mb": round(sum(call.answer.num_bytes for call in pieces) / 1e6, 2),
        "copied_ahead_s": round(sum(call.ended - call.began for call in copies), 4),
        "num_blocks_left": 0 if kv is None else len(kv.blocks),
        "step_ms": round(1e3 * step_s, 3),
        "pause_ms": round(1e3 * pause_s, 2),
        "parts_ms": {step: round(1e3 * seconds, 2) for step, seconds in parts.items()},
        "idle_ms": round(1e3 * (pause_s - 1.5 * step_s), 2),
        "pause_per_block": round(pause_s / (BLOCK * step_s), 4),
    }


def summary(moves: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, and ranges of wall-clock times."""
    found: dict[str, Any] = {}
    for name in ("copied_ahead_mb", "copied_ahead_s", "step_ms", "pause_ms", "idle_ms"):
        values = sorted(move[name] for move in moves)
        found[name] = statistics.median(values)
        found[f"{name}_range"] = [values[0], values[-1]]
    found["num_blocks_left"] = sorted({move["num_blocks_left"] for move in moves})
    found["pause_per_block"] = statistics.median(move["pause_per_block"] for move in moves)
    return found


def prompt_of(num_tokens: int, seed: int) -> np.ndarray:
    tokens = np.random.default_rng(seed).integers(3, SHAPE.vocab_size, num_tokens)
    return tokens.astype(np.int32)


async def with_kv(pool: Pool, prompt: np.ndarray, num_moves: int) -> list[dict[str, Any]]:
    """Move a row back and forth, and check its tokens."""
    num_tokens, found = num_moves * TOKENS_OF_MOVE, []
    # run this before any move, because engines reuse cached blocks of equal prompts
    expected = await pool.run(prompt, num_tokens)
    running = asyncio.create_task(pool.run(prompt, num_tokens))
    for _ in range(num_moves):
        step_s, move = await pool.step_s()
        found.append(figures_of(await pool.move(move), step_s, len(prompt)))
    assert await running == expected, "tokens of a row that moved differ"
    return found


async def without_kv(pool: Pool, num_tokens: int, num_rows: int) -> list[dict[str, Any]]:
    """Move each row once to an engine that has no KV of it, and check its tokens."""
    found = []
    for seed in range(1, num_rows + 1):
        prompt = prompt_of(num_tokens, seed)
        running = asyncio.create_task(pool.run(prompt, TOKENS_OF_MOVE))
        step_s, move = await pool.step_s()
        calls = await pool.move(move._replace(with_kv=False))
        found.append(figures_of(calls, step_s, num_tokens))
        tokens = await running
        assert await pool.run(prompt, TOKENS_OF_MOVE) == tokens, "tokens of a row that moved differ"
    return found


def show(name: str, num_tokens: int, side: dict[str, Any]) -> None:
    least, most = side["pause_ms_range"]
    pauses = f"{side['pause_ms']:.0f} ({least:.0f} to {most:.0f}) ms"
    print(
        f"{num_tokens:,} tokens, {name}: {side['copied_ahead_mb']:.1f} MB ahead in"
        f" {side['copied_ahead_s']:.2f} s, then {side['num_blocks_left']} blocks; pause {pauses},"
        f" {side['pause_per_block']:.3f} of a block; {side['idle_ms']:.0f} ms without steps,"
        f" of {side['step_ms']:.2f} ms each",
        flush=True,
    )


async def measure(spec: PoolSpec, loop: LocalLoop, options: argparse.Namespace) -> list[Any]:
    pool, rows = Pool(spec, loop), []
    await pool.start()
    for num_tokens in options.tokens:
        ways = {"with KV": partial(with_kv, pool, prompt_of(num_tokens, 0), options.moves)}
        if num_tokens <= MAX_RECOMPUTED:
            ways["without KV"] = partial(without_kv, pool, num_tokens, min(3, options.moves))
        for name, way in ways.items():
            moves = await way()
            side = summary(moves)
            show(name, num_tokens, side)
            rows.append({"prompt_tokens": num_tokens, "moved": name, **side, "moves": moves})
    await pool.coordinator.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--moves", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, closing(LocalLoop("move-pause")) as loop:
        models.write_checkpoint(SHAPE, Path(root), tokenizer=models.build_tokenizer())
        spec = spec_of(root, max(options.tokens), options.moves)
        rows = loop.begin(measure(spec, loop, options)).result()
    shape = {"num_layers": SHAPE.num_layers, "num_kv_heads": SHAPE.num_kv_heads, "block": BLOCK}
    conditions.write_result(options.out, "move_pause.py", model=shape, rows=rows)


if __name__ == "__main__":
    main()
