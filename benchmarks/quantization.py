"""Measures the accuracy of weights as bytes: logits and greedy answers compared with float32.

python benchmarks/quantization.py                        # the models of the published table
python benchmarks/quantization.py --models demo --forms int8 --out result.json

`engine.py --quantizations none,int8,fp8` measures the rates. The demo model is the only trained
one, so its figures are closest to those of users; random weights are harder to round.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import torch

from raybatch.backends.native import create
from raybatch.config import EngineConfig
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.weights.layout import tensors_of
from raybatch.kernels.attention_plan import AttentionPlan, PrefillPart
from raybatch.models.source import resolve_model
from raybatch.records.types import Request, Sampling

DEFAULT_MODELS = ("demo", "dense-4m", "dense-60m", "moe-100m")
NUM_PROMPTS = 32
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
# English of the kind that the demo model was trained on; cut into prompts
TEXT = (
    "Summarize the document. The old tower stands on a hill above the river. It was built in the "
    "year 1204 and is ninety metres high. Question: when was the tower built? Answer: in 1204. "
    "Question: how high is it? Answer: ninety metres. Name the colour of the sky. Blue. "
) * 12


@contextmanager
def checkpoint_of(name: str) -> Iterator[str]:
    """Yield the folder of a model of `models.SHAPES`, or of the demo model."""
    if name == "demo":
        yield str(resolve_model(name))
        return
    with tempfile.TemporaryDirectory() as folder:
        models.write(name, Path(folder))
        yield folder


def prompts_of(name: str) -> list[list[int]]:
    """Return seeded prompts of `PROMPT_TOKENS` tokens."""
    rng = np.random.default_rng(3)
    if name == "demo":
        text = list(TEXT.encode())
        starts = rng.integers(0, len(text) - PROMPT_TOKENS, NUM_PROMPTS)
        return [text[start : start + PROMPT_TOKENS] for start in starts]
    return rng.integers(10, models.VOCAB_SIZE, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()


def logits_of(runner: ModelRunner, prompts: list[list[int]]) -> torch.Tensor:
    """Return the logits of every position of all prompts, [N * P, V]."""
    found = []
    for prompt in prompts:
        positions = torch.arange(len(prompt))
        part = PrefillPart(starts=(0,), lens=(len(prompt),))
        batch = ForwardBatch(
            token_ids=torch.tensor(prompt),
            positions=positions,
            slot_mapping=positions,
            logits_idx=positions,
            attention=AttentionPlan(num_decode=0, decode=None, prefill=part, segments=()),
        )
        found.append(runner.forward(batch).clone())
    return torch.cat(found)


def layer_bytes_of(runner: ModelRunner) -> int:
    """Return the bytes of the weights of all layers."""
    total = 0
    for idx in range(runner.decoder.num_layers):
        layers = runner.decoder.layers
        parts = layers.attention(idx), layers.ffn(idx)
        total += sum(tensor.nbytes for part in parts for tensor in tensors_of(part))
    return total


def answers_of(model: str, config: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy answers of an engine."""
    engine = create(model, config)
    sampling = Sampling(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    engine.submit(
        [
            Request(
                request_id=i,
                row_id=str(i),
                prompt_token_ids=np.array(prompt, dtype=np.int32),
                sampling=sampling,
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    answers: dict[int, list[int]] = {}
    while engine.num_unfinished():
        for completion in engine.poll():
            answers[completion.request_id] = list(completion.token_ids)
    engine.close()
    return [answers[i] for i in range(len(prompts))]


def compare(name: str, forms: list[str]) -> dict[str, dict[str, Any]]:
    """Return the differences of each form from float32."""
    prompts, found = prompts_of(name), {}
    with checkpoint_of(name) as model:
        logits, answers, sizes = {}, {}, {}
        for form in ("none", *forms):
            config = EngineConfig(
                dtype="float32",
                device="cpu",
                kv_cache_bytes=64 << 20,
                quantization=None if form == "none" else form,
            )
            runner = ModelRunner.load(model, config)
            logits[form] = logits_of(runner, prompts)
            sizes[form] = layer_bytes_of(runner)
            answers[form] = answers_of(model, config, prompts)
        exact = logits["none"]
        for form in forms:
            error = logits[form] - exact
            same = [a == b for a, b in zip(answers["none"], answers[form], strict=True)]
            found[form] = {
                "rms_error_of_spread": float(error.square().mean().sqrt() / exact.std()),
                "largest_error_of_spread": float(error.abs().max() / exact.std()),
                "equal_next_tokens": float(
                    (logits[form].argmax(-1) == exact.argmax(-1)).float().mean()
                ),
                "equal_answers": sum(same) / len(same),
                "layer_bytes_of_float32": sizes[form] / sizes["none"],
            }
    return found


def main() -> None:
    """Print and write the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS))
    parser.add_argument("--forms", default="int8,fp8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in args.models.split(","):
        found[name] = compare(name, args.forms.split(","))
        for form, values in found[name].items():
            print(
                f"{name:10} {form:5} rms error {values['rms_error_of_spread']:.2%} of the spread, "
                f"largest {values['largest_error_of_spread']:.1%}; equal next tokens "
                f"{values['equal_next_tokens']:.1%}, answers of {OUTPUT_TOKENS} tokens "
                f"{values['equal_answers']:.0%}; layers {values['layer_bytes_of_float32']:.2f}"
            )
    conditions.write_result(args.out, "quantization.py", models=found)


if __name__ == "__main__":
    main()
