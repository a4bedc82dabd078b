import pytest
import torch

from raybatch.kernels import moe
from raybatch.kernels.byte_numbers import quantise_weight, weight_scales
from raybatch.kernels.moe import moe_ffn, route
from raybatch.kernels.native.linears import panelled_experts
from tests import tolerances
from tests.oracles import moe_loop

# of two products with a gate between them, and of all experts
TOLERANCE = tolerances.of_sums(torch.float32, 64)


def make_layer(num_experts, model_dim, ffn_dim):
    torch.manual_seed(0)
    router = torch.randn(num_experts, model_dim)
    gate_up = torch.randn(num_experts, 2 * ffn_dim, model_dim) * 0.3
    down = torch.randn(num_experts, model_dim, ffn_dim) * 0.3
    return router, gate_up, down


@pytest.mark.parametrize("norm_topk_prob", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "model_dim", "ffn_dim", "top_k"),
    [(1, 8, 16, 8, 2), (7, 5, 12, 20, 3), (40, 4, 9, 7, 4), (3, 64, 16, 12, 1), (300, 4, 16, 8, 1)],
)
def test_output_equals_one_token_at_a_time(
    num_tokens, num_experts, model_dim, ffn_dim, top_k, norm_topk_prob
):
    router, gate_up, down = make_layer(num_experts, model_dim, ffn_dim)
    x = torch.randn(num_tokens, model_dim)
    expected = moe_loop(x, router, gate_up, down, top_k, norm_topk_prob)
    actual = moe_ffn(x, router, gate_up, down, top_k=top_k, norm_topk_prob=norm_topk_prob)
    tolerances.assert_close(actual, expected, TOLERANCE)


def test_grouped_and_looped_forms_agree(monkeypatch):
    router, gate_up, down = make_layer(6, 16, 8)
    x = torch.randn(20, 16)
    grouped = moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True)
    monkeypatch.setattr(moe, "_LOOP_MIN_TOKENS_PER_EXPERT", 0)
    looped = moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True)
    tolerances.assert_close(grouped, looped, TOLERANCE)


def in_panels(weight, width):
    return weight.view(len(weight), -1, width, weight.shape[2]).mT.contiguous()


@pytest.mark.parametrize("num_tokens", [0, 3, 40, 500])
@pytest.mark.parametrize("panels", ["gate_up", "down", "both"])
def test_weights_in_panels_give_what_matrices_give(num_tokens, panels):
    router, gate_up, down = make_layer(6, 16, 8)
    x = torch.randn(num_tokens, 16)
    expected = moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True)
    gate_up = in_panels(gate_up, 4) if panels != "down" else gate_up
    down = in_panels(down, 8) if panels != "gate_up" else down
    actual = moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True)
    tolerances.assert_close(actual, expected, TOLERANCE)


@pytest.mark.parametrize("num_tokens", [0, 1, 40, 500])
@pytest.mark.parametrize("form", ["matrices", "panels", "bytes", "compiled"])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_parts_of_experts_add_up_to_all_of_them(num_tokens, form, is_chosen):
    router, gate_up, down = make_layer(7, 16, 16)
    x, options = torch.randn(num_tokens, 16), {"top_k": 2, "norm_topk_prob": True}
    expected = moe_ffn(x, router, gate_up, down, **options)
    weights = {"gate_up": gate_up, "down": down}
    if form == "bytes":
        scales = {name: weight_scales(weight, torch.int8) for name, weight in weights.items()}
        weights = {n: quantise_weight(w, scales[n], torch.int8) for n, w in weights.items()}
        weights |= {f"{name}_scales": scale for name, scale in scales.items()}
        expected = moe_ffn(x, router, **weights, **options)
    elif form != "matrices":
        weights = {name: in_panels(weight, 16) for name, weight in weights.items()}
    if form == "compiled":
        options["panelled"] = panelled_experts(16, 16)
        assert options["panelled"] is not None
    if is_chosen:
        found, numbers = route(x, router, 2, True)
        router, options["chosen"] = None, (found, numbers.int())
    made = torch.zeros_like(x)
    for experts in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)):
        part = {name: weight[experts].contiguous() for name, weight in weights.items()}
        made += moe_ffn(x, router, **part, experts=experts, **options)
    tolerances.assert_close(made, expected, TOLERANCE)


def test_experts_without_tokens_are_skipped():
    router, gate_up, down = make_layer(6, 16, 8)
    x = torch.randn(16).expand(5, 16)
    gate_up[[e for e in range(6) if e not in route(x, router, 2, True)[1]]] = float("nan")
    assert moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True).isfinite().all()


def test_an_empty_batch_gives_an_empty_output():
    router, gate_up, down = make_layer(6, 16, 8)
    x = torch.empty(0, 16)
    output = moe_ffn(x, router, gate_up, down, top_k=2, norm_topk_prob=True)
    assert output.shape == (0, 16)


def test_scaled_weights_sum_to_one():
    router = torch.randn(9, 12)
    weights, _ = route(torch.randn(4, 12), router, 3, True)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(4))
