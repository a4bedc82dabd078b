"""Greedy tokens of transformers for prompts on tiny models, stored in tests/data.

A test with prompts that are not stored says how to add them. A slow test recomputes all and
compares.
"""

import atexit
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tests.engine.tiny_models import build

PATH = Path(__file__).parents[1] / "data" / "reference_tokens.json"
WAY_OUT = "WRITE_REFERENCES=1 python -m pytest tests/engine"
# gap between the logits of two tokens below which another processor may pick the other one
TIE = 1e-4
WRITES = os.environ.get("WRITE_REFERENCES") == "1"


def reference_tokens(
    variant: str, prompts: Iterable[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """Return the tokens of transformers after each prompt; these models never end."""
    return [_tokens(variant, tuple(int(i) for i in prompt), num_tokens) for prompt in prompts]


def greedy_tokens(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Run transformers."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


@torch.inference_mode()
def smallest_gap(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the least lead of the logit of a token over the next one."""
    logits = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    highest = logits.topk(2).values
    return float((highest[:, 0] - highest[:, 1]).min())


def kept() -> Iterator[tuple[str, tuple[int, ...], list[int]]]:
    """Yield variant, prompt and tokens of all stored references."""
    for variant, found in _load().items():
        for prompt, tokens in found.items():
            yield variant, tuple(map(int, prompt.split())), [int(i) for i in tokens.split()]


@functools.cache
def model_of(variant: str) -> PreTrainedModel:
    """Build the model of a variant, once; read only."""
    return build(variant)


@functools.cache
def _load() -> dict[str, dict[str, str]]:
    """Return tokens by prompt by variant, both as texts of numbers."""
    return json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}


@functools.cache
def _tokens(variant: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    name = " ".join(map(str, prompt))
    tokens = [int(i) for i in _load().get(variant, {}).get(name, "").split()]
    if WRITES:
        tokens = greedy_tokens(model_of(variant), prompt, max(num_tokens, len(tokens)))
        if smallest_gap(model_of(variant), prompt, tokens) < TIE:
            raise ValueError(f"ask {variant} another prompt: behind {name!r} processors may differ")
        _load().setdefault(variant, {})[name] = " ".join(map(str, tokens))
    if len(tokens) < num_tokens:
        raise LookupError(
            f"{PATH.name} has {len(tokens)} of {num_tokens} tokens of {variant} behind {name!r}; "
            f"to add them: {WAY_OUT}"
        )
    return tokens[:num_tokens]


def _write() -> None:
    PATH.write_text(json.dumps(_load(), indent=0, sort_keys=True) + "\n", encoding="utf-8")


if WRITES:
    atexit.register(_write)
