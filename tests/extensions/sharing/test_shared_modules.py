"""Feed-forward modules of torch that a group shares: their outputs, bytes, slots and fetches."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import BrokenBarrierError

import pytest
import torch
from torch import nn
from torch.nn import functional

from raybatch.engine.weights.weight_copies import HostCopies
from raybatch.errors import ConfigError
from raybatch.records.share import ShareLink, ShareRank, Unit
from raybatch_extensions.sharing.layers import ThreadCopies
from raybatch_extensions.sharing.modules import SharedModules
from raybatch_extensions.sharing.ownership import Ownership
from tests.extensions.sharing.groups import Table

NUM_LAYERS = 9
M, F, E = 24, 40, 4


class Marked(nn.Parameter):
    """A parameter of a subclass, as engines have them."""


class Linear(nn.Module):
    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.weight = Marked(torch.empty(num_outputs, num_inputs), requires_grad=False)
        self.weight.loader = "of the engine"
        self.bias = nn.Parameter(torch.empty(num_outputs), requires_grad=False)

    def forward(self, x):
        return functional.linear(x, self.weight, self.bias)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = Linear(M, 2 * F)
        self.down_proj = Linear(F, M)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(E, 2 * F, M), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(E, M, F), requires_grad=False)
        # as in some engines: a matrix that is not shared
        self.w2_bias = nn.Parameter(torch.empty(E, M), requires_grad=False)

    def forward(self, x, scores):
        gate, up = torch.einsum("tm,efm->tef", x, self.w13_weight).chunk(2, dim=-1)
        out = torch.einsum("tef,emf->tem", functional.silu(gate) * up, self.w2_weight)
        return ((out + self.w2_bias) * scores[..., None]).sum(1)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Linear(M, E)
        self.experts = Experts()
        # one module with two names
        self.routed = self.experts

    def forward(self, x):
        return self.experts(x, self.gate(x).softmax(-1))


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention = Linear(M, M)
        self.mlp = kind()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def kind_of(name, number):
    return {"dense": Dense, "experts": Sparse, "both": (Dense, Sparse)[number % 2]}[name]


def made(name):
    for number in range(NUM_LAYERS):
        yield Layer(kind_of(name, number))


def load(layers):
    """Write weights as a loader does, into the current parameters."""
    generator = torch.Generator().manual_seed(3)
    for layer in layers:
        for parameter in layer.parameters():
            # the same numbers for all ranks, also for weights that are not kept
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 16)


def outputs(layers, num_rows=3):
    x = torch.randn((num_rows, M), generator=torch.Generator().manual_seed(num_rows))
    for layer in layers:
        x = layer(x)
    return x


def of_group(size, make_rank):
    """Return what ranks make, each in a thread with the link of its rank."""
    table = Table(size)

    def run(rank):
        link = ShareLink(ShareRank(rank, size), partial(table.exchange, rank))
        try:
            return make_rank(link)
        except Exception as error:
            table.leave()
            return error

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    errors = [each for each in found if isinstance(each, Exception)]
    if errors:
        raise next((e for e in errors if not isinstance(e, BrokenBarrierError)), errors[0])
    return found


def shared(link, name="dense", *, num_slots=None, make_copier=None, fingerprint="model"):
    modules = SharedModules(link, made(name), num_slots=num_slots)
    load(modules.layers)
    return modules, modules.finish(fingerprint, make_copier)


def shared_group(size, name="dense", **options):
    return of_group(size, lambda link: shared(link, name, **options))


@pytest.mark.parametrize("name", ["dense", "experts", "both"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_outputs_are_those_of_modules_that_have_all_weights_bit_for_bit(size, name):
    whole = list(made(name))
    load(whole)
    for modules, buffers in shared_group(size, name):
        for num_rows in (1, 3, 8):
            assert torch.equal(outputs(modules.layers, num_rows), outputs(whole, num_rows))
        buffers.check()
        assert buffers.counters.num_restarts == 0
        buffers.close()


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_only_what_a_rank_owns_has_data_and_that_is_the_model_once(name):
    whole = sum(
        p.nbytes
        for layer in made(name)
        for n, p in layer.mlp.named_parameters()
        if p.ndim > 1 and not n.endswith("bias")
    )
    segments = 0
    for rank, (modules, buffers) in enumerate(shared_group(2, name)):
        segments += modules.segment.memory.nbytes
        # before, and after they were used
        for _ in range(2):
            for number, layer in enumerate(modules.layers):
                for inner, parameter in layer.named_parameters():
                    is_shared = "mlp" in inner and not inner.endswith("bias")
                    is_elsewhere = is_shared and number % 2 != rank
                    assert (not parameter.numel()) == is_elsewhere, (number, inner)
            outputs(modules.layers)
        buffers.close()
    # tensors are aligned
    assert whole <= segments <= 1.2 * whole


def test_parameters_of_others_are_loaded_as_the_engines_own_and_cannot_be_read():
    (modules, buffers), (_, other) = shared_group(2)
    gate_up = modules.layers[1].mlp.gate_up_proj
    assert (type(gate_up.weight), gate_up.weight.loader) == (Marked, "of the engine")
    owned = modules.layers[0].mlp.gate_up_proj.weight
    assert (type(owned), owned.loader) == (Marked, "of the engine")
    with pytest.raises(RuntimeError, match="must be a matrix, got 1-D"):
        gate_up(torch.ones(1, M))
    buffers.close()
    other.close()


def note_place(places, module, *_):
    places.add(module.weight.data_ptr())


@pytest.mark.parametrize("num_slots", [2, 3])
def test_modules_compute_in_no_more_places_than_there_are_slots(num_slots):
    for rank, (modules, buffers) in enumerate(shared_group(3, num_slots=num_slots)):
        seen = [set() for _ in modules.layers]
        for layer, places in zip(modules.layers, seen, strict=True):
            layer.mlp.down_proj.register_forward_hook(partial(note_place, places))
        for _ in range(4):
            outputs(modules.layers)
        assert len(set().union(*(seen[n] for n in range(NUM_LAYERS) if n % 3 != rank))) == num_slots
        assert all(len(seen[number]) == 1 for number in range(rank, NUM_LAYERS, 3))
        buffers.close()


class Recorded(HostCopies):
    def __init__(self, pairs, done):
        super().__init__(pairs)
        self._done = done

    def copy(self, unit, slot):
        super().copy(unit, slot)
        self._done.append(unit)


def test_units_are_fetched_in_the_order_of_the_native_engine_once_a_pass():
    size = 4
    done = {rank: [] for rank in range(size)}

    def make(link):
        record = partial(Recorded, done=done[link.share_rank.rank])
        return shared(link, make_copier=record)

    group = of_group(size, make)
    ownership = Ownership(size=size, num_layers=NUM_LAYERS)
    for rank, (modules, buffers) in enumerate(group):
        for _ in range(3):
            outputs(modules.layers)
        # these copies run when they are waited for
        used = [unit for unit in ownership.uses(rank) if ownership.owner(unit) != rank]
        assert done[rank] == used * 3
        assert buffers.counters.num_copies == 3 * len(used)
    started = []

    class Starts(Recorded):
        def start(self, unit, slot, after):
            started.append(unit)
            return super().start(unit, slot, after)

    def start_of_one(link):
        copier = partial(Starts, done=[]) if link.share_rank.rank == 1 else ThreadCopies
        return shared(link, make_copier=copier)

    group = of_group(size, start_of_one)
    outputs(group[1][0].layers)
    fetches = ownership.fetches(1)
    assert started[: len(fetches)] == fetches
    for _, buffers in group:
        buffers.close()


def test_a_copy_that_fails_ends_the_pass_by_name_and_the_next_one_is_right():
    broken = set()

    class Failing(ThreadCopies):
        def copy(self, unit, slot):
            if unit in broken:
                raise RuntimeError("the link is down")
            super().copy(unit, slot)

    whole = list(made("dense"))
    load(whole)
    group = shared_group(2, make_copier=Failing)
    modules, buffers = group[0]
    assert torch.equal(outputs(modules.layers), outputs(whole))
    broken.add(Unit(3))
    # what was fetched ahead before is used up first
    message = r"could not copy .* layer 3 .* the link is down"
    with pytest.raises(RuntimeError, match=message):  # noqa: PT012
        for _ in range(3):
            outputs(modules.layers)
    assert not modules.layers[3].mlp.down_proj.weight.numel()
    broken.clear()
    assert torch.equal(outputs(modules.layers), outputs(whole))
    buffers.check()
    for _, each in group:
        each.close()


def test_an_error_of_a_module_leaves_its_slot_free_and_its_placeholders():
    (modules, buffers), (_, other) = shared_group(2)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        modules.layers[1].mlp(torch.ones(1, M + 1))
    assert not modules.layers[1].mlp.down_proj.weight.numel()
    buffers.check()
    whole = list(made("dense"))
    load(whole)
    assert torch.equal(outputs(modules.layers), outputs(whole))
    buffers.close()
    other.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_matrices_that_an_engine_moves_after_loading_are_refused_by_name(rank):
    def make(link):
        modules = SharedModules(link, made("dense"))
        load(modules.layers)
        linear = modules.layers[0].mlp.down_proj
        if link.share_rank.rank == rank:
            # rank 0 owns it; the other has a placeholder
            linear.weight = nn.Parameter(linear.weight.data.clone().t(), requires_grad=False)
        return modules.finish("model")

    with pytest.raises(ConfigError, match=r"moved down_proj\.weight .* of layer 0"):
        of_group(2, make)


def test_ranks_of_other_models_are_refused():
    def make(link):
        return shared(link, fingerprint=f"model {link.share_rank.rank}")

    with pytest.raises(ConfigError, match="of a weight-sharing group differ"):
        of_group(2, make)


def nowhere(text):
    raise AssertionError("nothing is exchanged")


def test_layers_without_a_module_that_is_known_are_refused():
    link = ShareLink(ShareRank(0, 2), nowhere)
    with pytest.raises(ConfigError, match="layer 1, a Linear, has no known feed-forward module"):
        SharedModules(link, iter([Layer(Dense), Linear(M, M)]))


def test_too_few_slots_are_refused_with_the_number_that_is_needed():
    with pytest.raises(ConfigError, match=r"weight_buffers is 1, .* at least 2"):
        SharedModules(ShareLink(ShareRank(0, 3), nowhere), made("dense"), num_slots=1)


def test_at_most_one_layer_that_others_own_has_memory_while_layers_are_made():
    most = 0

    def watched():
        nonlocal most
        partial_results = []
        for layer in made("dense"):
            partial_results.append(layer)
            yield layer
            held = [x for x in partial_results if not x.mlp.down_proj.weight.is_meta]
            most = max(most, len(held))

    SharedModules(ShareLink(ShareRank(0, 2), nowhere), watched())
    assert most == 0
