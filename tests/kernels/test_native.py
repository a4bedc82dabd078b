import logging
import math
import sys

import pytest
import torch

from raybatch.kernels import dispatch
from raybatch.kernels.attention_plan import DecodePart
from raybatch.kernels.dispatch import REFERENCE, compiled_ops
from raybatch.kernels.native import decode_attention
from raybatch.kernels.native.compiler import compile_library
from raybatch.kernels.native.decode_attention import decode_form

SHAPE = {"head_dim": 16, "num_grouped": 2, "block_size": 8}


@pytest.fixture
def form():
    """The compiled form for `SHAPE`."""
    found = decode_form(**SHAPE)
    if found is None:
        pytest.skip("no C compiler here")
    return found


@pytest.fixture
def fresh():
    """Forget what this process has compiled."""
    decode_attention._load.cache_clear()
    yield
    decode_attention._load.cache_clear()


def one_sequence(num_tokens, scale=1.0):
    """Return q, keys and values of one sequence of two KV heads, and its plan."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = -(-num_tokens // 8)
    q = torch.randn(1, 4, 16, generator=generator) * scale
    keys, values = torch.randn(2, num_blocks, 2, 8, 16, generator=generator)
    part = DecodePart(
        block_ids=torch.arange(num_blocks),
        owners=torch.zeros(num_blocks, dtype=torch.int64),
        num_valid=torch.full((num_blocks,), 8).index_fill(
            0, torch.tensor([num_blocks - 1]), num_tokens - 8 * (num_blocks - 1)
        ),
        is_contiguous=True,
    )
    return q, keys, values, part


def attend(form, q, keys, values, part):
    positions = torch.tensor([int(part.num_valid.sum()) - 1])
    lists = form.plan(part, positions=positions, pool=keys, windows=(None,))
    return form.attend(q, keys, values, lists, None)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 3000.0])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 100])
def test_small_and_huge_scores_are_those_of_torch(form, num_tokens, scale):
    q, keys, values, part = one_sequence(num_tokens, scale)
    output, lse = attend(form, q, keys, values, part)
    for head in range(4):
        key, value = (
            pool[:, head // 2].reshape(-1, 16)[:num_tokens].double() for pool in (keys, values)
        )
        scores = key @ q[0, head].double() / math.sqrt(16)
        expected = scores.softmax(dim=0) @ value
        torch.testing.assert_close(output[0, head].double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            lse[0, head].double(), scores.logsumexp(dim=0), rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize(
    ("place", "bad"),
    [("q", math.nan), ("keys", math.nan), ("values", math.nan), ("values", math.inf)],
)
def test_what_is_not_a_number_is_seen(form, place, bad):
    tensors = dict(zip(("q", "keys", "values", "part"), one_sequence(20), strict=True))
    tensors[place].view(-1)[3] = bad
    output, _ = attend(form, **tensors)
    assert not output[0, :2].isfinite().all()


def test_rows_of_a_wider_projection_are_read_in_place(form):
    q, keys, values, part = one_sequence(20)
    wide = torch.cat((q, torch.full((1, 3, 16), math.nan)), dim=1)
    expected, _ = attend(form, q, keys, values, part)
    assert torch.equal(expected, attend(form, wide[:, :4], keys, values, part)[0])


def test_a_loaded_kernel_leaves_small_numbers_of_the_process_alone(form):
    assert float(torch.tensor(1e-40) * 0.5) != 0.0


@pytest.mark.usefixtures("fresh")
def test_a_host_without_a_compiler_runs_the_references(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "none-such")
    with caplog.at_level(logging.INFO):
        assert compiled_ops(**SHAPE) is REFERENCE
    assert "no C compiler here (CC, cc, gcc or clang)" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_told_with_its_words(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!{sys.executable}\nraise SystemExit('no space left on device')\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert compiled_ops(**SHAPE) is REFERENCE
    assert "decode_attention.c could not be compiled" in caplog.text
    assert "no space left on device" in caplog.text


@pytest.mark.usefixtures("form", "fresh")
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, caplog):
    def other(source, names):
        return compile_library(source, {**names, "BLOCK_SIZE": 7})

    monkeypatch.setattr(decode_attention, "compile_library", other)
    assert dispatch.compiled_ops(**SHAPE) is REFERENCE
    assert "wrong on this host" in caplog.text


def test_a_compiled_form_changes_attention_alone(form):
    ops = compiled_ops(**SHAPE)
    assert ops.prepare_attention.keywords == {"decode": form}
    assert (ops.attend, ops.moe_ffn) == (REFERENCE.attend, REFERENCE.moe_ffn)
