"""When chunks of prompts attend by torch's `varlen_attn`, with fake device times."""

import logging
import sys
from dataclasses import replace

import pytest
import torch

from raybatch.engine.forward import library_ops, ops_choice
from raybatch.kernels import dispatch
from raybatch.kernels.byte_numbers import INT8
from raybatch.kernels.dispatch import REFERENCE
from raybatch.models.config import ModelSpec, RopeSpec

CPU = torch.device("cpu")
SPEC = ModelSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=100,
    model_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_dim=64,
    rms_eps=1e-6,
    has_qkv_bias=False,
    has_o_bias=False,
    has_mlp_bias=False,
    has_qk_norm=True,
    is_tied=False,
    rope=RopeSpec(),
    windows=(None, 20),
    moe=None,
    eos_token_ids=(),
    max_model_len=4096,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(library_ops, "_CHUNK_TOKENS", 12)
    monkeypatch.setattr(library_ops, "_CACHED_TOKENS", 24)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


def chosen(monkeypatch, *, theirs_s=(0.5, 0.5), dtype=torch.bfloat16, attend=None, **options):
    """Choose with kernels of 1 s per layer; `theirs_s` if prompts begin and continue."""
    ops = replace(REFERENCE, attend=lambda *given: REFERENCE.attend(*given))
    form = replace(ops, attend=attend or (lambda *given: REFERENCE.attend(*given)))
    monkeypatch.setattr(library_ops, "with_varlen", lambda _: form)
    timed = []

    def seconds_of(run):
        assert run().shape[1] == 64
        goes_on = len(run.args[0]) > 4 * 12
        timed.append((run.func is form.attend, goes_on))
        return theirs_s[goes_on] if run.func is form.attend else 1.0

    made = library_ops.with_varlen_attention(
        ops,
        replace(SPEC, **options),
        dtype=dtype,
        kv_dtype=INT8 if dtype == torch.float16 else dtype,
        block_size=8,
        device=CPU,
        seconds_of=seconds_of,
    )
    assert made in (ops, form)
    return made is form, timed


@pytest.mark.parametrize(
    ("theirs_s", "is_taken"),
    [((0.5, 0.5), True), ((0.2, 1.5), True), ((0.8, 1.3), False), ((0.99, 0.99), False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_is_used_if_the_sum_of_times_is_lower(theirs_s, is_taken, dtype, monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        found, timed = chosen(monkeypatch, theirs_s=theirs_s, dtype=dtype)
    assert found == is_taken
    # both kinds of layers in both kinds of steps
    assert 8 == len(timed)
    (message,) = caplog.messages
    assert f"2000.00 ms if prompts begin, varlen_attn {2000 * theirs_s[0]:.2f} ms" in message
    assert f"2000.00 ms if prompts continue, varlen_attn {2000 * theirs_s[1]:.2f} ms" in message
    assert message.startswith(
        "attention within prompt chunks uses " + ("torch's varlen_attn" if is_taken else "kernels")
    )


def test_a_form_that_differs_is_logged_and_not_used(monkeypatch, caplog):
    def attend(*given):
        made = REFERENCE.attend(*given)
        # one row of one kind of layer, if prompts continue
        if len(made) > 4 * 12 and given[-1] == 20:
            made[-1] *= 1.1
        return made

    with caplog.at_level(logging.INFO):
        assert not chosen(monkeypatch, attend=attend)[0]
    assert caplog.messages == [
        "attention within prompt chunks uses kernels; torch's varlen_attn differs by a "
        "relative error of 0.1"
    ]


def test_a_form_that_fails_is_logged_and_not_used(monkeypatch, caplog):
    def attend(*_):
        raise RuntimeError("not on this device")

    with caplog.at_level(logging.INFO):
        assert not chosen(monkeypatch, attend=attend)[0]
    assert "torch's varlen_attn failed: RuntimeError: not on this device" in caplog.text


@pytest.mark.parametrize(
    ("capability", "options"),
    [((7, 5), {}), ((9, 0), {"dtype": torch.float32}), ((9, 0), {"head_dim": 512})],
    ids=str,
)
def test_other_devices_types_and_heads_have_none(capability, options, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with caplog.at_level(logging.INFO):
        assert (False, []) == chosen(monkeypatch, **options)
    assert not caplog.messages


def test_a_torch_without_it_uses_kernels(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.delitem(sys.modules, "raybatch.kernels.triton.varlen", raising=False)
    monkeypatch.delattr("raybatch.kernels.triton.varlen", raising=False)
    assert dispatch.with_varlen(replace(REFERENCE, prepare_fixed=print)) is None


def test_a_library_replaces_only_kernels(monkeypatch):
    requested = []
    kernels = replace(REFERENCE, attend=lambda *given: REFERENCE.attend(*given))

    def with_library(ops, spec, **options):
        requested.append(options)
        return ops

    monkeypatch.setattr(ops_choice, "ops_for", lambda _: kernels)
    monkeypatch.setattr(ops_choice, "with_varlen_attention", with_library)
    weights = type("Weights", (), {"embed": torch.zeros(2, 2, dtype=torch.bfloat16)})
    for agreed in (kernels, REFERENCE):
        monkeypatch.setattr(ops_choice, "agreed_ops", lambda *_, made=agreed, **__: made)
        ops_choice.pick_ops(SPEC, weights, block_size=8, may_compile=True, kv_dtype=INT8)
    assert 1 == len(requested)
    assert (requested[0]["dtype"], requested[0]["kv_dtype"]) == (torch.bfloat16, INT8)
