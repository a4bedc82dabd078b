"""The fake model of `tests.engine.fakes`, with its KV in host memory behind the engine's window.

Window, host memory and runtime are those of the engine; the decoder alone is fake.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from raybatch.engine.forward.coroutine import CoroutineRuntime, combine_at_experts
from raybatch.engine.forward.step_graphs import GraphCounts
from raybatch.engine.memory.kv_cache import KVCache, KVTiers, copy_blocks, read_blocks, write_blocks
from raybatch.engine.memory.kv_window import HostLayers, KVWindow
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.policy.cost.cascade import UNTIMED
from raybatch.records.sequence_kv import KVKey
from tests.engine.fakes import NUM_LAYERS, FakeSpec, embed, mix


class Prepared(NamedTuple):
    batch: object


class FailingLayers(HostLayers):
    """Fails at some copies, counted from 0, after it has written a part.

    Tokens that are saved are late, as those of a GPU: in one of two buffers in turn.
    """

    def __init__(self, pool, num_blocks, failing):
        super().__init__(pool, num_blocks)
        self.failing, self.num_copies = set(failing), 0
        self._ring, self._underway = [[], []], []

    def load(self, layer_idx, block_ids, buffer, after):
        assert len(set(block_ids.tolist())) == len(block_ids)
        buffer.k[0] = 7
        self._count()
        super().load(layer_idx, block_ids, buffer, after)

    def save(self, layer_idx, buffer, slots, host_slots):
        assert len(set(slots.tolist())) == len(set(host_slots.tolist())) == len(slots)
        self._put_late(keep=1)
        self._ring.reverse()
        late = self._ring[0]
        late[:] = [layer_idx, KVCache(k=buffer.k.clone(), v=buffer.v.clone()), slots, host_slots]
        self._count()
        self._underway.append(late)

    def finish(self):
        self._put_late(keep=0)

    def _put_late(self, keep):
        while len(self._underway) > keep:
            super().save(*self._underway.pop(0))

    def _count(self):
        self.num_copies += 1
        if self.num_copies - 1 in self.failing:
            raise RuntimeError("the copy engine has failed")


@dataclass
class FakeStep:
    """Tokens of each part, and rows of each run of the feed-forward blocks of layer 0."""

    parts: list[int]
    gates: list[int]
    chunk_lens: list[int]


class FakeDecoder:
    """Hidden states and KV are int64 hashes of all that a row has read; values are positions."""

    num_layers = NUM_LAYERS

    def __init__(self, runner):
        self._runner = runner

    def prepare(self, batch, cache):
        return Prepared(batch)

    def embed(self, batch):
        return _signed(embed(batch.token_ids.numpy(), batch.positions.numpy()))

    def attention(self, layer, x, prepared, cache):
        batch = prepared.batch
        own = mix(_hash(x), 100 + layer)
        keys, positions = (pool[layer].view(-1) for pool in (cache.k, cache.v))
        keys[batch.slot_mapping] = _signed(own)
        positions[batch.slot_mapping] = batch.positions
        pages = (cache.k[layer].flatten(1), cache.v[layer].flatten(1))
        attended = _attend(batch.attention, own, *pages)
        x = x + _signed(attended)
        if layer == NUM_LAYERS - 1:
            x = x.index_select(0, batch.logits_idx)
            self._runner.last_tokens.append(batch.token_ids[batch.logits_idx])
        return x

    def ffn_(self, layer, x):
        if layer == 0:
            self._runner.steps[-1].gates.append(len(x))
        x.copy_(_signed(mix(_hash(x), layer)))

    def logits(self, x):
        tokens = (_hash(x) % np.uint64(self._runner.spec.vocab_size)).astype(np.int64)
        logits = torch.zeros(len(x), self._runner.spec.vocab_size)
        logits[torch.arange(len(x)), torch.from_numpy(tokens)] = 1.0
        # parts end in the order in which they attend, except with `AnyOrder`
        last_tokens = self._runner.last_tokens.pop(0)
        if self._runner.nan_after >= 0:
            logits[last_tokens == self._runner.nan_after] = float("nan")
        return logits


class WindowRunner:
    """Runs the fake model; `pool_blocks` of each layer are the window's memory."""

    def __init__(
        self,
        *,
        pool_blocks,
        host_blocks,
        block_size,
        spec=None,
        full_step_tokens=math.inf,
        nan_after=None,
        failing=(),
        choose=combine_at_experts,
    ):
        shape = (NUM_LAYERS, pool_blocks, 1, block_size, 1)
        garbage = np.random.default_rng(1).integers(0, 2**62, shape)
        pool = KVCache(k=torch.from_numpy(garbage), v=torch.full(shape, -1))
        self._pool = pool
        self.tiers = self.rounded_tiers = KVTiers(pool, 0)
        self.host = FailingLayers(pool, host_blocks, failing)
        self.window = KVWindow(pool, self.host)
        self.num_blocks, self.num_window_blocks = host_blocks, self.window.num_blocks
        self.spec, self.nan_after = spec or FakeSpec(), -1 if nan_after is None else nan_after
        self.device = torch.device("cpu")
        self.cascade, self.full_step_tokens = UNTIMED, full_step_tokens
        self.most_step_tokens = None
        self.weight_counters, self.graph_counts = WeightCounters(), GraphCounts()
        self.steps, self.cleared, self.last_tokens, self.copied = [], [], [], []
        self.kv_key = KVKey("fake", "int64", "int64", block_size)
        self._runtime = CoroutineRuntime(FakeDecoder(self), self.window, choose)

    @property
    def window_counters(self):
        return self.window.counters

    def forward_parts(self, parts):
        prefills = [part.batch.attention.prefill for part in parts]
        chunk_lens = [length for prefill in prefills if prefill for length in prefill.lens]
        self.steps.append(FakeStep([len(part.batch.token_ids) for part in parts], [], chunk_lens))
        for part in parts:
            assert len(part.moves.load_host) <= self.window.num_blocks
        # nothing stays in the window from one step to the next
        self._pool.k.fill_(5)
        self._pool.v.fill_(-1)
        return self._runtime.forward(parts)

    def copy_blocks(self, source_ids, target_ids):
        self.copied += zip(source_ids.tolist(), target_ids.tolist(), strict=True)
        copy_blocks(self.host.kv, source_ids, target_ids)

    def read_blocks(self, block_ids):
        return read_blocks(self.host.kv, block_ids)

    def write_blocks(self, rows, block_ids):
        write_blocks(self.host.kv, rows, block_ids)

    def clear_blocks(self, block_ids):
        self.cleared += block_ids.tolist()
        self.host.clear(block_ids)


def _signed(values):
    return torch.from_numpy(np.asarray(values, np.uint64).view(np.int64).copy())


def _hash(x):
    return x.numpy().view(np.uint64)


def _attend(plan, own, pages, positions):
    pages, block_size = _hash(pages.contiguous()), pages.shape[1]
    out = np.zeros(len(own), np.uint64)
    if plan.decode is not None:
        part = plan.decode
        blocks, valid = part.block_ids.numpy(), part.num_valid.numpy()
        assert (np.diff(blocks) >= 0).all()
        assert part.is_contiguous == (np.diff(blocks) == 1).all()
        assert (positions[part.block_ids, 0] == part.first_positions).all()
        for block, owner, count in zip(blocks, part.owners.tolist(), valid.tolist(), strict=True):
            out[owner : owner + 1] += pages[block, :count].sum(dtype=np.uint64)
    if plan.prefill is not None:
        for start, length in zip(plan.prefill.starts, plan.prefill.lens, strict=True):
            out[start : start + length] += np.cumsum(own[start : start + length])
    for part in plan.segments:
        first = torch.arange(len(part.block_ids)) * block_size + part.first_position
        assert (positions[part.block_ids, 0] == first).all()
        values = pages[part.block_ids.numpy()].reshape(-1)[: part.num_tokens]
        out[part.query_idx.numpy()] += values.sum(dtype=np.uint64)
    return out
