import dataclasses
import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.loading.loaded_model import resolve
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import (
    allocate_kv_cache,
    free_memory_bytes,
    host_memory_bytes,
    kv_bytes_per_token,
)
from raybatch.engine.weights.layout import WeightForm, tensors_of
from raybatch.engine.weights.loading import load_weights, prepare_weights
from raybatch.errors import CapacityError, ConfigError
from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart
from raybatch.kernels.dispatch import REFERENCE
from raybatch.kernels.linear import embed_tokens
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.models.config import read_model_spec
from tests.engine.tiny_models import build

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build("qwen3").save_pretrained(path)
    return path


def test_prepared_weights_are_written_once(path):
    spec = read_model_spec(path)
    first = prepare_weights(path, spec, WeightForm(torch.float32))
    stamp = first.stat().st_mtime_ns
    assert prepare_weights(path, spec, WeightForm(torch.float32)) == first
    assert first.stat().st_mtime_ns == stamp


def test_each_dtype_has_its_own_prepared_file(path):
    spec = read_model_spec(path)
    forms = [WeightForm(dtype) for dtype in (torch.float32, torch.bfloat16)]
    files = {prepare_weights(path, spec, form) for form in forms}
    assert len(files) == 2


def test_each_layout_has_its_own_prepared_file(path):
    spec = read_model_spec(path)
    forms = [WeightForm(torch.float32, panel_width=width) for width in (None, 16, 32)]
    forms.append(WeightForm(torch.float32, panel_width=32, byte_dtype=torch.int8))
    files = {prepare_weights(path, spec, form) for form in forms}
    assert len(files) == 4


def test_a_tied_table_is_stored_in_panels_once(tmp_path):
    build("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    plain = load_weights(tmp_path, spec, WeightForm(torch.float32), device=CPU)
    panelled = load_weights(tmp_path, spec, WeightForm(torch.float32, panel_width=32), device=CPU)
    assert panelled.embed.data_ptr() == panelled.head.weight.data_ptr()
    token_ids = torch.tensor([0, 31, 32, spec.vocab_size - 1])
    assert torch.equal(embed_tokens(token_ids, panelled.embed), plain.embed[token_ids])
    assert panelled.head.num_outputs == spec.vocab_size


def test_an_untied_table_stays_rows_with_a_head_in_panels(path):
    weights = load_weights(
        path, read_model_spec(path), WeightForm(torch.float32, panel_width=32), device=CPU
    )
    assert (weights.embed.dim(), weights.head.weight.dim()) == (2, 3)


def test_prepared_tensors_start_at_cache_lines(path):
    weights = load_weights(path, read_model_spec(path), WeightForm(torch.float32), device=CPU)
    assert weights.layers[0].attention.qkv.weight.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "damaged",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content.replace(b'"norm"', b'"morm"', 1),
        lambda content: content.replace(b'"I8"', b'"U8"', 1),
    ],
    ids=["cut", "another name", "another type"],
)
def test_a_damaged_prepared_file_is_made_again(path, damaged, caplog):
    spec = read_model_spec(path)
    form = WeightForm(torch.float32, panel_width=32, byte_dtype=torch.int8)
    whole = load_weights(path, spec, form, device=CPU)
    expected = [tensor.clone() for tensor in tensors_of(whole)]
    file = prepare_weights(path, spec, form)
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(damaged(content))
    with caplog.at_level(logging.WARNING, "raybatch"):
        again = tensors_of(load_weights(path, spec, form, device=CPU))
    assert "rebuilding the damaged file" in caplog.text
    assert file.read_bytes() == content
    assert all(torch.equal(one, other) for one, other in zip(again, expected, strict=True))


def test_no_temporary_file_stays_behind(path, own_cache):
    prepare_weights(path, read_model_spec(path), WeightForm(torch.float32))
    assert not list((own_cache / "weights").glob("*.tmp"))


@pytest.mark.parametrize(
    "form",
    [
        WeightForm(torch.float32),
        WeightForm(torch.float32, panel_width=32),
        WeightForm(torch.float32, panel_width=32, byte_dtype=torch.int8),
    ],
    ids=["matrices", "panels", "bytes"],
)
def test_an_unusable_cache_folder_falls_back_to_private_weights(path, form, own_cache, caplog):
    own_cache.write_text("a file where the folder should be")
    spec = read_model_spec(path)
    with caplog.at_level(logging.WARNING, "raybatch"):
        private = load_weights(path, spec, form, device=CPU)
    own_cache.unlink()
    mapped = load_weights(path, spec, form, device=CPU)
    for one, other in zip(tensors_of(private), tensors_of(mapped), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert str(own_cache) in caplog.text


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(path):
    spec = dataclasses.replace(read_model_spec(path), has_qkv_bias=True)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj\.bias"):
        load_weights(path, spec, WeightForm(torch.float32), device=CPU)


def _prepare_in_child(path: Path, queue: "multiprocessing.Queue[str]") -> None:
    queue.put(str(prepare_weights(path, read_model_spec(path), WeightForm(torch.float32))))


# Python 3.12 warns; three new processes that import torch would be ten times slower
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_processes_that_race_agree_on_one_file(path, own_cache):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_prepare_in_child, args=(path, queue)) for _ in range(3)]
    for child in children:
        child.start()
    names = {queue.get(timeout=30) for _ in children}
    for child in children:
        child.join()
    assert names == {str(f) for f in (own_cache / "weights").glob("*.safetensors")}


def test_a_token_of_kv_counts_keys_and_values_of_all_layers(path):
    assert kv_bytes_per_token(read_model_spec(path), torch.float32) == 2 * 3 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("config", "num_engines", "num_blocks"),
    [
        (EngineConfig(kv_cache_bytes=10 * 64 * 1536 + 5), 3, 10),
        (EngineConfig(), 1, 500),
        (EngineConfig(), 2, 250),
        (EngineConfig(max_num_seqs=4), 1, 32),
        (EngineConfig(max_num_seqs=4, max_model_len=65), 1, 8),
    ],
)
def test_the_pool_is_as_large_as_memory_and_use_allow(config, num_engines, num_blocks, path):
    actual = resolve(config, read_model_spec(path), CPU).count_blocks(
        config, free_bytes=1000 * 64 * 1536, num_engines_on_host=num_engines
    )
    assert num_blocks == actual


def blocks_of_a_host(path, config, host_bytes, device=CPU):
    resolved = resolve(replace(config, dtype="float32"), read_model_spec(path), device)
    return resolved.count_blocks(config, free_bytes=0, host_bytes=host_bytes)


def test_a_pool_cut_to_what_rows_can_use_is_compared_with_host_memory(path):
    # 4 rows of 8 blocks of 64 tokens
    config, cut = EngineConfig(kv_cache_bytes=10**15, max_num_seqs=4), 32 * 64 * 1536
    assert 32 == blocks_of_a_host(path, config, cut) == blocks_of_a_host(path, config, None)
    message = rf"kv_cache_bytes is {10**15}.* {cut}, but .* {cut - 1} bytes"
    with pytest.raises(ConfigError, match=message):
        blocks_of_a_host(path, config, cut - 1)
    # a GPU has separate memory
    assert 32 == blocks_of_a_host(path, config, 1, torch.device("cuda"))


def test_an_engine_checks_host_memory_before_it_allocates_a_pool(path, tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000\n")
    monkeypatch.setattr("raybatch.engine.memory.kv_cache._CGROUP", tmp_path)
    assert 1000000 == host_memory_bytes()
    config = EngineConfig(device="cpu", kv_cache_bytes=10**15)
    with pytest.raises(ConfigError, match=r"kv_cache_bytes.* 1000000 bytes"):
        ModelRunner.load(str(path), config)
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes() >= free_memory_bytes(CPU)
    assert 1024 * 8 == ModelRunner.load(str(path), config).num_blocks


def test_memory_for_no_block_is_an_error_with_the_numbers(path):
    config = EngineConfig(kv_cache_bytes=2 * 1536)
    resolved = resolve(config, read_model_spec(path), CPU)
    with pytest.raises(CapacityError, match="kv_cache_bytes") as caught:
        resolved.count_blocks(config, free_bytes=0)
    assert (caught.value.needed_tokens, caught.value.available_tokens) == (64, 2)


def test_a_new_pool_holds_zeros(path):
    spec = read_model_spec(path)
    cache = allocate_kv_cache(spec, num_blocks=3, block_size=4, dtype=torch.bfloat16, device=CPU)
    assert cache.k.shape == cache.v.shape == (3, 3, 2, 4, 32)
    assert not cache.k.any()
    assert not cache.v.any()


@pytest.fixture
def runner(path: Path) -> ModelRunner:
    config = EngineConfig(
        kv_cache_bytes=8 << 20, block_size_tokens=16, tune_malloc=False, device="cpu"
    )
    return ModelRunner.load(str(path), config)


def test_a_runner_logs_its_pool_and_device(runner):
    assert (runner.num_blocks, runner.device) == ((8 << 20) // 16 // 1536, CPU)


@pytest.mark.parametrize(
    "options",
    [{"compile_kernels": False}, {"num_threads": 2}, {"dtype": "bfloat16"}],
    ids=["switched off", "threads", "dtype"],
)
def test_attention_is_compiled_only_for_float32_on_one_thread(path, options):
    def form(**options):
        config = EngineConfig(kv_cache_bytes=8 << 20, tune_malloc=False, device="cpu", **options)
        return ModelRunner.load(str(path), config).decoder.ops

    spec = read_model_spec(path)
    grouped = spec.num_heads // spec.num_kv_heads
    shape = {
        "head_dim": spec.head_dim,
        "num_grouped": grouped,
        "block_size": 64,
        "kv_dtype": torch.float32,
    }
    if decode_form(**shape) is None:
        pytest.skip("no C compiler here")
    try:
        assert form(**options) is REFERENCE
    finally:
        torch.set_num_threads(1)
    assert form().prepare_attention.keywords == {"decode": decode_form(**shape)}


def make_batch(num_tokens: int, logits_idx: list[int]) -> ForwardBatch:
    positions = torch.arange(num_tokens)
    return ForwardBatch(
        token_ids=positions + 5,
        positions=positions,
        slot_mapping=positions,
        logits_idx=torch.tensor(logits_idx, dtype=torch.int64),
        attention=AttentionPlan(
            num_decode=0,
            decode=None,
            prefill=PrefillPart(starts=(0,), lens=(num_tokens,)),
            segments=(),
        ),
    )


def test_logits_are_float32_for_the_requested_rows(runner):
    every_row = runner.forward(make_batch(7, list(range(7))))
    some_rows = runner.forward(make_batch(7, [2, 6]))
    assert (every_row.dtype, every_row.shape) == (torch.float32, (7, 211))
    torch.testing.assert_close(some_rows, every_row[[2, 6]])


def test_a_step_may_request_no_logits(runner):
    assert runner.forward(make_batch(7, [])).shape == (0, 211)


def test_a_context_longer_than_the_models_is_refused(path):
    with pytest.raises(ConfigError, match="max_model_len is 9999"):
        ModelRunner.load(str(path), EngineConfig(max_model_len=9999))


def test_an_unknown_device_is_refused(path):
    with pytest.raises(ConfigError, match=r"engine\.device must be a name .* got 'quantum'"):
        ModelRunner.load(str(path), EngineConfig(device="quantum"))
