"""Names, shapes and dtypes of a checkpoint's tensors against its config.json; headers only."""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from raybatch.errors import ConfigError
from raybatch.models.checkpoint import check_tensors, needed_tensors, stored_tensors
from raybatch.models.config import read_model_spec

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DOWN = "model.layers.1.mlp.down_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "model")


def write(folder, **options):
    """Write a correct checkpoint."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **options}))
    save_file(tensors_of(folder), folder / "model.safetensors")
    return folder


def tensors_of(folder):
    needed = needed_tensors(read_model_spec(folder), ())
    return {name: np.zeros(shape, np.float16) for name, shape in needed.items()}


def shard(folder):
    """Spread a checkpoint over two files with an index; returns the tensors of each."""
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    parts = {file: {name: tensors[name] for name in part} for file, part in files.items()}
    for file, part in parts.items():
        save_file(part, folder / file)
    where = {name: file for file, part in parts.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return parts


def refusal(folder):
    with pytest.raises(ConfigError) as found:
        check_tensors(folder, read_model_spec(folder))
    assert "\n" not in str(found.value)
    return str(found.value)


def test_a_whole_checkpoint_passes(folder):
    check_tensors(folder, read_model_spec(folder))


@pytest.mark.parametrize("is_native", [True, False])
def test_layers_beyond_config_json_are_logged(folder, caplog, is_native):
    check_tensors(folder, read_model_spec(folder), is_native=is_native)
    assert not caplog.text
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    check_tensors(folder, read_model_spec(folder), is_native=is_native)
    assert "1 unused layers beyond num_hidden_layers=1 of config.json" in caplog.text


def test_a_whole_checkpoint_in_shards_passes(folder):
    shard(folder)
    check_tensors(folder, read_model_spec(folder))


def test_tensors_that_the_model_does_not_need_are_ignored(folder):
    extra = {"model.layers.7.mlp.down_proj.weight": np.zeros(3), "scale": np.zeros(2, np.int8)}
    save_file(tensors_of(folder) | extra, folder / "model.safetensors")
    check_tensors(folder, read_model_spec(folder))


def test_a_tied_head_needs_no_tensor(tmp_path):
    folder = write(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in stored_tensors(folder)
    check_tensors(folder, read_model_spec(folder))


def test_a_missing_head_is_reported_with_the_option_that_needs_it(folder):
    tensors = tensors_of(folder)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    message = refusal(folder)
    assert f"{folder}/model.safetensors has no tensor 'lm_head.weight' of shape [11, 8]" in message
    assert "because tie_word_embeddings is not true there" in message


@pytest.mark.parametrize("name", [DOWN, "model.layers.0.self_attn.q_proj.bias"])
def test_a_missing_tensor_is_named_with_the_only_file(folder, name):
    tensors = tensors_of(folder)
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    message = refusal(folder)
    assert f"{folder}/model.safetensors has no tensor '{name}'" in message
    assert "download the checkpoint again" in message


def test_a_missing_tensor_is_named_with_the_shard_of_the_index(folder):
    parts = shard(folder)
    file = next(file for file, part in parts.items() if DOWN in part)
    save_file({k: v for k, v in parts[file].items() if k != DOWN}, folder / file)
    assert f"{folder / file} has no tensor {DOWN!r} of shape [8, 12]" in refusal(folder)


def test_a_missing_tensor_that_no_shard_should_have_is_named_with_the_folder(folder):
    parts = shard(folder)
    where = {n: f for f, part in parts.items() for n in part if n != DOWN}
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    for file, part in parts.items():
        save_file({k: v for k, v in part.items() if k != DOWN}, folder / file)
    assert f"{folder} has no tensor {DOWN!r}" in refusal(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    tensors = tensors_of(folder) | {DOWN: np.zeros((7, 12), np.float16)}
    save_file(tensors, folder / "model.safetensors")
    message = refusal(folder)
    assert f"{folder}/model.safetensors: tensor {DOWN!r} has shape [7, 12]" in message
    assert "config.json requires [8, 12];" in message


def test_a_config_of_a_wider_model_is_reported_once_with_the_number_of_tensors(folder):
    config = {**CONFIG, "intermediate_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(folder)
    assert "'model.layers.0.mlp.gate_proj.weight' has shape [12, 8]" in message
    assert "config.json requires [16, 8] (and 5 more);" in message


def test_a_config_with_more_layers_is_reported_by_the_first_tensor(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    assert "has no tensor 'model.layers.2.input_layernorm.weight'" in refusal(folder)


def test_integers_are_no_weights(folder):
    save_file(tensors_of(folder) | {DOWN: np.zeros((8, 12), np.int8)}, folder / "model.safetensors")
    message = refusal(folder)
    assert f"tensor {DOWN!r} has dtype I8, which the native engine does not support" in message


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_other_floats_are_weights(folder, dtype):
    save_file(
        {k: v.astype(dtype) for k, v in tensors_of(folder).items()}, folder / "model.safetensors"
    )
    check_tensors(folder, read_model_spec(folder))


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=["empty", "size", "header", "data"])
def test_a_file_that_was_cut_is_named(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path} is not a complete safetensors file" in refusal(folder)


def test_a_pointer_in_a_clone_is_no_file_of_weights(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    assert "`git lfs pull` in a clone" in refusal(folder)


def test_a_missing_shard_is_named(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()
    assert f"{INDEX} refers to b.safetensors, which is missing" in refusal(folder)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}'],
)
def test_an_invalid_index_is_reported(folder, text):
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_experts_are_known_by_either_form_of_their_names(tmp_path):
    moe = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
    folder = write(tmp_path / "moe", **moe)
    spec = read_model_spec(folder)
    long = "model.layers.0.mlp.experts.0.gate_proj.weight"
    assert long in stored_tensors(folder)
    gate, experts = "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.experts."
    short = needed_tensors(spec, {gate, "model.layers.1.block_sparse_moe.experts.0.w2.weight"})
    assert short["model.layers.1.block_sparse_moe.experts.2.w2.weight"] == (8, 12)
    stacked = needed_tensors(spec, {f"{experts}gate_up_proj", f"{experts}down_proj"})
    assert stacked[f"{experts}gate_up_proj"] == (3, 24, 8)
    assert stacked[f"{experts}down_proj"] == (3, 8, 12)


def test_the_check_loads_no_torch(folder):
    code = (
        "import sys; from pathlib import Path\n"
        "from raybatch.models.checkpoint import check_tensors\n"
        "from raybatch.models.config import read_model_spec\n"
        f"folder = Path({str(folder)!r}); check_tensors(folder, read_model_spec(folder))\n"
        "print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
