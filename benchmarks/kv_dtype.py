"""Compares 8-bit KV with KV of the weights' dtype: logits, answers, capacity, attention time.

python benchmarks/kv_dtype.py                      # the demo model, and one of 4M parameters
python benchmarks/kv_dtype.py --rows 32 --out result.json

One thread, float32 weights. Logits are computed over prompt and answer at once, at the positions of
the answer's tokens, which "auto" generated. Their error is also given relative to the standard
deviation of all logits. Times are CPU seconds of this process, the least of several runs in turn.
"""

import argparse
import dataclasses
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import psutil
import pyarrow as pa
import torch

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.demo.run import exact_match
from raybatch.demo.task import PROMPT, make_document, make_questions
from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token, pick_kv_dtype
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart
from raybatch.kernels.byte_numbers import is_quantised, quantise
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.models.config import read_model_spec
from raybatch.models.source import resolve_model
from raybatch.records.types import Completion, Request, Sampling
from raybatch.text.tokenizer import Tokenizer

KINDS = ("auto", "int8", "fp8")
BLOCK = EngineConfig().block_size_tokens
KV_BYTES = 64 << 20
# sequences, positions of each, query heads, KV heads, head dim
ATTENTION = (
    (64, 256, 8, 4, 64),
    (64, 1024, 8, 4, 64),
    (64, 4096, 8, 4, 64),
    (16, 2048, 32, 8, 128),
)


def config_of(kind: str) -> EngineConfig:
    return EngineConfig(dtype="float32", device="cpu", kv_cache_dtype=kind, kv_cache_bytes=KV_BYTES)


def demo_prompts(folder: Path, count: int) -> tuple[list[list[int]], list[str]]:
    """Return prompts of the demo task as tokens, and their right answers."""
    rng, tokenizer = random.Random(7), Tokenizer.load(folder)
    prompts, answers = [], []
    while len(prompts) < count:
        document = make_document(rng, rng.randint(20, 40))
        for question in make_questions(document, rng, 4):
            text = PROMPT.format(document=document.text, question=question.text)
            messages = [{"role": "user", "content": text}]
            prompts.append(tokenizer.read_chat(messages).token_ids.tolist())
            answers.append(question.answer)
    return prompts[:count], answers[:count]


def random_prompts(vocab_size: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab_size, 256).tolist() for _ in range(count)]


def answers_of(
    backend: NativeBackend, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the tokens of all rows, and counters of the engine."""
    requests = [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.array(prompt, np.int32),
            sampling=sampling,
        )
        for i, prompt in enumerate(prompts)
    ]
    done, num_running = dict[int, Completion](), []
    began = time.process_time()
    backend.submit(requests)
    while backend.num_unfinished():
        done |= {completion.request_id: completion for completion in backend.poll()}
        num_running.append(backend.stats().num_running)
    work = {
        "cpu_s": round(time.process_time() - began, 2),
        "num_steps": len(num_running),
        "most_running": max(num_running),
        "num_preemptions": backend.stats().num_preemptions,
    }
    return [done[i].token_ids.tolist() for i in range(len(prompts))], work


def logits_of(runner: ModelRunner, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return the logits from which each token of an answer was picked, [A, V]."""
    tokens = torch.tensor([*prompt, *answer[:-1]])
    positions = torch.arange(len(tokens))
    batch = ForwardBatch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=positions,
        logits_idx=positions[len(prompt) - 1 :],
        attention=AttentionPlan(
            num_decode=0,
            decode=None,
            prefill=PrefillPart(starts=(0,), lens=(len(tokens),)),
            segments=(),
        ),
    )
    return runner.forward(batch)


def measure_model(
    folder: Path, prompts: list[list[int]], sampling: Sampling, right: list[str] | None
) -> dict[str, Any]:
    """Compare all dtypes of KV on one model; logits are those of the answers of "auto"."""
    spec, decode = read_model_spec(folder), None
    if right is not None:
        decode = Tokenizer.load(folder).decode
    exact: list[list[int]] = []
    base: list[torch.Tensor] = []
    found: dict[str, Any] = {}
    for kind in KINDS:
        backend = create(str(folder), config_of(kind))
        answers, work = answers_of(backend, prompts, sampling)
        kv_tokens = backend.capacity().kv_tokens
        backend.close()
        exact = exact or answers
        runner = ModelRunner.load(str(folder), config_of(kind))
        rows = [logits_of(runner, *row) for row in zip(prompts, exact, strict=True)]
        base = base or rows
        errors = torch.cat([(a - b).abs() for a, b in zip(rows, base, strict=True)])
        spread = float(torch.cat(base).std())
        alike = [_num_alike(a, b) for a, b in zip(answers, exact, strict=True)]
        dtype = pick_kv_dtype(kind, torch.float32)
        found[kind] = {
            "max_abs_error": round(float(errors.max()), 5),
            "mean_abs_error": round(float(errors.mean()), 6),
            "mean_error_over_std": round(float(errors.mean()) / spread, 5),
            "max_error_over_std": round(float(errors.max()) / spread, 4),
            "same_choice": _share(
                float((a.argmax(-1) == b.argmax(-1)).float().mean())
                for a, b in zip(rows, base, strict=True)
            ),
            "identical_rows": _share(a == b for a, b in zip(answers, exact, strict=True)),
            "tokens_before_the_first_other": _share(alike),
            "tokens_of_a_row": _share(len(answer) for answer in exact),
            "kv_bytes_per_token": kv_bytes_per_token(spec, dtype),
            "kv_tokens": kv_tokens,
            **work,
        }
        if decode is not None and right is not None:
            texts = [decode(answer) for answer in answers]
            matches = exact_match(pa.array(right), pa.array(texts)).to_pylist()
            found[kind]["right_answers"] = _share(matches)
        print(folder.name, kind, found[kind], flush=True)
    return {"rows": len(prompts), "logit_std": round(spread, 4), "kinds": found}


def _num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _share(values: Any) -> float:  # noqa: ANN401
    return round(float(np.mean(list(values))), 4)


def measure_attention(repetitions: int) -> list[dict[str, Any]]:
    """Time the compiled attention of decoding rows over pools of all dtypes, in turn."""
    found = []
    for num_seqs, length, num_heads, num_kv_heads, dim in ATTENTION:
        generator = torch.Generator().manual_seed(0)
        num_blocks = num_seqs * length // BLOCK
        shape = (2, num_blocks, num_kv_heads, BLOCK, dim)
        numbers = torch.randn(shape, generator=generator)
        q = torch.randn(num_seqs, num_heads, dim, generator=generator)
        blocks = torch.arange(num_blocks)
        part = DecodePart(
            block_ids=blocks,
            owners=blocks * BLOCK // length,
            num_valid=torch.full((num_blocks,), BLOCK),
            is_contiguous=True,
        )
        positions = torch.full((num_seqs,), length - 1)
        runs, seconds = {}, dict[str, list[float]]()
        for kind in KINDS:
            dtype = pick_kv_dtype(kind, torch.float32)
            pools = quantise(numbers, dtype) if is_quantised(dtype) else numbers
            form = decode_form(
                head_dim=dim,
                num_grouped=num_heads // num_kv_heads,
                block_size=BLOCK,
                kv_dtype=dtype,
            )
            if form is None:
                raise SystemExit("this host has no C compiler")
            plan = form.plan(part, positions=positions, pool=pools[0], windows=(None,))
            runs[kind] = (form, pools, plan)
        for _ in range(repetitions):
            for kind, (form, pools, plan) in runs.items():
                began = time.process_time()
                form.attend(q, pools[0], pools[1], plan, None)
                seconds.setdefault(kind, []).append(time.process_time() - began)
        result = {
            "sequences": num_seqs,
            "positions": length,
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "head_dim": dim,
            "cpu_ms": {kind: round(1e3 * min(s), 2) for kind, s in seconds.items()},
        }
        print(result, flush=True)
        found.append(result)
    return found


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64, help="rows of each model")
    parser.add_argument("--repetitions", type=int, default=9, help="runs of attention")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load_before = psutil.getloadavg()[0]
    demo = resolve_model("demo")
    prompts, right = demo_prompts(demo, args.rows)
    found = {"demo": measure_model(demo, prompts, Sampling(max_tokens=64), right)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dense-4m"
        models.write("dense-4m", folder)
        prompts = random_prompts(read_model_spec(folder).vocab_size, args.rows)
        sampling = Sampling(max_tokens=64, ignore_eos=True)
        found["dense-4m"] = measure_model(folder, prompts, sampling, None)
    attention = measure_attention(args.repetitions)
    conditions.write_result(
        args.out,
        "kv_dtype.py",
        load_average={"before": load_before, "after": psutil.getloadavg()[0]},
        models=found,
        attention=attention,
        kv_cache_bytes=KV_BYTES,
        engine=dataclasses.asdict(config_of("auto")),
    )


if __name__ == "__main__":
    main()
