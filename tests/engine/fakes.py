"""A model, a sampler and a stop checker that are exact, tiny and easy to predict.

The fake model is a hash with two layers of "attention" over a fake KV pool: what a row yields
depends on every earlier token of its sequence, read through slot mapping and attention plan. A
wrong block, position or context, or one read twice, changes the tokens.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch, on_device
from raybatch.engine.forward.step_graphs import GraphCounts
from raybatch.engine.memory.kv_window import WindowCounters
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.sampling.sampler import SampleResult
from raybatch.engine.weights.layer_store import WeightCounters
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.records.sequence_kv import KVKey
from raybatch.records.types import Completion, Request, Sampling

NUM_LAYERS = 2
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


def mix(values, salt):
    with np.errstate(over="ignore"):
        values = (values + np.uint64(salt)) * _MULTIPLIERS[0]
        values = (values ^ (values >> np.uint64(29))) * _MULTIPLIERS[1]
        return (values ^ (values >> np.uint64(32))) * _MULTIPLIERS[2]


def embed(token_ids, positions):
    return mix(np.asarray(token_ids, np.uint64) * np.uint64(1_000_003), 7) + mix(
        np.asarray(positions, np.uint64), 11
    )


def next_token(tokens, vocab_size):
    """Return the next token of the fake model after `tokens`, computed without a cache."""
    hidden = embed(np.asarray(tokens), np.arange(len(tokens)))
    for layer in range(NUM_LAYERS):
        hidden = mix(hidden + np.cumsum(mix(hidden, 100 + layer), dtype=np.uint64), layer)
    return int(hidden[-1] % np.uint64(vocab_size))


def generate(prompt, count, vocab_size, eos=()):
    """Return the tokens that follow `prompt`, up to `count` or the first end token."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(next_token(tokens, vocab_size))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeSpec:
    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 512
    num_kv_heads: int = 8
    # small sizes
    num_heads: int = 8
    head_dim: int = 1
    model_dim: int = 8
    ffn_dim: int = 8
    num_layers: int = NUM_LAYERS
    moe: None = None


@dataclass
class Step:
    num_decode: int
    num_tokens: int
    chunk_lens: tuple[int, ...]
    num_segments: int
    is_contiguous: bool | None


# rounded keys of the fake model: coarse enough to change tokens
_ROUNDED = ~np.uint64(0xFFF)


class FakeRoundedTiers:
    """Host memory that returns blocks with rounding errors."""

    def __init__(self, runner, num_host_blocks):
        self.num_host_blocks = num_host_blocks
        self.block_bytes = runner.block_bytes // 4
        self._runner = runner
        self._rows = [None] * num_host_blocks

    def save_blocks(self, block_ids, host_ids):
        self._runner.count_move(block_ids, host_ids)
        for host_id, row in zip(host_ids, self._runner.read_blocks(block_ids), strict=True):
            self._rows[host_id] = row.copy()
            self._rows[host_id][:NUM_LAYERS] &= _ROUNDED

    def load_blocks(self, host_ids, block_ids):
        self._runner.count_move(host_ids, block_ids)
        self._runner.write_blocks(np.stack([self._rows[i] for i in host_ids]), block_ids)
        for i in host_ids:
            self._rows[i] = None


@dataclass
class FakeRunner:
    num_blocks: int = 64
    block_size: int = 4
    spec: FakeSpec = field(default_factory=FakeSpec)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    cascade: CascadeThresholds = UNTIMED
    nan_after: int | None = None  # a row whose input is this token yields NaN
    num_host_blocks: int = 0
    num_rounded_blocks: int = 0
    weight_counters: WeightCounters = field(default_factory=WeightCounters)
    block_bytes: int = 64
    failing_moves: set[int] = field(default_factory=set)  # moves, counted from 0
    num_window_blocks: int = 0
    full_step_tokens: float = math.inf
    most_step_tokens: int | None = None
    window_counters: WindowCounters = field(default_factory=WindowCounters)
    num_moves: int = 0
    num_moved_blocks: int = 0
    steps: list[Step] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)
    kv_key: KVKey | None = None
    copied: list[tuple[int, int]] = field(default_factory=list)
    graph_counts: GraphCounts = field(default_factory=GraphCounts)

    def __post_init__(self):
        self.kv_key = KVKey("fake", "uint64", "uint64", self.block_size)
        shape = (NUM_LAYERS, self.num_blocks * self.block_size)
        self._kv = np.random.default_rng(1).integers(0, 2**63, shape).astype(np.uint64)

        self._positions = np.full((self.num_blocks, self.block_size), -1)
        # keys of both layers, and positions, as one table of blocks
        self._host = np.zeros((NUM_LAYERS + 1, self.num_host_blocks, self.block_size), np.uint64)
        self.rounded_tiers = FakeRoundedTiers(self, self.num_rounded_blocks)

    @property
    def tiers(self):
        return self

    def save_blocks(self, block_ids, host_ids):
        self.count_move(block_ids, host_ids)
        pages = self._kv.reshape(NUM_LAYERS, self.num_blocks, self.block_size)
        self._host[:NUM_LAYERS, host_ids] = pages[:, block_ids]
        self._host[NUM_LAYERS, host_ids] = self._positions[block_ids].astype(np.uint64)

    def load_blocks(self, host_ids, block_ids):
        pages = self._kv.reshape(NUM_LAYERS, self.num_blocks, self.block_size)
        # a move that fails has written one half
        pages[:, block_ids[:1]] = 7
        self.count_move(host_ids, block_ids)
        pages[:, block_ids] = self._host[:NUM_LAYERS, host_ids]
        self._positions[block_ids] = self._host[NUM_LAYERS, host_ids].astype(np.int64)
        # restored blocks are never read from the host again
        self._host[:, host_ids] = 3

    def read_blocks(self, block_ids):
        pages = self._kv.reshape(NUM_LAYERS, self.num_blocks, self.block_size)
        positions = self._positions[block_ids].astype(np.uint64)
        return np.concatenate((pages[:, block_ids], positions[None])).swapaxes(0, 1)

    def read_host_blocks(self, host_ids):
        return self._host[:, host_ids].swapaxes(0, 1).copy()

    def write_blocks(self, rows, block_ids):
        pages = self._kv.reshape(NUM_LAYERS, self.num_blocks, self.block_size)
        pages[:, block_ids] = rows[:, :NUM_LAYERS].swapaxes(0, 1)
        self._positions[block_ids] = rows[:, NUM_LAYERS].astype(np.int64)

    def copy_blocks(self, source_ids, target_ids):
        assert len(set(target_ids.tolist())) == len(target_ids) == len(source_ids)
        self.copied += zip(source_ids.tolist(), target_ids.tolist(), strict=True)
        pages = self._kv.reshape(NUM_LAYERS, self.num_blocks, self.block_size)
        pages[:, target_ids] = pages[:, source_ids]
        self._positions[target_ids] = self._positions[source_ids]

    def copy_bytes_per_s(self):
        return 1e9

    def count_move(self, source, target):
        assert len(source) == len(target) == len(set(source.tolist())) == len(set(target.tolist()))
        self.num_moves += 1
        self.num_moved_blocks += len(source)
        if self.num_moves - 1 in self.failing_moves:
            raise RuntimeError("the copy engine has failed")

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        batch = on_device(batch, IndexUploads(self.device), self.device)
        return self._forward(batch)

    def _forward(self, batch):
        plan = batch.attention
        lens = plan.prefill.lens if plan.prefill else ()
        self.steps.append(
            Step(
                num_decode=plan.num_decode,
                num_tokens=len(batch.token_ids),
                chunk_lens=lens,
                num_segments=len(plan.segments),
                is_contiguous=plan.decode.is_contiguous if plan.decode else None,
            )
        )
        slots = batch.slot_mapping.numpy()
        assert len(set(slots.tolist())) == len(slots)
        self._positions.reshape(-1)[slots] = batch.positions.numpy()
        hidden = embed(batch.token_ids.numpy(), batch.positions.numpy())
        for layer in range(NUM_LAYERS):
            own = mix(hidden, 100 + layer)
            self._kv[layer][slots] = own
            hidden = mix(hidden + self._attend(plan, own, self._kv[layer]), layer)
        rows = batch.logits_idx.numpy()
        assert (np.diff(rows) > 0).all()
        logits = torch.zeros(len(rows), self.spec.vocab_size)
        tokens = (hidden[rows] % np.uint64(self.spec.vocab_size)).astype(np.int64)
        logits[torch.arange(len(rows)), torch.from_numpy(tokens)] = 1.0
        if self.nan_after is not None:
            logits[batch.token_ids[batch.logits_idx] == self.nan_after] = float("nan")
        return logits

    def clear_blocks(self, block_ids):
        self.cleared += block_ids.tolist()
        self._kv.reshape(NUM_LAYERS, self.num_blocks, self.block_size)[:, block_ids] = 0

    def _attend(self, plan, own, kv):
        pages = kv.reshape(self.num_blocks, self.block_size)
        out = np.zeros(len(own), np.uint64)
        if plan.decode is not None:
            self._check_decode(plan)
            columns = (plan.decode.block_ids, plan.decode.owners, plan.decode.num_valid)
            for block, owner, valid in zip(*(c.tolist() for c in columns), strict=True):
                out[owner : owner + 1] += pages[block, :valid].sum(dtype=np.uint64)
        if plan.prefill is not None:
            for start, length in zip(plan.prefill.starts, plan.prefill.lens, strict=True):
                out[start : start + length] += np.cumsum(own[start : start + length])
        for part in plan.segments:
            assert 0 <= len(part.block_ids) * self.block_size - part.num_tokens < self.block_size
            first = np.arange(len(part.block_ids)) * self.block_size + part.first_position
            assert (self._positions[part.block_ids.numpy(), 0] == first).all()
            values = pages[part.block_ids.numpy()].reshape(-1)[: part.num_tokens]
            queries = part.query_idx.numpy()
            assert len(set(queries.tolist())) == len(queries)
            out[queries] += values.sum(dtype=np.uint64)
        return out

    def _check_decode(self, plan):
        part = plan.decode
        blocks, valid = part.block_ids.numpy(), part.num_valid.numpy()
        assert (np.diff(blocks) >= 0).all()
        assert part.is_contiguous == (np.diff(blocks) == 1).all()
        assert valid.min() >= 1
        assert (self._positions[blocks, 0] == part.first_positions.numpy()).all()
        assert valid.max() <= self.block_size
        assert set(part.owners.tolist()) == set(range(plan.num_decode))


class FakeSampler:
    """Greedy; fails when slots are misused or a sequence gets wrong tokens."""

    def __init__(self):
        self.tokens = {}
        self.wants_logprobs = {}

    def refusal(self, sampling):
        return ""

    def add(self, slot, sampling, seed, sample_idx, prompt_token_ids, generated):
        assert slot not in self.tokens
        self.tokens[slot] = [*generated]
        self.wants_logprobs[slot] = sampling.logprobs is not None

    def remove(self, slot):
        del self.tokens[slot]

    def sample(self, logits, slots, num_generated):
        is_finite = torch.isfinite(logits.sum(dim=-1)).numpy()
        token_ids = logits.argmax(dim=-1).numpy()
        for slot, count, token_id in zip(slots, num_generated, token_ids, strict=True):
            assert len(self.tokens[slot]) == count
            self.tokens[slot].append(token_id)
        logprobs = None
        if any(self.wants_logprobs[slot] for slot in slots.tolist()):
            logprobs = [
                (np.array([token], np.int32), np.array([-0.5], np.float32))
                if self.wants_logprobs[slot]
                else None
                for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True)
            ]
        return SampleResult(token_ids=token_ids, is_finite=is_finite, logprobs=logprobs)


class FakeStopChecker:
    """Text of a token is its id and a comma."""

    def __init__(self):
        self.texts = {}
        self.stops = {}

    def add(self, slot, sampling, prompt):
        assert slot not in self.texts
        self.texts[slot], self.stops[slot] = ",", sampling.stop

    def remove(self, slot):
        del self.texts[slot]

    def check(self, slot, token_id):
        self.texts[slot] += f"{token_id},"
        return next((s for s in self.stops[slot] if self.texts[slot].endswith(s)), None)


def make_request(request_id, prompt, **sampling):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.asarray(prompt, np.int32),
        sampling=Sampling(**sampling),
    )


def run_all(engine, *, check=True) -> dict[tuple[int, int], Completion]:
    """Step until nothing is left; completions by (request id, sample)."""
    done = {}
    for _ in range(5_000):
        if not engine.num_unfinished():
            return done
        for completion in engine.step():
            key = (completion.request_id, completion.sample_idx)
            assert key not in done
            done[key] = completion
        if check:
            engine.check()
    raise AssertionError("the engine makes no progress")
