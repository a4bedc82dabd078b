"""Measures how close the native engine comes to the limits of the machine, in prefill and decode.

python benchmarks/engine.py                              # the three models of the published table
python benchmarks/engine.py --models dense-4m --repeats 3 --out result.json
python benchmarks/engine.py --quantizations none,int8    # weights as bytes; limits are float32's

Times are CPU seconds of the step loop, which include scheduling, sampling and finishing. They are
compared with the least time: the operations of the model's shape and the bytes that a step has to
read, over the rates of a matrix product and of memory that the same process measures. Peers run the
same models in `e2e.py`.
"""

import argparse
import dataclasses
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np
import torch
from machine_limits import MachineLimits, measure_limits

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.engine.profile.module_profile import model_shape
from raybatch.models.config import ModelSpec, read_model_spec
from raybatch.policy.cost.layers import Workload
from raybatch.records.types import Request, Sampling

DEFAULT_MODELS = ("dense-4m", "dense-60m", "moe-100m")
PREFILL_TOKENS = 512
DECODE_CONTEXT = 256
DECODE_BATCHES = "1,16,64,256"
DECODE_STEPS = 12
_STEP_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One measured phase.

    Args:
        name: "prefill" or "decode".
        num_sequences: sequences that run at once.
        tokens: tokens computed.
        operations: operations that the shape of the model needs.
        moved_bytes: bytes that have to be read and written.
        cpu_s: CPU seconds of the engine in each repetition.
        least_s: least seconds at the rates of the machine.
    """

    name: str
    num_sequences: int
    tokens: int
    operations: float
    moved_bytes: float
    cpu_s: tuple[float, ...]
    least_s: float

    @property
    def median_s(self) -> float:
        """Return the median of the repetitions."""
        return statistics.median(self.cpu_s)

    def row(self, limits: MachineLimits) -> dict[str, Any]:
        """Return the fields to print and write."""
        return dataclasses.asdict(self) | {
            "median_s": self.median_s,
            "tokens_per_cpu_s": round(self.tokens / self.median_s, 1),
            "share_of_gemm_rate": round(
                self.operations / self.median_s / limits.operations_per_s, 3
            ),
            "times_the_least": round(self.median_s / self.least_s, 2),
        }


def requests_of(count: int, prompt: int, output: int, seed: int) -> list[Request]:
    """Return requests of random tokens that have nothing in common."""
    rng = np.random.default_rng(seed)
    sampling = Sampling(max_tokens=output, ignore_eos=True)
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=rng.integers(10, models.VOCAB_SIZE, prompt).astype(np.int32),
            sampling=sampling,
        )
        for i in range(count)
    ]


def work_of(spec: ModelSpec, workload: Workload, count: int) -> tuple[float, float]:
    """Return operations and bytes of one forward pass over `count` sequences.

    Logits are those of the last token of each sequence.
    """
    shape = model_shape(spec, dtype=torch.float32)
    tokens = count * workload.tokens_per_sequence
    attention = shape.layer.attention_work(tokens, workload)
    ffn = shape.layer.ffn_work(tokens)
    logits = spec.model_dim * spec.vocab_size
    operations = spec.num_layers * (attention.operations + ffn.operations) + 2 * count * logits
    moved = spec.num_layers * (attention.moved_bytes + ffn.moved_bytes)
    return operations, moved + logits * shape.layer.element_bytes


def measure_prefill(
    engine: NativeBackend, spec: ModelSpec, limits: MachineLimits, repeats: int
) -> Phase:
    """Measure prompts of `PREFILL_TOKENS` tokens that end with their first token."""
    count = 8
    seconds = []
    for repeat in range(repeats + 1):
        engine.submit(requests_of(count, PREFILL_TOKENS, 1, seed=repeat))
        began = time.process_time()
        while engine.num_unfinished():
            engine.poll()
        seconds.append(time.process_time() - began)
    workload = Workload(tokens_per_sequence=PREFILL_TOKENS)
    operations, moved = work_of(spec, workload, count)
    return Phase(
        name="prefill",
        num_sequences=count,
        tokens=count * PREFILL_TOKENS,
        operations=operations,
        moved_bytes=moved,
        cpu_s=tuple(seconds[1:]),
        least_s=limits.least_s(operations, moved),
    )


def measure_decode(
    engine: NativeBackend, spec: ModelSpec, limits: MachineLimits, count: int, repeats: int
) -> Phase:
    """Measure steps in which `count` sequences each get one more token."""
    # the first prompts decode while the last ones are computed
    num_before = 4 + 2 * count * DECODE_CONTEXT // _STEP_TOKENS
    output = num_before + (repeats + 1) * DECODE_STEPS
    engine.submit(requests_of(count, DECODE_CONTEXT, output, seed=100 + count))
    _prefill(engine, count)
    seconds = []
    for _ in range(repeats + 1):
        done = engine.stats().generated_tokens
        began = time.process_time()
        for _ in range(DECODE_STEPS):
            engine.poll()
        seconds.append(time.process_time() - began)
        if engine.stats().generated_tokens - done != count * DECODE_STEPS:
            raise RuntimeError("a measured step did not only decode")
    engine.abort(range(count))
    workload = Workload(cached_tokens=DECODE_CONTEXT + output // 2)
    operations, moved = work_of(spec, workload, count)
    return Phase(
        name="decode",
        num_sequences=count,
        tokens=count * DECODE_STEPS,
        operations=operations * DECODE_STEPS,
        moved_bytes=moved * DECODE_STEPS,
        cpu_s=tuple(seconds[1:]),
        least_s=DECODE_STEPS * limits.least_s(operations, moved),
    )


def _prefill(engine: NativeBackend, count: int) -> None:
    """Run steps until one of them has given every sequence a token."""
    num_new = 0
    while num_new != count:
        done = engine.stats().generated_tokens
        engine.poll()
        num_new = engine.stats().generated_tokens - done


def measure_model(
    name: str, limits: MachineLimits, batches: Sequence[int], repeats: int, quantization: str
) -> list[Phase]:
    """Measure one of `models.SHAPES`, decoding in each of the batches."""
    with tempfile.TemporaryDirectory() as folder:
        models.write(name, Path(folder))
        spec = read_model_spec(Path(folder))
        tokens = max(batches) * 2 * DECODE_CONTEXT
        kv_bytes = tokens * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4
        config = EngineConfig(
            dtype="float32",
            quantization=None if quantization == "none" else quantization,
            device="cpu",
            kv_cache_bytes=kv_bytes,
            max_batched_tokens=_STEP_TOKENS,
        )
        engine = create(folder, config)
        phases = [measure_prefill(engine, spec, limits, repeats)]
        for count in batches:
            phases.append(measure_decode(engine, spec, limits, count, repeats))
        engine.close()
    return phases


def show(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows of one model."""
    print(f"\n{name:10} sequences  tokens/CPU s  of GEMM rate  times the least")
    for row in rows:
        print(
            f"{row['name']:10} {row['num_sequences']:9}  {row['tokens_per_cpu_s']:12,.0f}  "
            f"{row['share_of_gemm_rate']:12.0%}  {row['times_the_least']:15.2f}"
        )


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS))
    parser.add_argument("--batches", default=DECODE_BATCHES, help="sequences that decode at once")
    parser.add_argument("--quantizations", default="none", help="list of none, int8 and fp8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.models.split(",")
    for name in names:
        if name not in models.SHAPES:
            parser.error(f"--models: {name!r} is not one of {', '.join(models.SHAPES)}")
    batches = [int(count) for count in args.batches.split(",")]
    torch.set_num_threads(1)
    limits = measure_limits()
    print(
        f"one thread: {limits.operations_per_s / 1e9:.0f} GFLOP/s, "
        f"{limits.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{limits.copied_bytes_per_s / 1e9:.1f} GB/s copied"
    )
    found = {}
    for name, form in itertools.product(names, args.quantizations.split(",")):
        phases = measure_model(name, limits, batches, args.repeats, form)
        rows = [phase.row(limits) for phase in phases]
        title = name if form == "none" else f"{name} {form}"
        show(title, rows)
        found[title] = rows
    # a second measurement shows whether other processes slowed the machine down
    again = measure_limits()
    conditions.write_result(
        args.out,
        "engine.py",
        limits={"before": dataclasses.asdict(limits), "after": dataclasses.asdict(again)},
        models=found,
    )


if __name__ == "__main__":
    main()
