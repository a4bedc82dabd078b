"""Two layers of real models, with weights of their shapes that nothing was written into."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[3] / "scripts"))

from gpu_call import models

_SHAPES = {"Qwen3-8B": models.DENSE, "Qwen3-30B-A3B": models.SPARSE}
# fewer experts, as Mixtral and DeepSeek's small models have
for _num, _chosen in ((8, 2), (64, 6)):
    _SHAPES[f"{_num} experts"] = replace(models.SPARSE, num_experts=_num, experts_per_token=_chosen)


def spec_of(name):
    """Return the spec of a model whose head is small, as no weight of it is looked at."""
    shape = replace(_SHAPES[name], vocab_size=512, max_len=40960)
    return models.spec_of(shape, num_layers=2)


def weights_of(spec, dtype=torch.bfloat16):
    """Return weights that take no memory until somebody reads them."""
    return models.weights_of(spec, lambda shape: torch.empty(shape, dtype=dtype))
