"""Models of groups, and what their logits are compared with."""

import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import load_model
from raybatch_extensions.sharing.ownership import Ownership
from tests.extensions.sharing.groups import load_group

NUM_LAYERS = 5
# with biases, with experts in all layers, and in some
VARIANTS = ("llama-biases-tied", "qwen3-moe", "qwen3-moe-sparse-step")


def ownership(size, by, num_layers=NUM_LAYERS):
    return Ownership(size=size, num_layers=num_layers, by=by)


def load(path, size, by, *, quantization=None, num_layers=NUM_LAYERS, dtype="float32"):
    config = EngineConfig(device="cpu", dtype=dtype, quantization=quantization)
    whole = load_model(str(path), config)
    return whole, load_group(path, ownership(size, by, num_layers), configs=[config] * size)


def check(expected, found):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
