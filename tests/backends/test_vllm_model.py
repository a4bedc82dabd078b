import json

import pytest

from raybatch.backends.vllm_model import model_length
from raybatch.errors import ConfigError
from tests.engine.tiny_models import build


def write(folder, **config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("variant", "length"),
    [
        ("llama", 512),
        ("llama-rope-linear", 1280),
        ("llama-rope-llama3", 512),
        ("qwen3-rope-yarn", 512),
    ],
)
def test_the_length_is_that_of_the_scaled_positions(tmp_path, variant, length):
    build(variant).config.save_pretrained(tmp_path)
    assert model_length(tmp_path) == length


def test_a_default_of_the_architecture_counts(tmp_path):
    assert model_length(write(tmp_path, model_type="gpt2", n_layer=1)) == 1024


def test_the_text_part_of_a_model_with_images_counts(tmp_path):
    text = {"model_type": "qwen2", "max_position_embeddings": 300}
    write(tmp_path, model_type="llava", text_config=text)
    assert model_length(tmp_path) == 300


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"seq_length": 4096, "max_seq_len": 1024}, 1024),
        ({"max_position_embeddings": 64, "model_max_length": 256}, 256),
        ({"text_config": {"n_positions": 77}}, 77),
        ({}, 2048),
    ],
)
def test_a_config_that_transformers_does_not_know_is_read_as_it_lies(tmp_path, config, length):
    assert model_length(write(tmp_path, model_type="newest", **config)) == length


def test_a_folder_without_a_config_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match="pass the folder of a Hugging Face checkpoint"):
        model_length(tmp_path)
