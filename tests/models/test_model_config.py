import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.models.json_files import SAME_MODEL, backends_for

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def read(path: Path, architecture: str, **options: Any) -> ModelSpec:
    config = {"architectures": [architecture], **SIZES, **options}
    (path / "config.json").write_text(json.dumps(config))
    return read_model_spec(path)


def test_an_unknown_architecture_is_named_with_the_supported_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"Qwen2MoeForCausalLM is not supported.*Qwen3MoeForC"):
        read(tmp_path, "Qwen2MoeForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Phi3ForCausalLM", "set backend: vllm, or backend: transformers"),
        ("Gemma2ForCausalLM", "set backend: vllm, or backend: transformers"),
        ("GPT2LMHeadModel", "set backend: vllm, or backend: transformers"),
        ("Gemma3ForConditionalGeneration", "set backend: vllm, which runs many models of text and"),
        ("BertModel", "backend: vllm and task: embed, classify or score"),
    ],
)
def test_a_refused_architecture_names_a_backend_that_runs_it(tmp_path, architecture, expected):
    with pytest.raises(ConfigError, match=f"{architecture} is not supported .*{expected}"):
        read(tmp_path, architecture)


def test_every_causal_model_of_transformers_names_that_backend():
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    causal = [name for name in names if name.endswith(("ForCausalLM", "LMHeadModel"))]
    assert len(causal) > 100
    assert {backends_for([name]) for name in causal} == {SAME_MODEL}


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_act": "gelu"},
        {"quantization_config": {"bits": 4}},
        {"rope_scaling": {"rope_type": "longrope"}},
        {"rope_scaling": {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"dtype": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_an_unsupported_option_names_the_backend_that_has_it(tmp_path, options):
    with pytest.raises(ConfigError, match=r"by the native engine.* set backend: vllm"):
        read(tmp_path, "LlamaForCausalLM", **options)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_spec(tmp_path)


def test_a_config_without_an_architecture_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json has no 'architectures'"):
        read_model_spec(tmp_path)


def test_broken_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"num_key_value_heads": 3}, "divide evenly"),
        ({"vocab_size": None}, "vocab_size must be"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers must be at most 10000"),
        ({"rms_norm_eps": "x"}, "config.json: rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps must be a finite number"),
        ({"rope_theta": 0}, "config.json: rope_theta must be a finite number above 0, got 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "config.json: factor must be a"),
        ({"rope_scaling": [4]}, "config.json: RoPE options must be an object"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_options_the_engine_cannot_run_are_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, "LlamaForCausalLM", **options)


def test_more_experts_per_token_than_experts_are_refused(tmp_path):
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 4}
    with pytest.raises(ConfigError, match=r"num_experts_per_tok must be within 1\.\.2"):
        read(tmp_path, "MixtralForCausalLM", **sizes)


def test_end_tokens_come_from_both_files(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert read(tmp_path, "LlamaForCausalLM", eos_token_id=9).eos_token_ids == (5, 7, 9)


def test_a_model_may_have_no_end_token(tmp_path):
    assert read(tmp_path, "Qwen3ForCausalLM").eos_token_ids == ()


def test_head_dim_follows_from_the_heads_unless_given(tmp_path):
    assert read(tmp_path, "LlamaForCausalLM").head_dim == 8
    assert read(tmp_path, "LlamaForCausalLM", head_dim=32).head_dim == 32


def test_missing_kv_heads_mean_one_per_query_head(tmp_path):
    assert read(tmp_path, "LlamaForCausalLM", num_key_value_heads=None).num_kv_heads == 8


def test_mistral_windows_cover_all_layers(tmp_path):
    assert read(tmp_path, "MistralForCausalLM", sliding_window=64).windows == (64,) * 4


def test_qwen_windows_need_the_switch(tmp_path):
    assert read(tmp_path, "Qwen2ForCausalLM", sliding_window=64).windows == (None,) * 4


def test_qwen_windows_start_at_the_given_layer(tmp_path):
    spec = read(
        tmp_path,
        "Qwen3ForCausalLM",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=3,
    )
    assert spec.windows == (None, None, None, 64)


def test_layer_types_decide_the_windows(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = read(
        tmp_path, "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64, layer_types=kinds
    )
    assert spec.windows == (64, None, 64, None)


def test_unknown_layer_types_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="layer_types"):
        read(
            tmp_path,
            "Qwen2ForCausalLM",
            use_sliding_window=True,
            layer_types=["linear_attention"] * 4,
        )


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_the_number_of_experts_has_two_names(key, tmp_path):
    moe = read(tmp_path, "Qwen3MoeForCausalLM", **{key: 12}).moe
    assert moe is not None
    assert moe.num_experts == 12


def test_sparse_layers_follow_step_and_exceptions(tmp_path):
    spec = read(tmp_path, "Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3])
    assert [spec.is_sparse(i) for i in range(4)] == [False, True, False, False]


def test_yarn_extends_the_longest_context(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    spec = read(tmp_path, "Qwen3ForCausalLM", rope_theta=1e6, rope_scaling=scaling)
    assert (spec.max_model_len, spec.rope.theta, spec.rope.kind) == (4096, 1e6, "yarn")


def test_old_and_new_rope_keys_mean_the_same(tmp_path):
    options = {"factor": 2.0, "rope_type": "linear"}
    old = read(tmp_path, "LlamaForCausalLM", rope_theta=5e5, rope_scaling=options)
    new = read(tmp_path, "LlamaForCausalLM", rope_parameters={**options, "rope_theta": 5e5})
    assert old.rope == new.rope
