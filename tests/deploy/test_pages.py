"""Pages for operators: quoted messages are those of the code, calculated figures are right."""

import ast
import json
import math
import re
from pathlib import Path

import pytest
import torch

from raybatch.config import PlanConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.models.checkpoint import needed_tensors
from raybatch.models.config import read_model_spec
from raybatch.planning.shards import SHARD_SCHEMA
from raybatch_submit.manifest import spill_gib_of
from raybatch_submit.options import ManifestOptions
from tests.distributions import DISTRIBUTIONS
from tests.submit.test_kuberay import shape

ROOT = Path(__file__).parents[2]
TROUBLE = (ROOT / "docs/how-to/troubleshooting.md").read_text()
SIZING = (ROOT / "docs/how-to/sizing.md").read_text()
GPUS = (ROOT / "docs/start/on-gpus.md").read_text()
# what a text has where a value is put in
VALUE = "\0"


@pytest.fixture(scope="module")
def code():
    """Every text of the packages, with `VALUE` in the place of values."""
    texts = []
    for path in (path for folder in DISTRIBUTIONS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else VALUE for v in node.values]
                texts.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%(?:\.\d)?[sdfra]", VALUE, node.value))
    return texts


def messages():
    """Return the messages of raybatch that the page explains: the first cells of its tables."""
    ours = TROUBLE.split("What others say:")[0]
    return re.findall(r"^\| `([^`]+)` \|", ours, re.MULTILINE)


def is_said(message, code):
    """Return whether one text of the code has all fixed parts of a message, in order."""
    parts = [part.strip() for part in message.split("...") if part.strip()]
    pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
    return any(pattern.search(text) for text in code)


def test_page_has_twenty_messages():
    assert len(messages()) >= 20


@pytest.mark.parametrize("message", messages())
def test_message_is_one_of_the_code(message, code):
    assert is_said(message, code)


def test_message_that_nobody_says_is_found(code):
    assert not is_said("source ... is not there at all", code)


BASE = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "head_dim": 128,
}
NAMES = {
    "qwen": "Qwen3ForCausalLM",
    "moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}
# kind, hidden size, layers, heads, KV heads, size of an MLP or expert, vocabulary
MODELS = {
    "Qwen3-0.6B": ("qwen", 1024, 28, 16, 8, 3072, 151936),
    "Qwen3-4B": ("qwen", 2560, 36, 32, 8, 9728, 151936),
    "Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 14336, 128256),
    "Qwen3-8B": ("qwen", 4096, 36, 32, 8, 12288, 151936),
    "Qwen3-14B": ("qwen", 5120, 40, 40, 8, 17408, 151936),
    "Mistral-Small-24B": ("mistral", 5120, 40, 32, 8, 32768, 131072),
    "Qwen3-30B-A3B": ("moe", 2048, 48, 32, 4, 768, 151936),
    "Qwen3-32B": ("qwen", 5120, 64, 64, 8, 25600, 151936),
    "Llama-3.3-70B": ("llama", 8192, 80, 64, 8, 28672, 128256),
    "Qwen3-235B-A22B": ("moe", 4096, 94, 64, 4, 1536, 151936),
}
TIED = ("Qwen3-0.6B", "Qwen3-4B")


def spec_of(name, folder):
    kind, hidden, layers, heads, kv_heads, width, vocabulary = MODELS[name]
    config = {
        **BASE,
        "architectures": [NAMES[kind]],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "tie_word_embeddings": name in TIED,
    }
    if kind == "mistral":
        config["sliding_window"] = None
    if kind == "moe":
        experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width}
        config |= {**experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
        config["norm_topk_prob"] = True
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_spec(folder)


def gpus_and_tokens(weight_bytes, kv_bytes):
    """Return the fewest GPUs of 80 GB that leave 50,000 tokens of KV, and the tokens in full."""
    for num_gpus in (1, 2, 4, 8):
        tokens = (num_gpus * (0.9 * 80e9 - 4e9) - weight_bytes) / kv_bytes
        if tokens >= 50_000:
            return num_gpus, f"{round(tokens / 1000)},000"
    raise AssertionError("more than a host has")


def test_table_of_models_has_each_once():
    rows = re.findall(r"^\| ([\w.-]+B) \|", GPUS, re.MULTILINE)
    assert rows == list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_model_takes_the_memory_of_the_table(name, tmp_path):
    spec = spec_of(name, tmp_path)
    parameters = sum(math.prod(shape) for shape in needed_tensors(spec, {}).values())
    kv_bytes = kv_bytes_per_token(spec, torch.bfloat16)
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", GPUS, re.MULTILINE)
    bf16, fp8 = gpus_and_tokens(2 * parameters, kv_bytes), gpus_and_tokens(parameters, kv_bytes)
    weights = f"{2 * parameters / 1e9:.1f}, {parameters / 1e9:.1f} GB"
    assert row.split(" | ") == [
        *(weights, f"{kv_bytes / 1e3:.0f} MB"),
        *(str(bf16[0]), bf16[1], str(fp8[0]), fp8[1]),
    ]


def test_defaults_of_the_head_are_those_of_the_page():
    options = ManifestOptions(ray_version="2")
    assert f"{options.head_cpus} CPUs, {options.head_memory} (default)" in SIZING


def test_shape_of_workers_is_that_of_the_page():
    one = shape({}, gpus_per_pod=8, replicas=8)
    assert (one.num_cpus, one.memory_gib) == (8 * 12, 8 * 96)
    assert one.shared_memory_gib == one.memory_gib * 5 / 16
    assert "12 for each GPU" in SIZING
    assert "96Gi for each GPU" in SIZING
    assert "5/16 of the memory" in SIZING


def test_disk_of_spilled_objects_is_that_of_the_page():
    assert spill_gib_of(1000 << 30, shape({}, replicas=10)) == 450
    assert "4.5 times the rows in memory, divided by the pods" in SIZING


def test_numbers_of_parts_are_those_of_the_page():
    rows = 50_000_000
    assert f"{math.ceil(rows / PlanConfig().unit_rows):,} units" in SIZING


def test_plan_takes_what_the_page_says():
    row_bytes = sum(field.type.bit_width // 8 for field in SHARD_SCHEMA)
    assert f"{row_bytes} bytes a row" in SIZING
