import json
import subprocess
import sys

import pytest
import transformers

from raybatch.backends.vllm import model as vllm_model
from raybatch.backends.vllm.model import model_length, pooled_length
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


# of every kind of position: rotary, scaled, learned, none
MODEL_TYPES = """
    bert bloom cohere2 deepseek_v3 exaone4 falcon gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss
    granite llama minimax mistral mixtral mpt olmo2 opt phi phi3 qwen2 qwen3_moe smollm3 starcoder2
"""


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_config_that_names_its_positions_says_all_that_transformers_would(
    tmp_path, monkeypatch, is_whole
):
    """As a config is saved, and with the defaults written out."""
    folders = []
    for model_type in MODEL_TYPES.split():
        path = tmp_path / model_type / "config.json"
        path.parent.mkdir()
        transformers.CONFIG_MAPPING[model_type]().to_json_file(path, use_diff=not is_whole)
        raw = json.loads(path.read_text())
        if isinstance(raw.get("max_position_embeddings"), int) and "text_config" not in raw:
            folders.append((path.parent, model_length(path.parent)))
    assert len(folders) > (15 if is_whole else 3)

    def as_transformers_reads(folder, *, trust_remote_code):
        loaded = transformers.AutoConfig.from_pretrained(folder)
        return loaded.get_text_config().to_dict()

    monkeypatch.setattr(vllm_model, "_read_config", as_transformers_reads)
    differing = [folder.name for folder, length in folders if model_length(folder) != length]
    assert not differing


def test_such_a_config_is_read_without_transformers(tmp_path):
    write(tmp_path, model_type="llama", max_position_embeddings=300)
    code = (
        "import pathlib, sys; from raybatch.backends.vllm.model import model_length as length;"
        "print(length(pathlib.Path(sys.argv[1])), 'transformers' in sys.modules)"
    )
    reported = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert reported.stdout.split() == ["300", "False"]


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


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({}, 514),
        ({"tokenizer_config.json": '{"model_max_length": 512}'}, 512),
        ({"tokenizer_config.json": '{"model_max_length": 1e30}'}, 514),
        ({"sentence_bert_config.json": '{"max_seq_length": 256}'}, 256),
    ],
)
def test_what_a_pooled_prompt_may_hold_is_what_vllm_reads(tmp_path, files, length):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    config = {"max_position_embeddings": 514, "position_embedding_type": "absolute"}
    assert pooled_length(write(tmp_path, model_type="xlm-roberta", **config)) == length
