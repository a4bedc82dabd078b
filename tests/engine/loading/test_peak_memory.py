"""The memory of a step beside weights and KV: measured without data, and what the pool leaves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import BatchBuilder, on_device
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.step_graphs import plan_graphs
from raybatch.engine.loading.loaded_model import resolve
from raybatch.engine.loading.peak_memory import largest_prompt, step_peak_bytes
from raybatch.engine.memory.kv_cache import allocate_kv_cache, kv_bytes_per_token
from raybatch.engine.memory.pinned import IndexUploads
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.errors import ConfigError
from raybatch.kernels.attention_plan import PrefixSegment
from raybatch.kernels.dispatch import ops_for
from tests.engine.fakes import make_request
from tests.engine.loading.storage_peak import measure
from tests.kernels.triton.test_triton_meta import DENSE, META, launches, layers_of, weights_of

__all__ = ["launches"]  # a fixture
pytestmark = [pytest.mark.meta, pytest.mark.usefixtures("launches")]

BF16, CUDA = torch.bfloat16, torch.device("cuda:0")
QWEN3_8B = replace(
    DENSE,
    vocab_size=151_936,
    model_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_dim=12_288,
)
QWEN3_32B = replace(QWEN3_8B, model_dim=5120, num_heads=64, ffn_dim=25_600)
NUM_LAYERS = {"8B": 36, "32B": 64}
SPECS = {"8B": QWEN3_8B, "32B": QWEN3_32B}
GPU_BYTES = 79 << 30
LENGTHS = [2048, 8192, 32_768]


def decoder_of(spec, ops):
    return Decoder(spec, weights_of(spec, BF16, None), ops=ops)


def peak_of(spec, config, ops=None):
    """Layers are alike, so that two of them hold as much at once as all."""
    spec = layers_of(spec, 2)
    decoder = decoder_of(spec, ops or ops_for(torch.device("cuda")))
    return step_peak_bytes(decoder, config, spec, kv_dtype=BF16, device=META, measure=measure)


def weight_bytes(spec, num_layers):
    def total(count):
        weights = weights_of(layers_of(spec, count), BF16, None)
        layer = weights.layers[0]
        shard = layer.ffn.shard
        linears = (layer.attention.qkv, layer.attention.o, shard.gate_up, shard.down)
        return count * sum(linear.weight.nbytes for linear in linears) + 2 * weights.embed.nbytes

    return total(num_layers)


@pytest.mark.parametrize("max_len", LENGTHS)
@pytest.mark.parametrize("name", SPECS)
def test_pool_weights_graphs_and_the_largest_step_fit_a_gpu(name, max_len):
    spec = replace(SPECS[name], max_model_len=max_len)
    config = EngineConfig(max_model_len=max_len)
    peak = peak_of(spec, config)
    whole = layers_of(spec, NUM_LAYERS[name])
    free = GPU_BYTES - weight_bytes(spec, NUM_LAYERS[name])
    setup = plan_graphs(config, whole, CUDA, ops=ops_for(torch.device("cuda")))
    graphs = setup.needed_bytes(whole, BF16)
    resolved = resolve(replace(config, dtype="bfloat16"), whole, CUDA)
    num_blocks = resolved.count_blocks(config, free_bytes=free, reserved_bytes=graphs + peak)
    pool = num_blocks * config.block_size_tokens * kv_bytes_per_token(whole, BF16)
    assert pool + graphs + peak < 0.91 * free
    # a whole prompt, at least
    assert pool >= max_len * kv_bytes_per_token(whole, BF16)


class Steps:
    """Steps of a scheduler over random rows, at the limits of a config."""

    def __init__(self, spec, config, seed):
        rng = np.random.default_rng(seed)
        num_blocks = 4000
        self.table = SequenceTable(
            max_slots=config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=config.block_size_tokens,
            max_model_len=spec.max_model_len,
        )
        blocks = BlockManager(num_blocks, config.block_size_tokens)
        self.scheduler = Scheduler(
            blocks, self.table, max_batched_tokens=config.token_budget, enable_prefix_caching=True
        )
        self.builder = BatchBuilder(self.table, num_blocks)
        stem = rng.integers(0, 999, spec.max_model_len // 2)
        for i in range(400):
            count = int(rng.choice([8, 60, 500, 2000, spec.max_model_len // 2]))
            own = rng.integers(0, 999, rng.integers(1, count + 1))
            # prompts are a tree of four levels
            prompt = np.concatenate((stem[: len(stem) * rng.integers(0, 5) // 4], own))
            prompt = prompt[: spec.max_model_len - 40]
            record = Sequence(
                request=make_request(i, prompt), sample_idx=0, arrival=i, max_len=len(prompt) + 30
            )
            self.scheduler.add(record)

    def __iter__(self):
        while self.scheduler.num_waiting or self.table.num_running:
            schedule = self.scheduler.schedule()
            yield self.builder.build(schedule)
            slots = self.scheduler.advance(schedule)
            self.table.append_tokens(slots, np.full(len(slots), 7))
            for slot in slots[self.table.num_tokens[slots] >= self.table.max_len[slots]].tolist():
                self.scheduler.finish(slot)


def test_no_step_of_a_scheduler_takes_more_than_the_largest_ones():
    config = EngineConfig(max_model_len=8192, max_num_seqs=32)
    spec = layers_of(replace(QWEN3_8B, max_model_len=8192), 2)
    peak = peak_of(spec, config)
    decoder = decoder_of(spec, ops_for(torch.device("cuda")))
    cache = allocate_kv_cache(spec, num_blocks=4000, block_size=64, dtype=BF16, device=META)
    found = []
    for number, batch in enumerate(Steps(spec, config, 1)):
        if number % 5 == 0:
            found.append(
                measure(
                    lambda b=batch: decoder.forward(on_device(b, IndexUploads(META), META), cache)
                )
            )
    assert len(found) > 20
    assert max(found) <= peak
    # what is reserved is not far from what is used
    assert peak < 3 * max(found)


def deep_step(batch, num_runs, segment_blocks):
    """The largest prompt, as a leaf of a tree of prefixes so deep."""
    rows = torch.arange(len(batch.token_ids))
    segments = tuple(
        PrefixSegment(
            query_idx=rows,
            block_ids=torch.zeros(segment_blocks, dtype=torch.int64),
            num_tokens=64 * segment_blocks,
        )
        for _ in range(num_runs)
    )
    return replace(batch, attention=replace(batch.attention, segments=segments))


@pytest.mark.parametrize("num_kv_heads", [1, 8])
@pytest.mark.parametrize("max_len", [900, 2048, 8192])
def test_rows_of_many_runs_take_no_more_than_the_largest_step(max_len, num_kv_heads):
    config = EngineConfig(max_model_len=max_len, max_num_seqs=32)
    spec = replace(QWEN3_8B, max_model_len=max_len, num_kv_heads=num_kv_heads)
    spec = layers_of(spec, 2)
    peak = peak_of(spec, config)
    decoder = decoder_of(spec, ops_for(torch.device("cuda")))
    cache = allocate_kv_cache(spec, num_blocks=60, block_size=64, dtype=BF16, device=META)
    prompt = largest_prompt(config, spec)
    assert config.token_budget == len(prompt.token_ids)
    for num_runs, segment_blocks in ((8, 1), (60, 1), (9, 40), (3, 200)):
        step = on_device(deep_step(prompt, num_runs, segment_blocks), IndexUploads(META), META)
        assert measure(lambda b=step: decoder.forward(b, cache)) <= peak


def test_a_step_that_does_not_fit_names_the_options():
    def fails(run):
        raise torch.OutOfMemoryError("no memory")

    spec = layers_of(DENSE, 1)
    decoder = decoder_of(spec, ops_for(torch.device("cuda")))
    with pytest.raises(ConfigError, match=r"2048 tokens \(engine\.max_batched_tokens\).*no memory"):
        step_peak_bytes(decoder, EngineConfig(), spec, kv_dtype=BF16, device=META, measure=fails)
