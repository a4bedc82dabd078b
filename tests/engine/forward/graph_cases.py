"""Models with captured decode steps, and random steps for them."""

import random
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.graph_sizes import GraphShape
from raybatch.engine.forward.step_graphs import CudaGraphs, StepGraphs
from raybatch.engine.loading.loaded_model import LoadedModel, load_model
from raybatch.engine.memory.kv_cache import KVCache, allocate_kv_cache
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart
from raybatch.kernels.dispatch import ops_for
from tests.engine.fixed_ops import FIXED
from tests.engine.forward.recorded_graphs import RecordedGraphs
from tests.engine.tiny_models import save

BLOCK, NUM_BLOCKS = 4, 60


@dataclass
class Captured:
    model: LoadedModel
    cache: KVCache
    plain: Decoder
    graphs: StepGraphs

    @property
    def device(self):
        return self.cache.k.device


@contextmanager
def saved(variants, folder):
    """Yield the folder with checkpoints of these variants, and a separate cache folder."""
    for variant in variants:
        save(variant, folder / variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(folder / "cache"))
        yield folder


def shape(decode=(1, 2, 4, 8), *, shared=(), mixed=(), max_row_blocks=12, max_entries=1000):
    return GraphShape(
        decode=decode,
        shared=shared,
        mixed=mixed,
        max_row_blocks=max_row_blocks,
        max_entries=max_entries,
        block_size=BLOCK,
        num_kv_heads=2,
    )


def capture(path, device="cpu", *, ops=None, steps=None, num_blocks=NUM_BLOCKS):
    """Load a model and capture its decode steps; the last block of the pool is the scrap block."""
    device = torch.device(device)
    config = EngineConfig(device=str(device), dtype="float32", tune_malloc=False)
    model = load_model(str(path), config)
    cache = allocate_kv_cache(
        model.spec, num_blocks=num_blocks + 1, block_size=BLOCK, dtype=torch.float32, device=device
    )
    is_cpu = device.type == "cpu"
    graphs = StepGraphs(
        Decoder(model.spec, model.weights, ops=ops or (FIXED if is_cpu else ops_for(device))),
        cache,
        shape=steps or shape(),
        graphs=RecordedGraphs() if is_cpu else CudaGraphs(device),
    )
    return Captured(model, cache, Decoder(model.spec, model.weights), graphs)


def fill_randomly(cache, seed=0):
    generator = torch.Generator(cache.k.device).manual_seed(seed)
    for pool in (cache.k, cache.v):
        pool.normal_(generator=generator)


def random_step(num_rows, seed, device="cpu", *, shares_blocks=True):
    """A step of decodes at random positions; some rows read full blocks of others."""
    rng = random.Random(seed)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables, positions, entries = [], [], []
    for row in range(num_rows):
        position = rng.randrange(0, 7 * BLOCK)
        table = [free.pop() for _ in range(position // BLOCK + 1)]
        if shares_blocks and row and len(table) > 1 and len(tables[-1]) > 1 and rng.random() < 0.4:
            table[0] = tables[-1][0]
        tables.append(table)
        positions.append(position)
        for place, block in enumerate(table):
            first = place * BLOCK
            entries.append((block, row, min(BLOCK, position + 1 - first), first))
    entries.sort()
    blocks, owners, valid, first = (torch.tensor(column) for column in zip(*entries, strict=True))
    decode = DecodePart(
        block_ids=blocks,
        owners=owners,
        num_valid=valid,
        is_contiguous=bool((blocks.diff() == 1).all()),
        first_positions=first,
    )
    slots = [t[-1] * BLOCK + p % BLOCK for t, p in zip(tables, positions, strict=True)]
    return ForwardBatch(
        token_ids=torch.tensor([rng.randrange(211) for _ in range(num_rows)], device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        logits_idx=torch.arange(num_rows, device=device),
        attention=AttentionPlan(num_decode=num_rows, decode=decode, prefill=None, segments=()),
    )
