import pytest
import torch

from raybatch.kernels.byte_numbers import quantise_weight, weight_scales
from raybatch.kernels.moe import moe_ffn, route
from raybatch.kernels.triton import moe
from tests.kernels.triton.support import DTYPES, assert_close, dtype_name


def make_layer(num_experts, model_dim, ffn_dim, num_tokens, dtype=torch.float32):
    torch.manual_seed(0)
    router = torch.randn(num_experts, model_dim)
    gate_up = torch.randn(num_experts, 2 * ffn_dim, model_dim) * 0.3
    down = torch.randn(num_experts, model_dim, ffn_dim) * 0.3
    x = torch.randn(num_tokens, model_dim)
    return [tensor.to(dtype) for tensor in (x, router, gate_up, down)]


def run(tensors, device, top_k=2, norm_topk_prob=True):
    on_device = [tensor.to(device) for tensor in tensors]
    return moe.moe_ffn(*on_device, top_k=top_k, norm_topk_prob=norm_topk_prob)


def check(tensors, device, top_k=2, norm_topk_prob=True, expected_of=None):
    expected = moe_ffn(
        *(tensor.float() for tensor in expected_of or tensors),
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
    )
    # a product adds up as many roundings as it has terms
    assert_close(run(tensors, device, top_k, norm_topk_prob), expected, factor=4)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_experts_are_chosen_as_the_reference_does(is_normalised, device):
    torch.manual_seed(0)
    x, router = torch.randn(37, 12), torch.randn(11, 12)
    weights, experts = moe.route(x.to(device), router.to(device), 3, is_normalised)
    expected_weights, expected = route(x, router, 3, is_normalised)
    assert expected.tolist() == experts.tolist()
    assert_close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:.*(invalid value|All-NaN):RuntimeWarning")
def test_a_token_of_no_numbers_has_experts_that_exist(device):
    _, experts = moe.route(
        torch.full((3, 4), float("nan"), device=device), torch.ones(5, 4, device=device), 2, True
    )
    assert ((experts >= 0) & (experts < 5)).all()


@pytest.mark.parametrize("max_programs", [128, 2])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 2), (7, 5, 3), (300, 5, 2), (40, 3, 1), (3, 200, 4), (90, 200, 4)],
)
def test_slots_are_sorted_by_expert_and_token(
    num_tokens, num_experts, top_k, max_programs, device, monkeypatch
):
    monkeypatch.setattr(moe, "_SORT_PROGRAMS", max_programs)
    torch.manual_seed(0)
    experts = torch.rand(num_tokens, num_experts).argsort(dim=1)[:, :top_k]
    made = moe.permute(experts.to(device), num_experts)
    order = experts.reshape(-1).sort(stable=True)[1]
    counts = torch.bincount(experts.reshape(-1), minlength=num_experts)
    assert order.tolist() == made.order.tolist()
    assert order.argsort().tolist() == made.places.tolist()
    assert [0, *counts.cumsum(0).tolist()] == made.row_starts.tolist()
    tiles = (counts + made.tile_rows - 1) // made.tile_rows
    assert tiles.cumsum(0).tolist() == made.tile_ends.tolist()


class NotedLaunches:
    """Stands in for a kernel and notes grids and options instead."""

    def __init__(self):
        self.grids, self.options = [], []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *_, **options: self.options.append(options)


@pytest.mark.parametrize("num_tokens", [256, 2048, 8192, 65_536])
def test_what_a_sort_reads_of_counts_does_not_grow_with_the_square_of_the_slots(
    num_tokens, monkeypatch
):
    count, place = NotedLaunches(), NotedLaunches()
    monkeypatch.setattr(moe, "count_kernel", count)
    monkeypatch.setattr(moe, "place_kernel", place)
    moe.permute(torch.zeros(num_tokens, 8, dtype=torch.int32), 128)
    ((num_programs,),) = place.grids
    assert count.grids == place.grids
    # of each program, for 128 experts
    assert num_programs * num_programs * 128 <= max(2_100_000, 8 * num_tokens * 128)


@pytest.mark.parametrize("num_tokens", [32, 64, 100, 256, 500, 1000, 1200])
def test_most_experts_have_room_in_one_tile(num_tokens, monkeypatch):
    for kernel in ("count_kernel", "place_kernel"):
        monkeypatch.setattr(moe, kernel, NotedLaunches())
    torch.manual_seed(0)
    chosen = torch.rand(num_tokens, 128).argsort(dim=1)[:, :8]
    made = moe.permute(chosen, 128)
    counts = torch.bincount(chosen.reshape(-1), minlength=128)
    assert (counts <= made.tile_rows).float().mean() > 0.95


def test_rows_are_weighted_and_returned_to_their_tokens(device):
    torch.manual_seed(0)
    rows, weights, places = torch.randn(10, 33), torch.rand(5, 2), torch.randperm(10)
    expected = (rows[places].view(5, 2, 33) * weights.unsqueeze(2)).sum(1)
    on_device = rows.to(device), weights.to(device), places.to(device, torch.int32)
    made = moe.unpermute(*on_device, torch.tensor([10], dtype=torch.int32, device=device))
    assert_close(made, expected)


def test_rows_that_are_not_there_count_nothing(device):
    rows, places = torch.full((4, 3), float("nan")), torch.tensor([0, 2, 1, 3])
    rows[:2] = 1.0
    on_device = rows.to(device), torch.ones(2, 2, device=device), places.to(device, torch.int32)
    made = moe.unpermute(*on_device, torch.tensor([2], dtype=torch.int32, device=device))
    assert made.tolist() == [[1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("norm_topk_prob", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "model_dim", "ffn_dim", "top_k"),
    [(1, 8, 16, 8, 2), (7, 5, 12, 20, 3), (40, 4, 9, 7, 4), (3, 64, 16, 12, 1), (70, 2, 80, 70, 1)],
)
def test_output_equals_the_reference(
    num_tokens, num_experts, model_dim, ffn_dim, top_k, norm_topk_prob, device
):
    tensors = make_layer(num_experts, model_dim, ffn_dim, num_tokens)
    check(tensors, device, top_k, norm_topk_prob)


@pytest.mark.parametrize("num_programs", [1, 3])
def test_few_programs_take_all_tiles_in_turn(num_programs, device, monkeypatch):
    monkeypatch.setattr(moe, "PRODUCT_PROGRAMS", num_programs)
    check(make_layer(4, 80, 70, 90), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_half_precision_is_close_to_float32(dtype, device):
    check(make_layer(5, 24, 20, 19, dtype), device)


def test_experts_without_tokens_are_not_read(device):
    tensors = make_layer(6, 16, 8, 1)
    x, router, gate_up, down = tensors
    unused = [e for e in range(6) if e not in route(x, router, 2, True)[1]]
    expected = moe_ffn(*tensors, top_k=2, norm_topk_prob=True)
    gate_up[unused] = float("nan")
    down[unused] = float("nan")
    assert_close(run(tensors, device), expected, factor=4)


def test_all_tokens_may_choose_one_expert(device):
    tensors = make_layer(4, 16, 8, 37)
    tensors[0] = tensors[0][:1].expand(37, 16).contiguous()
    check(tensors, device, top_k=1)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_experts_of_bytes_count_as_their_floats(kind, dtype, device):
    x, router, *weights = make_layer(5, 24, 20, 19)
    x, router = x.to(dtype), router.to(dtype)
    scales = [weight_scales(weight, kind) for weight in weights]
    stored = [quantise_weight(*pair, kind) for pair in zip(weights, scales, strict=True)]
    options = {"top_k": 2, "norm_topk_prob": True}
    names = "gate_up_scales", "down_scales"
    expected = moe_ffn(x, router, *stored, **options, **dict(zip(names, scales, strict=True)))
    tensors = [tensor.to(device) for tensor in (x, router, *stored)]
    on_device = {name: of.to(device) for name, of in zip(names, scales, strict=True)}
    assert_close(moe.moe_ffn(*tensors, **options, **on_device), expected.float(), factor=8)


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 2), (19, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_grouped_products_of_torch_give_the_same(num_tokens, top_k, dtype, device):
    tensors = [tensor.to(device) for tensor in make_layer(5, 24, 16, num_tokens, dtype)]
    options = {"top_k": top_k, "norm_topk_prob": True}
    made = moe.moe_ffn(*tensors, **options, min_grouped_rows=num_tokens * top_k)
    assert_close(made, moe_ffn(*(t.cpu().float() for t in tensors), **options), factor=4)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_parts_of_experts_add_up_to_all_of_them(num_tokens, is_chosen, device):
    tensors = make_layer(7, 24, 16, num_tokens)
    options = {"top_k": 2, "norm_topk_prob": True}
    expected = moe_ffn(*tensors, **options)
    x, router, gate_up, down = (tensor.to(device) for tensor in tensors)
    if is_chosen:
        router, options["chosen"] = None, moe.route(x, router, 2, True)
    made = torch.zeros_like(x)
    for experts in (slice(0, None, 3), slice(1, None, 3), slice(2, None, 3)):
        part = gate_up[experts].contiguous(), down[experts].contiguous()
        made += moe.moe_ffn(x, router, *part, experts=experts, **options)
    assert_close(made, expected, factor=8)


def test_slots_of_experts_elsewhere_come_last(device):
    experts = torch.tensor([[1, 4], [2, 5], [0, 1]])
    made = moe.permute(experts.to(device), 2, slice(1, None, 3))
    # slots 0 and 5 of expert 1, slot 1 of expert 4, then all others
    assert made.order.tolist() == [0, 5, 1, 2, 3, 4]
    assert made.row_starts.tolist() == [0, 2, 3, 6]


def test_few_rows_do_not_take_the_grouped_product(device, monkeypatch):
    monkeypatch.setattr(moe, "_grouped", None)
    tensors = [tensor.to(device) for tensor in make_layer(5, 24, 16, 7)]
    moe.moe_ffn(*tensors, top_k=2, norm_topk_prob=True, min_grouped_rows=15)


def in_panels(weight, width):
    return weight.view(len(weight), -1, width, weight.shape[2]).mT.contiguous()


def across(weight):
    return weight.mT.contiguous().mT


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda w: in_panels(w, 4), lambda w: in_panels(w, 8)),
        (lambda w: in_panels(w, 8), lambda w: w),
        (across, across),
    ],
    ids=["panels", "mixed", "across"],
)
def test_weights_in_other_layouts_give_the_same(first, second, device):
    x, router, gate_up, down = tensors = make_layer(3, 16, 8, 11)
    check([x, router, first(gate_up), second(down)], device, expected_of=tensors)


def test_an_empty_batch_gives_an_empty_output(device):
    assert (0, 16) == tuple(run(make_layer(6, 16, 8, 0), device).shape)
