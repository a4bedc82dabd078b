"""Weights that several threads load onto a device: the same bytes in any order."""

import threading

import pytest
import torch

from raybatch.engine.weights import loading
from raybatch.engine.weights.layout import WeightForm, tensors_of
from raybatch.engine.weights.loading import load_onto, load_weights
from raybatch.errors import ConfigError
from raybatch.models.checkpoint import Checkpoint
from raybatch.models.config import read_model_spec
from tests.engine.lazy_queue import LazyQueue
from tests.engine.tiny_models import save

CPU = torch.device("cpu")


class SharedQueue(LazyQueue):
    """A device for several threads."""

    def __init__(self):
        super().__init__()
        self.lock = threading.RLock()

    def copy(self, target, source):
        with self.lock:
            super().copy(target, source)

    def mark(self):
        with self.lock:
            return super().mark()

    def run_to(self, stop):
        with self.lock:
            super().run_to(stop)


def slow_parts(num_units, rng):
    """Parts that each wait until a later one is built, if two threads allow it."""
    began = [threading.Event() for _ in range(num_units)]
    sizes = torch.randint(0, 700, (num_units,), generator=rng).tolist()
    wanted = {
        str(i): torch.randint(0, 99, (size, 3), generator=rng) for i, size in enumerate(sizes)
    }

    def build(i):
        began[i].set()
        if i % 2 == 0 and i + 1 < num_units:
            assert began[i + 1].wait(60)
        return wanted[str(i)]

    units = {
        name: {name: (tuple(t.shape), torch.int32, lambda i=int(name): build(i))}
        for name, t in wanted.items()
    }
    return units, wanted


def test_tensors_are_those_that_were_built_in_any_order_of_threads():
    units, wanted = slow_parts(20, torch.Generator().manual_seed(0))
    queue = SharedQueue()
    made = load_onto(CPU, units, queue=queue, piece_bytes=1000, num_threads=2)
    # no copy runs in memory that a thread has released
    assert len(queue.pending) == queue.num_done
    assert list(wanted) == list(made)
    for name, tensor in made.items():
        assert torch.int32 == tensor.dtype
        assert torch.equal(wanted[name].int(), tensor)
    assert 1000 == max(queue.sizes)


@pytest.mark.parametrize("byte_dtype", [None, torch.int8])
def test_a_model_that_threads_load_equals_one_that_is_loaded_in_order(
    byte_dtype, tmp_path, monkeypatch
):
    path = tmp_path / "model"
    save("qwen3-moe", path)
    spec, form = read_model_spec(path), WeightForm(torch.bfloat16, byte_dtype=byte_dtype)
    calls = []

    def in_order(device, units, **_):
        parts = {name: part for unit in units.values() for name, part in unit.items()}
        return {name: build().to(dtype) for name, (_, dtype, build) in parts.items()}

    def by_threads(device, units, **options):
        calls.append(options)
        return load_onto(CPU, units, queue=SharedQueue(), piece_bytes=512, num_threads=3)

    found = []
    for load in (in_order, by_threads):
        monkeypatch.setattr(loading, "load_onto", load)
        found.append(load_weights(path, spec, form, device=torch.device("meta"), streamed=(1,)))
    expected, made = (tensors_of(weights) for weights in found)
    assert all(map(torch.equal, expected, made))
    assert len(expected) > 10
    stays = calls[0]["stays_on_host"]
    # attention stays on the device
    names = ("0.down", "1.down", "1.qkv", "embed")
    assert (False, True, False, False) == tuple(map(stays, names))


def test_the_error_of_the_first_unit_is_raised_and_no_further_unit_begins():
    built = []

    def fails(number):
        built.append(number)
        raise ConfigError(f"unit {number}")

    units = {str(i): {str(i): ((1,), torch.int32, lambda i=i: fails(i))} for i in range(400)}
    with pytest.raises(ConfigError, match="unit 0"):
        load_onto(CPU, units, queue=SharedQueue(), num_threads=1)
    assert len(built) < 400


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "model"
    save("qwen3-moe", path)
    with Checkpoint(path) as checkpoint:
        name = next(iter(checkpoint._file_of))
        checkpoint._file_of[name] = Broken(), checkpoint._file_of[name][1]
        with pytest.raises(ConfigError, match=rf"model\.safetensors: .* tensor '{name}'"):
            checkpoint.get(name)


class Broken:
    def get_tensor(self, name):
        raise OSError("input/output error")
