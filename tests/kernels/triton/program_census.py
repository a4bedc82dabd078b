"""Counts what captured steps launch and compute beyond what a step needs, over a workload's steps.

`python -m <this module> Qwen3-8B W1 320 1500`: a model's shapes, a workload and its number of rows,
and most steps. Its graphs are captured on tensors without data, and their launches are noted; the
real scheduler then picks one for each step. Tokens choose experts at random. One line of JSON.
"""

import json
import math
import sys
from collections import defaultdict

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.graph_sizes import has_logits
from raybatch.engine.forward.step_graphs import StepBuffers, graph_shape
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.engine.weights.layout import map_tensors
from raybatch.kernels.dispatch import _on_gpu
from raybatch.kernels.step_index import Item, StepIndex, StepSize, parts_of
from raybatch.kernels.triton.attention import (
    LOOPING_PROGRAMS,
    MERGE_HEADS,
    MERGE_PROGRAMS,
    SPAN_MERGE_PROGRAMS,
)
from raybatch.kernels.triton.launch import attention_tiles
from raybatch.kernels.triton.moe import PRODUCT_PROGRAMS
from raybatch.records.types import Request, Sampling
from raybatch_lab.simulator.workloads import make_rows
from tests.engine.fakes import FakeRunner, FakeSampler, FakeStopChecker
from tests.kernels.triton.big_models import spec_of, weights_of

BLOCK_SIZE, KV_TOKENS, NUM_LAYERS, VOCAB = 64, 400_000, 36, 151_936
# kernels whose work differs from step to step
ATTENTION = ("decode_kernel", "merge_spans_kernel", "ragged_kernel", "merge_parts_kernel")
EXPERTS = ("gate_up_kernel", "down_kernel")


def captured_programs(spec, sizes):
    """Return for each size how many programs a layer launches, and which tiles experts have."""
    launches = []
    JITFunction.run = lambda kernel, *args, grid, **kwargs: launches.append(
        (kernel.__name__, math.prod(grid), kwargs)
    )
    device = torch.device("meta")
    weights = map_tensors(weights_of(spec), lambda x: x.to(device))
    decoder = Decoder(spec, weights, ops=_on_gpu())
    shape = spec.num_layers, 8, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim
    pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
    cache = KVCache(k=pool, v=pool)
    buffers = StepBuffers(
        sizes, scrap_block=7, block_size=BLOCK_SIZE, spec=spec, dtype=pool.dtype, device=device
    )
    found = {}
    for size in sizes:
        launches.clear()
        *inputs, index = buffers.inputs(size)
        decoder.forward_fixed(*inputs, size, index, cache, buffers.outputs(size))
        attention = sum(count for name, count, _ in launches if name in ATTENTION)
        # the last layer of a step may end before them
        of_experts = [(count, options) for name, count, options in launches if name in EXPERTS][:2]
        programs = attention // spec.num_layers + sum(count for count, _ in of_experts)
        found[size] = programs, [options for _, options in of_experts]
    return found


def needed_by_experts(tiles, num_rows, spec, rng):
    """Return how many programs of both products have work, by random choices, and their rows."""
    if not tiles:
        return 0, 0
    scores = rng.random((num_rows, spec.moe.num_experts))
    chosen = np.argpartition(scores, spec.moe.top_k, axis=1)[:, : spec.moe.top_k]
    counts = np.bincount(chosen.reshape(-1))
    total = 0
    for options in tiles:
        used = int((-(-counts // options["TILE_ROWS"])).sum())
        total += min(used * -(-options["NUM_OUTPUTS"] // options["TILE_OUT"]), PRODUCT_PROGRAMS)
    # both products have tiles of as many rows
    return total, used * tiles[0]["TILE_ROWS"]


def needed_by_attention(index, spec):
    """Return how many programs of a layer have something to do."""
    size = index.size
    parts = parts_of(size, index.array())
    num_kv_heads, num_heads = spec.num_kv_heads, spec.num_heads
    total = int((np.diff(parts.programs) > 0).sum()) * num_kv_heads
    total += min(size.merges, SPAN_MERGE_PROGRAMS) * -(-num_heads // MERGE_HEADS)
    numbers = torch.empty(1, 1, spec.head_dim, dtype=torch.bfloat16)
    _, _, most_lanes = attention_tiles(numbers, numbers)
    queries_of_program = most_lanes // (num_heads // num_kv_heads)
    for items in (parts.chunks, parts.runs):
        queries = items.reshape(-1, len(Item._fields))[:, 1]
        works = int(-(-queries // queries_of_program).sum()) * num_kv_heads if len(queries) else 0
        total += min(works, LOOPING_PROGRAMS[8])
    return total + min(size.merged_rows, MERGE_PROGRAMS)


KINDS = ("programs", "rows", "logits", "flops", "expert_rows")


def zeros():
    return np.zeros(len(KINDS))


def ratios(launched, needed):
    """Return the ratios of launched to needed programs, for kinds that are needed."""
    pairs = zip(KINDS, launched, needed, strict=True)
    return {kind: round(float(made / wanted), 4) for kind, made, wanted in pairs if wanted}


class Counting(FakeRunner):
    """Computes nothing, and adds up what each step needs and what its graph has."""

    def __post_init__(self):
        super().__post_init__()
        # of each size
        self.needed, self.launched = defaultdict(zeros), defaultdict(zeros)
        self.rng = np.random.default_rng(1)

    def forward(self, batch):
        num_rows, num_logits = len(batch.token_ids), len(batch.logits_idx)
        index = StepIndex(
            batch.attention,
            num_rows=num_rows,
            num_kv_heads=self.model.num_kv_heads,
            block_size=BLOCK_SIZE,
        )
        found = self.sizes.pick(index.size)
        if isinstance(found, StepSize):
            launched, tiles = self.programs[found]
            programs = needed_by_attention(index, self.model)
            of_experts, tile_rows = needed_by_experts(tiles, num_rows, self.model, self.rng)
            programs += of_experts
            num_slots = num_rows * self.model.moe.top_k if tiles else 0
            rows, logits = found.rows, found.rows if has_logits(found) else num_logits
            # padded rows choose experts as well
            padded = (rows - num_rows) * self.model.moe.top_k if tiles else 0
            self.needed[found] += [
                programs,
                num_rows,
                num_logits,
                self.flops(num_rows, num_logits, num_slots),
                num_slots,
            ]
            self.launched[found] += [
                launched,
                rows,
                logits,
                self.flops(rows, logits, tile_rows + padded),
                tile_rows + padded,
            ]
        return torch.zeros(num_logits, 2)

    def flops(self, num_rows, num_logits, num_slots):
        """Return multiply-adds of the linears; `num_slots` are the rows of experts."""
        spec = self.model
        of_heads = (spec.num_heads * 2 + 2 * spec.num_kv_heads) * spec.head_dim
        of_ffn = 3 * (num_rows * spec.ffn_dim if spec.moe is None else num_slots * spec.moe.ffn_dim)
        in_layers = NUM_LAYERS * (num_rows * of_heads + of_ffn)
        return spec.model_dim * (in_layers + num_logits * VOCAB)


def requests(rows, rng):
    heads = {}
    for i in range(len(rows.prompt)):
        group, prefix = int(rows.group[i]), int(rows.prefix[i])
        if prefix and group not in heads:
            heads[group] = rng.integers(0, 1000, prefix)
        own = rng.integers(0, 1000, int(rows.prompt[i]) - prefix)
        prompt = np.concatenate((heads[group], own)) if prefix else own
        yield Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=prompt.astype(np.int32),
            sampling=Sampling(max_tokens=int(min(rows.output[i], 8000)), ignore_eos=True),
            group_id=group if prefix else None,
            prefix_len=prefix,
        )


def main():
    model, name = sys.argv[1:3]
    num_rows, num_steps = map(int, sys.argv[3:])
    config = EngineConfig(block_size_tokens=BLOCK_SIZE)
    spec = spec_of(model)
    sizes = graph_shape(config, spec).sizes()
    runner = Counting(num_blocks=KV_TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE)
    runner.spec.max_model_len = spec.max_model_len
    runner.model, runner.sizes = spec, sizes
    runner.programs = captured_programs(spec, sizes.all())
    engine = Engine(runner, FakeSampler(), FakeStopChecker(), config)
    engine.add(list(requests(make_rows(name, num_rows=num_rows), np.random.default_rng(0))))
    for _ in range(num_steps):
        if engine.num_unfinished():
            engine.step()
    by_size = {
        size: ratios(runner.launched[size], needed) for size, needed in runner.needed.items()
    }
    worst = max(by_size, key=lambda size: by_size[size]["programs"])
    line = {
        "num_graphs": len(sizes.all()),
        "num_steps": engine.stats().num_steps,
        **ratios(sum(runner.launched.values()), sum(runner.needed.values())),
        "worst": {"size": str(worst), **by_size[worst]},
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
