"""LoRA adapters of tiny models, and models with their weights added."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_models import build

WEIGHTS = "adapter_model.safetensors"


def write_adapter(folder: Path, seed: int, rank: int = 8) -> Path:
    """Write a random adapter of the attention of `save_text_model`, in the format of PEFT."""
    folder.mkdir(parents=True)
    model, random = build("qwen3", vocab_size=260), torch.Generator().manual_seed(seed)
    weights = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            for part, shape in (
                ("lora_A", (rank, module.in_features)),
                ("lora_B", (module.out_features, rank)),
            ):
                values = torch.randn(shape, generator=random) * 0.3
                weights[f"base_model.model.{name}.{part}.weight"] = values
    save_file(weights, folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Add the weights of an adapter of `write_adapter` to those of a model."""
    weights = load_file(folder / WEIGHTS)
    for name in weights:
        if ".lora_A." not in name:
            continue
        layer = model.get_submodule(name.removeprefix("base_model.model.").split(".lora_A.")[0])
        layer.weight.data += 2 * weights[name.replace(".lora_A.", ".lora_B.")] @ weights[name]
