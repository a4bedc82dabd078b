"""Times each kernel by replays, against the larger of its two floors: bytes and operations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn import functional

from gpu_call.ceilings import measured_limits
from gpu_call.models import VOCAB_SIZE, random_weights, shapes, spec_of
from gpu_call.stage import Stage, run_stage
from gpu_call.steps_of_rows import Groups, decode_step, grouped_step, mixed_step, num_blocks
from gpu_call.timing import Run, cold_s
from raybatch.bench.machine import Limits
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.graph_sizes import GraphShape
from raybatch.kernels.byte_numbers import FP8, is_quantised, quantise
from raybatch.kernels.dispatch import ops_for, with_varlen
from raybatch.kernels.small_ops import rotation_table
from raybatch.kernels.step_index import StepIndex
from raybatch.kernels.triton import attention as kernels
from raybatch.kernels.triton import linear as linears
from raybatch.kernels.triton import moe
from raybatch.kernels.triton.jit.attention import decode_kernel
from raybatch.models.config import ModelSpec
from raybatch.policy.cost import roofline

# more than the caches of any GPU hold
_BEYOND_CACHE_BYTES = 192 << 20
_DTYPE = torch.bfloat16
_THREADS_OF_WARP = 32
# largest error of a tuned kernel against the plain one, relative to the norm
_MOST_ERROR = 0.05


@dataclass(frozen=True, kw_only=True)
class Work:
    """Runs of the same work on separate data, and the least operations and bytes of one run."""

    runs: Sequence[Run]
    operations: float = 0.0
    num_bytes: float = 0.0


class Bench:
    """Times the work of a stage and records the results."""

    def __init__(self, stage: Stage, device: torch.device, limits: Limits) -> None:
        self.stage, self.device = stage, device
        self.block_size = 64 if stage.is_gpu else 16
        self._limits = limits
        stage.put(times={}, sweeps={})

    def time(self, name: str, make: Callable[[], Work]) -> float | None:
        """Record the seconds of work and return floor / seconds; None if the work failed."""

        def timed() -> dict[str, float]:
            return self.measured(make())

        found: dict[str, float] | None = self.stage.attempt(name, timed, needs_s=1.0)
        if found is None:
            return None
        self.stage.found["times"][name] = found
        self.stage.put()
        return found["share"]

    @torch.inference_mode()
    def measured(self, work: Work) -> dict[str, float]:
        seconds = cold_s(self.device, work.runs)
        least = roofline.Work(operations=work.operations, moved_bytes=work.num_bytes)
        floor_s = self._limits.least_s(least)
        return {"us": 1e6 * seconds, "floor_us": 1e6 * floor_s, "share": floor_s / seconds}

    def error(self, made: torch.Tensor, expected: torch.Tensor) -> float:
        difference = (made.float() - expected.float()).norm() / expected.float().norm()
        return float(difference)

    def shares(
        self, title: str, works: dict[str, Callable[[], Work]], *, is_shown: bool = True
    ) -> None:
        """Time work by name; put the shares in one line of the table."""
        found = {name: self.time(f"{title}, {name}", make) for name, make in works.items()}
        shares = [f"{name} {share:.0%}" for name, share in found.items() if share is not None]
        if shares and is_shown:
            self.stage.figure(f"{title}: {', '.join(shares)}")

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=_DTYPE, device=self.device)

    def copies(self, num_bytes: float) -> int:
        """Return how many copies of `num_bytes` exceed the caches; 1 without a GPU."""
        if not self.stage.is_gpu:
            return 1
        return max(1, min(16, -(-_BEYOND_CACHE_BYTES // max(1, int(num_bytes)))))


def main(stage: Stage) -> None:
    run_all(Bench(stage, torch.device(stage.device), measured_limits(stage)))


def run_all(bench: Bench) -> None:
    """Time every kernel, the most important first."""
    models = shapes(is_gpu=bench.stage.is_gpu)
    dense, sparse = (spec_of(shape, num_layers=1) for shape in models.values())
    _decodes(bench, dense)
    _shared_runs(bench, dense)
    _prompts(bench, dense)
    _experts(bench, sparse)
    _small_ops(bench, dense)
    _sweep_decode(bench, dense)
    _sweep_experts(bench, sparse)
    _logits(bench, replace(dense, vocab_size=VOCAB_SIZE) if bench.stage.is_gpu else dense)


def _decodes(bench: Bench, spec: ModelSpec) -> None:
    attention = partial(_attention, bench, spec)
    is_gpu = bench.stage.is_gpu
    by_length = {512: (16, 64, 256, 1024), 4096: (16, 64, 256)} if is_gpu else {20: (2,)}
    for length, sizes in by_length.items():
        works = {f"{rows}": partial(attention, [length] * rows) for rows in sizes}
        bench.shares(f"decode of {length} tokens, by rows", works)
    rows, length, longest = (255, 500, 32_000) if is_gpu else (2, 20, 200)
    works = {
        f"{rows}x{length} and one of {longest}": partial(attention, [longest, *[length] * rows]),
        f"{rows}x{length} fp8": partial(attention, [length] * rows, FP8),
    }
    bench.shares("decode", works)


def _shared_runs(bench: Bench, spec: ModelSpec) -> None:
    """Time decodes in groups: each row's own blocks, the shared prefixes, and the merge."""
    groups = (
        Groups(num_rows=256, rows_per_group=16, shared_tokens=1024, own_tokens=96)
        if bench.stage.is_gpu
        else Groups(num_rows=2, rows_per_group=2, shared_tokens=16, own_tokens=4)
    )
    batch = grouped_step(groups, bench.block_size)
    attending = partial(_attending, bench, spec, batch, groups.num_read, 4 * sum(groups.lens))
    works = {"as they are": attending, "in a graph": partial(attending, is_padded=True)}
    name = f"{groups.num_rows} rows in groups of {groups.rows_per_group}"
    bench.shares(f"{name} over {groups.shared_tokens} tokens", works)


def _attention(
    bench: Bench, spec: ModelSpec, lens: list[int], kv_dtype: torch.dtype = _DTYPE
) -> Work:
    """Return the attention work of decode rows."""
    batch = decode_step(lens, bench.block_size)
    return _attending(bench, spec, batch, sum(lens), 4 * sum(lens), kv_dtype)


def _attending(
    bench: Bench,
    spec: ModelSpec,
    batch: ForwardBatch,
    num_read: int,
    num_products: float,
    kv_dtype: torch.dtype = _DTYPE,
    ops: Any = None,
    *,
    is_padded: bool = False,
) -> Work:
    """Return the attention work of a step that reads `num_read` positions.

    `num_products`: operations per head and dimension; `is_padded`: padded as in a CUDA graph.
    """
    ops = ops or ops_for(torch.device("cuda"))
    needed = num_blocks(batch, bench.block_size)
    shape = needed, spec.num_kv_heads, bench.block_size, spec.head_dim
    rows = len(batch.token_ids)
    pool = bench.randn(*shape)
    pool = quantise(pool, kv_dtype) if is_quantised(kv_dtype) else pool
    row_bytes = 2 * spec.num_kv_heads * pool.shape[-1] * pool.element_size()
    pools = [(pool, pool.clone())]
    pools += [(pool.clone(), pool.clone()) for _ in range(bench.copies(num_read * row_bytes) - 1)]
    heads = bench.randn(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    turned = spec.num_heads + spec.num_kv_heads
    q, k, v = heads[:, : spec.num_heads], heads[:, spec.num_heads : turned], heads[:, turned:]
    positions, slots = batch.positions.to(bench.device), batch.slot_mapping.to(bench.device)
    if is_padded:
        prepared, (q, k, v) = _padded(bench, spec, batch, ops, (q, k, v), positions, slots)
    else:
        prepared = ops.prepare_attention(
            batch.attention, positions=positions, slot_mapping=slots, pool=pool, windows=(None,)
        )
    runs = [partial(ops.attend, q, k, v, *pair, prepared, None) for pair in pools]
    own_bytes = 2 * rows * spec.num_heads * spec.head_dim * _DTYPE.itemsize
    return Work(
        runs=runs,
        operations=num_products * spec.num_heads * spec.head_dim,
        num_bytes=num_read * row_bytes + own_bytes,
    )


def _padded(
    bench: Bench,
    spec: ModelSpec,
    batch: ForwardBatch,
    ops: Any,
    heads: tuple[torch.Tensor, ...],
    *of_rows: torch.Tensor,
) -> tuple[Any, list[torch.Tensor]]:
    """Return the step as the smallest graph with room for it prepares it, and its padded heads."""
    index = StepIndex(
        batch.attention,
        num_rows=len(batch.token_ids),
        num_kv_heads=spec.num_kv_heads,
        block_size=bench.block_size,
        joins_segments=ops.joins_segments,
    )
    rows = len(batch.token_ids)
    shape = GraphShape.within(
        max_rows=min(256, rows),
        max_tokens=rows,
        max_row_blocks=8192 // bench.block_size,
        max_entries=1 << 18,
        block_size=bench.block_size,
        num_kv_heads=spec.num_kv_heads,
    )
    size = shape.sizes().pick(index.size)
    assert not isinstance(size, str), f"no graph has room: {size}"
    array = torch.zeros(size.num_index, dtype=torch.int32).numpy()
    index.write(size, array)

    def filled(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x[:1].expand(size.rows - len(x), *x.shape[1:])))

    positions, slots = map(filled, of_rows)
    prepared = ops.prepare_fixed(
        size, torch.from_numpy(array).to(bench.device), positions=positions, slot_mapping=slots
    )
    return prepared, [filled(x) for x in heads]


def _prompts(bench: Bench, spec: ModelSpec) -> None:
    kinds = ((2048,), (8192,), (512,) * 4) if bench.stage.is_gpu else ((12,),)
    for prompts in kinds:
        batch = mixed_step((), prompts, bench.block_size)
        pairs = sum(n * (n + 1) / 2 for n in prompts)
        attending = partial(_attending, bench, spec, batch, sum(prompts), 4 * pairs)
        works: dict[str, Callable[[], Work]] = {
            "as they are": attending,
            "in a graph": partial(attending, is_padded=True),
        }
        varlen = with_varlen(ops_for(torch.device("cuda"))) if bench.stage.is_gpu else None
        if varlen is not None:
            works["varlen_attn"] = partial(attending, ops=varlen)
        if len(prompts) == 1:
            works["sdpa of torch"] = partial(_sdpa, bench, spec, prompts[0])
        title = f"prompts of {len(prompts)}x{prompts[0]}"
        bench.shares(title, works, is_shown=len(prompts) == 1)


def _sdpa(bench: Bench, spec: ModelSpec, length: int) -> Work:
    """Return the work of torch's attention of one prompt, for comparison."""
    q = bench.randn(1, spec.num_heads, length, spec.head_dim)
    k, v = (bench.randn(1, spec.num_kv_heads, length, spec.head_dim) for _ in range(2))
    attend = partial(
        functional.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True
    )
    pairs = length * (length + 1) / 2
    return Work(
        runs=[attend],
        operations=4 * pairs * spec.num_heads * spec.head_dim,
        num_bytes=2 * (q.nbytes + k.nbytes),
    )


def _experts(bench: Bench, spec: ModelSpec) -> None:
    tensors = _expert_tensors(bench, spec)
    sizes = (16, 64, 256, 1024, 2048, 8192) if bench.stage.is_gpu else (8,)
    kernels = {f"{n}": partial(_moe, bench, spec, tensors, n) for n in sizes}
    bench.shares("experts, ours by tokens", kernels)
    if bench.stage.is_gpu:
        grouped = {
            f"{n}": partial(_moe, bench, spec, tensors, n, min_grouped_rows=0) for n in sizes
        }
        bench.shares("experts, grouped_mm", grouped)


def _expert_tensors(bench: Bench, spec: ModelSpec) -> tuple[torch.Tensor, ...]:
    ffn = random_weights(spec, bench.device, _DTYPE).layers[0].ffn
    gate_up, down = ffn.shard.experts_gate_up, ffn.shard.experts_down
    assert ffn.router is not None, "a sparse layer"
    assert gate_up is not None, "a sparse layer"
    assert down is not None, "a sparse layer"
    return ffn.router, gate_up, down


def _moe(
    bench: Bench, spec: ModelSpec, tensors: tuple[torch.Tensor, ...], num_tokens: int, **more: int
) -> Work:
    assert spec.moe is not None, "a sparse layer"
    x = bench.randn(num_tokens, spec.model_dim)
    experts, top_k = spec.moe.num_experts, spec.moe.top_k
    used = experts * (1 - (1 - top_k / experts) ** num_tokens)
    of_expert = 3 * spec.model_dim * spec.moe.ffn_dim
    run = partial(moe.moe_ffn, x, *tensors, top_k=top_k, norm_topk_prob=True, **more)
    return Work(
        runs=[run],
        operations=2 * num_tokens * top_k * of_expert,
        num_bytes=used * of_expert * _DTYPE.itemsize + 2 * x.nbytes,
    )


def _small_ops(bench: Bench, spec: ModelSpec) -> None:
    for num_tokens in (256, 2048) if bench.stage.is_gpu else (8,):
        works = {
            "heads": partial(_heads, bench, spec, num_tokens),
            "rms": partial(_rms, bench, spec, num_tokens),
            "gate": partial(_gate, bench, spec, num_tokens),
        }
        bench.shares(f"small ops of {num_tokens} tokens", works, is_shown=num_tokens != 256)


def _heads(bench: Bench, spec: ModelSpec, num_tokens: int) -> Work:
    ops = ops_for(torch.device("cuda"))
    all_heads = spec.num_heads + 2 * spec.num_kv_heads
    batch = mixed_step((), (num_tokens,), bench.block_size)
    needed = num_blocks(batch, bench.block_size)
    pools = [bench.randn(needed, spec.num_kv_heads, bench.block_size, spec.head_dim) for _ in "kv"]
    positions, slots = batch.positions.to(bench.device), batch.slot_mapping.to(bench.device)
    prepared = ops.prepare_attention(
        batch.attention, positions=positions, slot_mapping=slots, pool=pools[0], windows=(None,)
    )
    frequencies = torch.ones(spec.head_dim // 2, device=bench.device)
    turns = rotation_table(positions, frequencies, 1.0)
    norms = bench.randn(spec.num_heads + spec.num_kv_heads, spec.head_dim)
    heads = [
        bench.randn(num_tokens, all_heads, spec.head_dim)
        for _ in range(bench.copies(num_tokens * all_heads * spec.head_dim * 2))
    ]
    runs = [
        partial(ops.finish_heads, x, spec.num_heads, norms, 1e-6, turns, *pools, prepared)
        for x in heads
    ]
    stored = 2 * num_tokens * spec.num_kv_heads * spec.head_dim * _DTYPE.itemsize
    turned = spec.num_heads + spec.num_kv_heads
    return Work(runs=runs, num_bytes=heads[0].nbytes * (1 + turned / all_heads) + stored)


def _rms(bench: Bench, spec: ModelSpec, num_tokens: int) -> Work:
    ops = ops_for(torch.device("cuda"))
    copies = bench.copies(num_tokens * spec.model_dim * 2)
    rows = [bench.randn(num_tokens, spec.model_dim) for _ in range(copies)]
    weight = bench.randn(spec.model_dim)
    runs = [partial(ops.rms_norm, x, weight, 1e-6) for x in rows]
    return Work(runs=runs, num_bytes=2 * rows[0].nbytes)


def _gate(bench: Bench, spec: ModelSpec, num_tokens: int) -> Work:
    copies = bench.copies(num_tokens * spec.ffn_dim * 4)
    rows = [bench.randn(num_tokens, 2 * spec.ffn_dim) for _ in range(copies)]
    return Work(runs=[partial(linears.gated, x) for x in rows], num_bytes=1.5 * rows[0].nbytes)


def _logits(bench: Bench, spec: ModelSpec) -> None:
    rows = (8, 256, 1023) if bench.stage.is_gpu else (4,)
    head = bench.randn(spec.vocab_size, spec.model_dim)
    works = {f"head of {n} rows": partial(_head, bench, head, n) for n in rows}
    logits = torch.randn(rows[-2:][0], spec.vocab_size, device=bench.device)
    most = min(1024, spec.vocab_size)
    works["topk of 1024"] = lambda: Work(
        runs=[lambda: torch.topk(logits, most, dim=1)], num_bytes=logits.nbytes
    )
    bench.shares("logits", works)


def _head(bench: Bench, head: torch.Tensor, num_rows: int) -> Work:
    x = bench.randn(num_rows, head.shape[1])
    return Work(
        runs=[partial(functional.linear, x, head)],
        operations=2 * num_rows * head.numel(),
        num_bytes=head.nbytes + 2 * num_rows * head.shape[0],
    )


class Tuned:
    """Launches a kernel with other options than its caller gives."""

    def __init__(self, kernel: Any, overrides: dict[str, int]) -> None:
        self._kernel, self.overrides = kernel, overrides

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._kernel[grid]

        def launched(*args: Any, **options: Any) -> Any:
            unknown = self.overrides.keys() - options.keys()
            assert not unknown, f"the kernel takes no {', '.join(sorted(unknown))}"
            return launch(*args, **(options | self.overrides))

        return launched


@contextmanager
def changed(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a name of a module within the context."""
    plain = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, plain)


def _sweep_decode(bench: Bench, spec: ModelSpec) -> None:
    """Time decode attention by tile, warps and stages."""
    # with two stages, no tile is read ahead
    grid = product((32, 64, 128), (2, 4, 8), (3, 4, 5))
    cases = {"256x512": [512] * 256, "64x4096": [4096] * 64}
    if not bench.stage.is_gpu:
        grid, cases = product((16,), (4,), (2,)), {"2x20": [20] * 2}
    combinations = [
        {"TILE_KEYS": keys, "num_warps": warps, "num_stages": stages}
        for keys, warps, stages in grid
        # more keys need more registers than few threads have
        if keys < 64 * warps
    ]
    for name, lens in cases.items():
        make = partial(_attention, bench, spec, lens)
        work = bench.stage.attempt(f"sweep of decode {name}", make)
        if work is not None:
            sweep, plain = f"decode {name}", decode_kernel
            choices = [{"decode_kernel": Tuned(plain, each)} for each in combinations]
            found = _sweep(bench, sweep, work, kernels, choices)
            _tell_best(bench, sweep, found)


def _sweep_experts(bench: Bench, spec: ModelSpec) -> None:
    """Time the experts by the tiles of both products, and by the rows of a tile.

    `GATE_UP_TILES` and `DOWN_TILES` of the kernels should have the best tiles.
    """
    tensors = _expert_tensors(bench, spec)
    is_gpu = bench.stage.is_gpu
    # rows of a tile, by tokens
    sizes = {64: 16, 256: 32, 600: 64, 2048: 128} if is_gpu else {8: 16}
    grid = product((64, 128), (4, 8), (2, 3, 4)) if is_gpu else [(32, 4, 3)]
    tiles = [moe.ProductTile(*numbers) for numbers in grid]
    for num_tokens, rows in sizes.items():
        work = _moe(bench, spec, tensors, num_tokens)
        rooms = [{"_ROOM": room} for room in ((0.65, 1.3, 2.6) if is_gpu else (1.3,))]
        by_room = _sweep(bench, f"room of {num_tokens} tokens", work, moe, rooms)
        for table in ("GATE_UP_TILES", "DOWN_TILES"):
            plain = getattr(moe, table)
            # sums of gate and of up, 4 bytes each, that fit the registers of a thread
            most = (128 if table == "GATE_UP_TILES" else 256) * _THREADS_OF_WARP
            tables = [
                {table: dict.fromkeys(plain, tile)}
                for tile in tiles
                if rows * tile.columns < most * tile.num_warps
            ]
            found = _sweep(bench, f"{table} of {num_tokens} tokens", work, moe, tables)
            if num_tokens == 2048 or not is_gpu:
                _tell_best(bench, f"{table} of {num_tokens}", found)
        if num_tokens == 2048:
            _tell_best(bench, f"room of {num_tokens}", by_room)


def _sweep(
    bench: Bench, name: str, work: Work, module: Any, choices: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Time work with each choice of values for names of a module."""
    found: list[dict[str, Any]] = []
    expected = bench.stage.attempt(f"sweep of {name}", work.runs[0])
    if expected is None:
        return found
    for choice in choices:
        plain = _plain(choice)

        def timed(choice: dict[str, Any] = choice) -> dict[str, float]:
            with ExitStack() as stack:
                for key, value in choice.items():
                    stack.enter_context(changed(module, key, value))
                error = bench.error(work.runs[0](), expected)
                return {**bench.measured(work), "error": error}

        took = bench.stage.attempt(f"{name}: {plain}", timed, needs_s=1.5)
        if took is not None:
            found.append({**plain, **took})
            bench.stage.found["sweeps"][name] = found
            bench.stage.put()
    return found


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice as plain numbers by name."""
    plain: dict[str, Any] = {}
    for key, value in choice.items():
        if isinstance(value, Tuned):
            plain |= value.overrides
        elif isinstance(value, dict):
            plain |= next(iter(value.values()))._asdict()
        else:
            plain[key] = value
    return plain


def _tell_best(bench: Bench, name: str, found: Sequence[dict[str, Any]]) -> None:
    right = [each for each in found if each["error"] < _MOST_ERROR]
    if right:
        best = min(right, key=lambda each: each["us"])
        names = [key for key in best if key not in ("us", "floor_us", "share", "error")]
        text = ", ".join(f"{key} {best[key]}" for key in names)
        bench.stage.figure(f"best of {name}: {best['share']:.0%} with {text}")


if __name__ == "__main__":
    run_stage("kernels", main)
