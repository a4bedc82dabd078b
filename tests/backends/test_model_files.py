"""Checks of a model folder: each backend refuses only folders that its engines cannot run."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from raybatch.backends.registry import check_files
from raybatch.config import BackendConfig
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import needed_tensors
from raybatch.models.config import read_model_spec
from tests.stages.support import make_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    folder = make_tokenizer(tmp_path / "model", has_chat_template=False)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    needed = needed_tensors(read_model_spec(folder), ())
    save(folder, {name: np.zeros(shape, np.float32) for name, shape in needed.items()})
    return folder


def save(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def tensors_of(folder):
    needed = needed_tensors(read_model_spec(folder), ())
    return {name: np.zeros(shape, np.float32) for name, shape in needed.items()}


def check(folder, kind, **options):
    check_files(folder, BackendConfig(kind=kind, options=options), reads_template=True)


@pytest.mark.parametrize("kind", ["native", "transformers", "vllm", "fake"])
def test_a_whole_folder_passes(folder, kind):
    check(folder, kind)


@pytest.mark.parametrize("kind", ["native", "transformers", "vllm"])
def test_a_file_that_was_cut_is_refused_for_all(folder, kind):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{path} is not a complete safetensors file"):
        check(folder, kind)


def test_the_load_format_of_vllm_may_need_no_tensors(folder):
    (folder / "model.safetensors").write_bytes(b"")
    check(folder, "vllm", engine_kwargs={"load_format": "dummy"})


def test_a_tensor_of_a_wrong_shape_is_refused_where_the_model_is_known(folder):
    save(folder, tensors_of(folder) | {NORM: np.zeros(7, np.float32)})
    for kind in ("native", "transformers"):
        with pytest.raises(ConfigError, match=rf"{NORM!r} has shape \[7\]"):
            check(folder, kind)
    # vLLM and remote code define other models under the same names
    check(folder, "vllm")
    check(folder, "transformers", trust_remote_code=True)


def test_a_model_that_is_not_known_is_left_to_the_backend(folder):
    config = {**CONFIG, "architectures": ["MambaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    for kind in ("transformers", "vllm"):
        check(folder, kind)
    with pytest.raises(ConfigError, match="MambaForCausalLM is not supported by the native engine"):
        check(folder, "native")


def test_weights_in_integers_are_left_to_backends_that_know_them(folder):
    save(folder, tensors_of(folder) | {NORM: np.zeros(8, np.int8)})
    for kind in ("transformers", "vllm"):
        check(folder, kind)
    with pytest.raises(ConfigError, match="has dtype I8"):
        check(folder, "native")


@pytest.mark.parametrize("text", ["{", "[1]"])
@pytest.mark.parametrize("kind", ["native", "transformers", "vllm"])
def test_a_config_that_cannot_be_read_is_refused_for_all(folder, kind, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json (is not valid JSON|must contain a JSON)"):
        check(folder, kind)


@pytest.mark.parametrize("kind", ["native", "transformers", "vllm", "openai", "fake"])
def test_a_folder_without_a_tokenizer_is_refused_for_all(folder, kind):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        check(folder, kind)
