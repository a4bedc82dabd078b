"""In a step, the host waits for a GPU only to read tokens."""

import ast
from pathlib import Path

import pytest
import torch

import raybatch
import raybatch_extensions
from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine import phases
from raybatch.engine.engine import Engine
from raybatch.engine.loading.loaded_model import LoadedModel
from raybatch.engine.loading.prepared import PreparedModel
from raybatch.engine.phases import PhasedEngine
from raybatch.engine.sampling.sampler import Sampler
from tests.engine.fakes import FakeSpec, FakeStopChecker, make_request
from tests.engine.test_step_ahead import EOS, VOCAB, Events, Queue

ROOTS = [Path(raybatch.__file__).parent / "engine", Path(raybatch_extensions.__file__).parent]
# they wait for the whole device to measure it: ops, links and layers at start, and the gain of
# exchange passes
MEASURING = {
    "forward/library_ops.py:seconds_on",
    "loading/peak_memory.py:_on_gpu",
    "memory/kv_cache.py:trial_copy_s",
    "profile/module_profile.py:clock_of",
    "sharing/threshold.py:_finish",
}
# they wait for an event or a stream: tokens that are read, a buffer that is reused, KV that is
# copied to the host, and messages of a TP group
MARKS = {
    "memory/kv_window.py:HostLayers._put_arrived",
    "memory/kv_cache.py:KVTiers.read_host_blocks",
    "memory/pinned.py:_Buffer.wait",
    "step.py:StepTokens.draw",
    "sharing/peers.py:_finish",
}
# they measure ops, links and layers at start
TAKING = {
    "forward/library_ops.py:replayed_s",
    "memory/kv_cache.py:KVTiers.copy_bytes_per_s",
    "profile/module_profile.py:profile_layer",
    "weights/layer_store.py:StreamedLayers.bytes_per_s",
}


def functions_of(text):
    """Yield name and node of each function of a module, with those in it, and of each method."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield f"{node.name}.{method.name}", method


def all_functions():
    paths = [(root, path) for root in ROOTS for path in sorted(root.rglob("*.py"))]
    for root, path in paths:
        for name, node in functions_of(path.read_text()):
            yield f"{path.relative_to(root).as_posix()}:{name}", node


def waits(node):
    """Return the waits that a function calls: "device", or "mark" for a part of the queue."""
    calls = (ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call))
    names = [name for name in calls if name.endswith("synchronize")]
    return {"device" if name == "torch.cuda.synchronize" else "mark" for name in names}


def mentions(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_the_device_is_waited_for_only_to_measure_it():
    assert MEASURING == {place for place, node in all_functions() if "device" in waits(node)}
    assert MARKS == {place for place, node in all_functions() if "mark" in waits(node)}


def test_steps_use_no_clock_that_waits_for_the_device():
    measuring = {place.rsplit(":")[-1] for place in MEASURING} - {"_finish", "_on_gpu"}
    found = {place for place, node in all_functions() if mentions(node) & measuring}
    assert TAKING == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(d):\n    torch.cuda.synchronize(d)", {"device"}),
        ("class A:\n    def f(self):\n        self.mark.synchronize()", {"mark"}),
        ("def f():\n    return lambda: torch.cuda.synchronize(d)", {"device"}),
    ],
)
def test_a_call_that_waits_is_found(text, expected):
    [(_, node)] = functions_of(text)
    assert expected == waits(node)


class OnGpu(LoadedModel):
    """A model on a CPU that reports a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)


class NoChoice(PreparedModel):
    def choose(self, rows):
        return None


@pytest.fixture
def backend(tiny_checkpoint, monkeypatch):
    """The backend for a GPU, on a CPU queue that runs work as late as possible."""
    config = EngineConfig(block_size_tokens=4, max_num_seqs=16, dtype="float32", device="cpu")
    prepared = NoChoice.load(str(tiny_checkpoint("llama")), config)
    fields = {name: getattr(prepared.model, name) for name in LoadedModel.__slots__}
    prepared.model = OnGpu(**fields)
    runner = Events(num_blocks=64, spec=FakeSpec(VOCAB, EOS, 128))
    queue = Queue(runner.events)

    class Runners:
        of = staticmethod(lambda *_: runner)

    monkeypatch.setattr(phases, "ModelRunner", Runners)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: queue.run_to(len(queue.pending)))

    def make(runner):
        sampler = Sampler(VOCAB, 16, EOS)
        return Engine(runner, sampler, FakeStopChecker(), config, queue=queue)

    return NativeBackend(PhasedEngine(prepared, make)), runner


def test_a_backend_launches_a_step_before_it_reads_the_tokens_of_the_one_before(backend):
    backend, runner = backend
    backend.submit(
        [make_request(i, [1, 2, 3 + i], max_tokens=6, ignore_eos=True) for i in range(3)]
    )
    while backend.num_unfinished():
        backend.poll()
    assert ["launch", *["launch", "read"] * 5, "read"] == runner.events
