"""The fallback backend: models that the native engine has not, token for token as transformers."""

import re

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling

VOCAB_SIZE = 97
LENGTHS = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
STATE = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
MODELS = {
    "learned-positions": transformers.GPT2Config(vocab_size=VOCAB_SIZE, **LENGTHS),
    "parallel-blocks": transformers.GPTNeoXConfig(vocab_size=VOCAB_SIZE, **COMMON),
    "windows": transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE, **COMMON, num_key_value_heads=2, head_dim=8, sliding_window=8
    ),
    "state-space": transformers.MambaConfig(vocab_size=VOCAB_SIZE, **STATE),
    "mixed": transformers.FalconH1Config(
        vocab_size=VOCAB_SIZE,
        **COMMON,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
    ),
}
ENGINE = EngineConfig(dtype="float32", device="cpu")


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request, tmp_path_factory):
    """A model with random weights, and the folder that it was saved to."""
    config = MODELS[request.param]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    return made, path


def backend_of(path, **options):
    return create_backend(str(path), BackendConfig(kind="transformers", options=options), ENGINE)


def request_of(request_id, prompt, **options):
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array(prompt, np.int32),
        sampling=Sampling(max_tokens=10),
        **options,
    )


def answers(backend):
    found = {}
    while backend.num_unfinished():
        found |= {c.request_id: c for c in backend.poll()}
    return found


def expected(made, prompt):
    ids = torch.tensor([prompt])
    out = made.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def test_greedy_answers_are_those_of_generate(model):
    made, path = model
    prompts = [[5, 6, 7], list(range(20, 44)), [9]]
    backend = backend_of(path)
    backend.submit([request_of(i, prompt) for i, prompt in enumerate(prompts)])
    found = answers(backend)
    assert [expected(made, p) for p in prompts] == [found[i].token_ids.tolist() for i in range(3)]


def test_a_shared_prefix_is_computed_once_and_changes_no_answer(model):
    made, path = model
    prefix = list(range(30, 50))
    prompts = [[*prefix, 1, 2], [*prefix, 3], [*prefix, 4, 5, 6]]
    backend = backend_of(path)
    backend.submit(
        [request_of(i, p, group_id=8, prefix_len=len(prefix)) for i, p in enumerate(prompts)]
    )
    found = answers(backend)
    assert [expected(made, p) for p in prompts] == [found[i].token_ids.tolist() for i in range(3)]
    assert [0, len(prefix), len(prefix)] == [found[i].num_cached_tokens for i in range(3)]


def test_a_group_number_with_another_prefix_takes_nothing_over(tmp_path):
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(MODELS["learned-positions"]).eval()
    made.save_pretrained(tmp_path)
    backend = backend_of(tmp_path)
    prompts = [[1, 2, 3, 4, 9], [4, 3, 2, 1, 9]]
    backend.submit([request_of(i, p, group_id=0, prefix_len=4) for i, p in enumerate(prompts)])
    found = answers(backend)
    assert [expected(made, p) for p in prompts] == [found[i].token_ids.tolist() for i in range(2)]


def test_the_context_of_the_config_is_the_limit(model):
    made, path = model
    limit = getattr(made.config, "max_position_embeddings", None)
    assert backend_of(path).capacity().max_model_len == (limit or 1 << 20)


def test_an_unknown_option_is_refused_with_the_one_that_is_meant(tmp_path):
    with pytest.raises(ConfigError, match="attn_implementation"):
        backend_of(tmp_path, attn_implementaton="eager")


def test_a_model_that_transformers_has_not_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="no_such_model"):
        backend_of(tmp_path)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_its_name(tmp_path):
    torch.manual_seed(3)
    made = transformers.AutoModelForCausalLM.from_config(MODELS["learned-positions"])
    made.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    # tied weights are stored once, and are not missing
    assert "lm_head.weight" not in tensors
    name = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.bias"))
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"lacks 1 tensors .*{re.escape(name)}"):
        backend_of(tmp_path)
