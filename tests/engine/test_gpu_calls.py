"""Calls of CUDA name their device, so that a GPU that is not the current one works."""

import ast
from pathlib import Path

import pytest
import torch

import raybatch
import raybatch_extensions
from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import pick_device
from raybatch.errors import ConfigError

# they are of no device, or of that of the stream that they are used on
FREE = {
    "CUDAGraph", "Event", "cudart", "device_count", "empty_cache", "graph_pool_handle",
    "is_available",
}  # fmt: skip
# what is said of any GPU, before there is one
NAMED_HERE = {("loading/loaded_model.py", "current_device")}


def calls_without_device(text):
    """Yield line and name of each call that takes the current GPU, and of memory pinned by it."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        call = name.removeprefix("torch.cuda.")
        if call not in (name, *FREE) and not (node.args or node.keywords):
            yield node.lineno, call
        if name.endswith(".pin_memory") or any(k.arg == "pin_memory" for k in node.keywords):
            yield node.lineno, "pin_memory"
        if name.endswith(".cuda"):
            yield node.lineno, "cuda"
        if any(k.arg == "device" and ast.unparse(k.value) == "'cuda'" for k in node.keywords):
            yield node.lineno, "device"


def test_every_call_of_cuda_names_its_device():
    root = Path(raybatch.__file__).parent
    found = set()
    for folder in (root / "engine", root / "kernels", Path(raybatch_extensions.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            place = path.relative_to(folder).as_posix()
            found |= {(place, name) for _, name in calls_without_device(path.read_text())}
    # no torch rounds up there: it is empty, or Windows has no pages to take
    assert NAMED_HERE | {("memory/pinned.py", "pin_memory")} == found


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.Stream()",
        "torch.cuda.synchronize()",
        "x.pin_memory()",
        "torch.empty(3, pin_memory=True)",
        "torch.zeros(3, device='cuda')",
        "x.cuda()",
    ],
)
def test_a_call_of_the_current_gpu_is_found(text):
    assert 1 == len(list(calls_without_device(text)))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_has_its_number_and_must_be_there():
    picked = [str(pick_device(EngineConfig(device=d))) for d in ("auto", "cuda", "cuda:0")]
    assert ["cuda:1", "cuda:1", "cuda:0"] == picked
    with pytest.raises(ConfigError, match=r"device is 'cuda:2', .* sees 2 GPUs"):
        pick_device(EngineConfig(device="cuda:2"))
