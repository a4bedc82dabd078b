"""Which engines have CUDA graphs, and whole engines with graphs."""

import logging
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.graph_sizes import GraphSizes
from raybatch.engine.forward.step_graphs import GraphSetup, StepBuffers, graph_shape, plan_graphs
from raybatch.engine.loading.loaded_model import load_model, resolve
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import allocate_kv_cache, kv_bytes_per_token
from raybatch.engine.sampling.sampler import Sampler
from raybatch.engine.sequences.table import DECODE
from raybatch.errors import ConfigError
from raybatch.kernels.dispatch import REFERENCE
from raybatch.models.config import read_model_spec
from raybatch.policy.cost.cascade import CascadeThresholds
from raybatch.records.types import Request, Sampling
from tests.engine.fakes import FakeStopChecker
from tests.engine.fixed_ops import FIXED
from tests.engine.forward.graph_cases import saved
from tests.engine.forward.recorded_graphs import RecordedGraphs
from tests.engine.lazy_queue import LazyQueue
from tests.tiers import some

CHECKS_TYPES = pytest.mark.skipif(
    find_spec("pydantic_core") is None, reason="pydantic checks the types of options"
)
BLOCK = 4
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VARIANTS = ["llama", "mistral-window", "qwen3-moe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with saved(VARIANTS, tmp_path_factory.mktemp("models")) as folder:
        yield folder


@pytest.fixture
def spec(folder):
    return read_model_spec(folder / "llama")


class EveryOther:
    """Drafts two tokens for each decoding sequence: the expected one and 7."""

    def __init__(self, table, expected):
        self.table, self.expected = table, expected

    def propose(self):
        drafts = {}
        for slot in np.flatnonzero(self.table.phase == DECODE).tolist():
            known = len(self.table.generated(slot))
            answer = self.expected[self.table.record(slot).request.request_id]
            if known < len(answer):
                drafts[slot] = [answer[known], 7]
        return drafts

    def add(self, slot): ...

    def remove(self, slot): ...

    def note_step(self, num_rows, seconds): ...


def make_engine(path, *, has_graphs, num_blocks=80, make_drafter=None, queue=None, **options):
    """An engine on a CPU that records the graphs which a GPU would capture."""
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size_tokens=BLOCK,
        tune_malloc=False,
        **{"max_num_seqs": 6, "max_batched_tokens": 20, "max_model_len": 128, **options},
    )
    model = load_model(str(path), config)
    spec = model.spec
    cache = allocate_kv_cache(
        spec, num_blocks=num_blocks + 1, block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    decoder = Decoder(spec, model.weights)
    graphs = None
    if has_graphs:
        setup = GraphSetup(shape=graph_shape(config, spec), ops=FIXED, is_required=True)
        graphs = setup.capture(spec, model.weights, cache, decoder, graphs=RecordedGraphs())
    runner = ModelRunner(
        spec=spec, config=config, decoder=decoder, cache=cache, graphs=graphs, num_scrap_blocks=1
    )
    assert num_blocks == runner.num_blocks
    sampler = Sampler(spec.vocab_size, config.max_num_seqs, spec.eos_token_ids)
    return Engine(
        runner, sampler, FakeStopChecker(), config, make_drafter=make_drafter, queue=queue
    )


def answers(engine, prompts, *, temperature=0.0, group_ids=None, prefix_len=0):
    engine.add(
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=10 + i % 5, temperature=temperature),
            seed=i,
            group_id=None if group_ids is None else group_ids[i],
            prefix_len=prefix_len,
        )
        for i, prompt in enumerate(prompts)
    )
    found = {}
    while engine.num_unfinished():
        for completion in engine.step():
            assert not completion.error
            found[completion.request_id] = completion.token_ids.tolist()
    engine.check()
    return found


def random_prompts(seed, count=9, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 211, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("variant", "temperature"), some([("qwen3-moe", 0.8), *((name, 0.0) for name in VARIANTS)], 2)
)
def test_an_engine_with_graphs_gives_the_same_answers(variant, temperature, folder):
    plain = make_engine(folder / variant, has_graphs=False)
    graphed = make_engine(folder / variant, has_graphs=True)
    prompts = random_prompts(1)
    expected = answers(plain, prompts, temperature=temperature)
    assert expected == answers(graphed, prompts, temperature=temperature)
    stats = graphed.stats()
    # 1, 2, 4, 6 decoding rows, 6 with shared prefixes, 16 and 20 with prompts, all again with both
    assert 9 == stats.num_graphs
    assert stats.num_steps == stats.num_graph_steps > 0
    assert {} == stats.eager_steps
    assert (0, 0, {}) == (plain.stats().num_graphs, plain.stats().num_graph_steps, {})


def test_tokens_that_stay_on_the_device_reach_graphs_and_plain_steps(folder):
    prompts = random_prompts(5)
    expected = answers(make_engine(folder / "llama", has_graphs=False), prompts)
    for has_graphs in (False, True):
        queue = LazyQueue()
        engine = make_engine(folder / "llama", has_graphs=has_graphs, queue=queue)
        assert expected == answers(engine, prompts)
        assert len(queue.waits) > 10


def test_sequences_that_give_up_their_kv_get_the_same_answers(folder):
    plain = make_engine(folder / "llama", has_graphs=False)
    tight = make_engine(folder / "llama", has_graphs=True, num_blocks=18)
    prompts = random_prompts(7, count=8, longest=24)
    assert answers(plain, prompts) == answers(tight, prompts)
    assert tight.stats().num_preemptions > 0
    assert tight.stats().num_graph_steps > 0


@pytest.mark.parametrize("variant", some(["mistral-window", "llama"]))
def test_a_prefix_that_rows_share_is_read_once_and_in_a_graph(variant, folder, monkeypatch):
    reads = CascadeThresholds(num_rows=(2,), min_tokens=(8,))
    defaults = ModelRunner.__init__.__kwdefaults__ | {"cascade": reads}
    monkeypatch.setattr(ModelRunner.__init__, "__kwdefaults__", defaults)
    rng = np.random.default_rng(3)
    prefix = rng.integers(1, 211, 7 * BLOCK).tolist()
    prompts = [prefix + rng.integers(1, 211, 3).tolist() for _ in range(6)]
    shared = {"group_ids": [0] * 6, "prefix_len": len(prefix)}
    expected = answers(make_engine(folder / variant, has_graphs=False), prompts, **shared)
    graphed = make_engine(folder / variant, has_graphs=True)
    seen = []
    pick = GraphSizes.pick
    monkeypatch.setattr(GraphSizes, "pick", lambda *args: seen.append(args[1]) or pick(*args))
    assert expected == answers(graphed, prompts, **shared)
    assert {} == graphed.stats().eager_steps
    # decodes alone, and together with chunks
    runs = [(size.segment_items > 0, size.chunk_items > 0) for size in seen]
    assert {(True, False), (True, True), (False, True)} <= set(runs)


def test_drafts_are_rows_of_a_graph(folder):
    prompts = random_prompts(4, count=4)
    expected = answers(make_engine(folder / "llama", has_graphs=False), prompts)
    graphed = make_engine(
        folder / "llama",
        has_graphs=True,
        max_num_seqs=16,
        speculative_tokens=2,
        make_drafter=lambda table: EveryOther(table, expected),
    )
    assert expected == answers(graphed, prompts)
    stats = graphed.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_drafted_tokens
    assert {} == stats.eager_steps


def test_graphs_that_cannot_be_captured_are_logged_and_left_out(folder, caplog):
    config = EngineConfig(device="cpu", dtype="float32", tune_malloc=False, max_num_seqs=2)
    model = load_model(str(folder / "qwen3-moe"), config)
    cache = allocate_kv_cache(
        model.spec, num_blocks=4, block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    decoder = Decoder(model.spec, model.weights)
    setup = GraphSetup(shape=graph_shape(config, model.spec), ops=REFERENCE)
    parts = (model.spec, model.weights, cache, decoder)
    with caplog.at_level(logging.WARNING):
        assert setup.capture(*parts, graphs=RecordedGraphs()) is None
    assert "running without CUDA graphs: " in caplog.text
    with pytest.raises(ConfigError, match=r"engine\.cuda_graphs=true, .* capturing failed"):
        replace(setup, is_required=True).capture(*parts, graphs=RecordedGraphs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"cuda_graphs": 1},
            'cuda_graphs must be true or false, "auto" or none, got 1',
            marks=CHECKS_TYPES,
        ),
        pytest.param(
            {"cuda_graphs": "yes"},
            'cuda_graphs must be true or false, "auto" or none',
            marks=CHECKS_TYPES,
        ),
        ({"cuda_graphs": True, "device": "cpu"}, "device is 'cpu'"),
        ({"cuda_graphs": True, "kv_offload": True, "host_kv_bytes": 8}, "leave one of them out"),
    ],
)
def test_graphs_that_no_device_supports_are_refused_with_the_config(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_an_engine_without_a_gpu_refuses_requested_graphs(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = EngineConfig(cuda_graphs=True, tune_malloc=False, kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match="the engine runs on cpu, and they need CUDA"):
        ModelRunner.load(str(folder / "llama"), config)


def test_graphs_are_the_default_on_cuda_with_kernels_of_fixed_shapes(spec):
    made = plan_graphs(EngineConfig(), spec, CUDA, ops=FIXED)
    assert (FIXED, False) == (made.ops, made.is_required)
    assert (1024, 2048) == (made.shape.max_rows, made.shape.mixed[-1])
    assert plan_graphs(EngineConfig(cuda_graphs=True), spec, CUDA, ops=FIXED).is_required
    assert plan_graphs(EngineConfig(cuda_graphs=False), spec, CUDA, ops=FIXED) is None
    assert plan_graphs(EngineConfig(), spec, CPU, ops=FIXED) is None
    offloaded = EngineConfig(kv_offload=True, host_kv_bytes=1 << 20)
    assert plan_graphs(offloaded, spec, CUDA, ops=FIXED) is None
    for option in ("quantization", "kv_cache_dtype"):
        assert plan_graphs(EngineConfig(**{option: "int8"}), spec, CUDA, ops=FIXED) is not None
    assert plan_graphs(EngineConfig(), spec, CUDA, ops=FIXED, is_streamed=True) is None
    assert plan_graphs(EngineConfig(), spec, CUDA, ops=REFERENCE) is None
    with pytest.raises(ConfigError, match=r"they need Triton's kernels"):
        plan_graphs(EngineConfig(cuda_graphs=True), spec, CUDA, ops=REFERENCE)


def test_steps_are_as_large_as_the_options_allow(spec):
    config = EngineConfig(max_num_seqs=40, max_batched_tokens=24, block_size_tokens=16)
    shape = graph_shape(config, spec)
    assert (24, 512 // 16) == (shape.max_rows, shape.max_row_blocks)
    assert 7 == graph_shape(replace(config, max_model_len=100), spec).max_row_blocks


def test_graphs_and_their_scrap_block_reduce_the_memory_for_kv(spec):
    config = EngineConfig(block_size_tokens=BLOCK, dtype="float32")
    token_bytes = kv_bytes_per_token(spec, torch.float32)
    setup = plan_graphs(config, spec, CUDA, ops=FIXED)
    graph_bytes = setup.needed_bytes(spec, torch.float32)
    buffers = StepBuffers.bytes_of(setup.shape.sizes().all(), spec, torch.float32)
    assert graph_bytes > buffers > 1024 * spec.vocab_size * 4
    free = (graph_bytes + 10 * BLOCK * token_bytes) / 0.9

    def blocks(config, **options):
        return resolve(config, spec, CUDA).count_blocks(
            config, free_bytes=round(free) + 1, **options
        )

    assert 9 == blocks(config, num_scrap_blocks=1, reserved_bytes=graph_bytes)
    fixed = replace(config, kv_cache_bytes=10 * BLOCK * token_bytes)
    assert (10, 9) == (blocks(fixed), blocks(fixed, num_scrap_blocks=1, reserved_bytes=graph_bytes))
