"""Measures the gain of drafts: the same rows with and without `speculative_tokens`, in turns.

python benchmarks/speculation.py                              # 30M parameters, 4 to 64 rows at once
python benchmarks/speculation.py --layers 4 --rows 8 --out result.json

Two kinds of rows run on a model that copies (`copy_model.py`): "extract" repeats a passage of its
prompt, where drafts should pay; "random" samples random tokens, where drafts should cost nothing.
Times are CPU seconds of the process. Both sides must give the same tokens.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import conditions
import copy_model
import models
import numpy as np

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.records.types import Request, Sampling

KINDS = {"extract": 0.0, "random": 1e6}
# smaller ids include the end token
FIRST_TOKEN = 10


def requests_of(
    kind: str, num_rows: int, *, prompt_len: int, output_len: int, seed: int
) -> list[Request]:
    """Return rows with prompts of distinct tokens, except that the last repeats one of the first.

    So a copying model continues with the tokens after the first occurrence.
    """
    rng = np.random.default_rng(seed)
    sampling = Sampling(temperature=KINDS[kind], max_tokens=output_len, ignore_eos=True)
    requests = []
    for i in range(num_rows):
        passage = rng.permutation(np.arange(FIRST_TOKEN, models.VOCAB_SIZE))[: prompt_len - 1]
        prompt = np.append(passage, passage[rng.integers(prompt_len // 4)])
        requests.append(
            Request(
                request_id=i,
                row_id=str(i),
                prompt_token_ids=prompt.astype(np.int32),
                sampling=sampling,
                # other seeds in each repetition, so that no run has generated the tokens before
                seed=(seed << 16 | num_rows) << 16 | i,
            )
        )
    return requests


def run(backend: NativeBackend, requests: list[Request]) -> tuple[float, dict[int, list[int]]]:
    """Return the CPU seconds of the process, and the tokens by row."""
    began = time.process_time()
    backend.submit(requests)
    done: dict[int, list[int]] = {}
    while backend.num_unfinished():
        done |= {c.request_id: c.token_ids.tolist() for c in backend.poll()}
    return time.process_time() - began, done


def measure(
    backends: dict[str, NativeBackend], kind: str, num_rows: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return medians of CPU seconds, and the drafts, of rows that all run at once."""
    seconds: dict[str, list[float]] = {name: [] for name in backends}
    before = backends["drafts"].stats()
    for repetition in range(args.repetitions + 1):
        requests = requests_of(
            kind, num_rows, prompt_len=args.prompt_len, output_len=args.output_len, seed=repetition
        )
        found = {}
        order = list(backends) if repetition % 2 else list(backends)[::-1]
        for name in order:
            spent, found[name] = run(backends[name], requests)
            # the first repetition warms up
            if repetition:
                seconds[name].append(spent)
        if found["drafts"] != found["plain"]:
            raise RuntimeError(f"{kind}, {num_rows} rows: drafts changed the answers")
    after = backends["drafts"].stats()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    drafted = after.num_drafted_tokens - before.num_drafted_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return {
        "kind": kind,
        "rows": num_rows,
        "cpu_s": seconds,
        "plain_over_drafts": round(medians["plain"] / medians["drafts"], 3),
        "drafted": drafted,
        "accepted": accepted,
        "generated": after.generated_tokens - before.generated_tokens,
    }


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), default=sorted(KINDS))
    parser.add_argument("--drafts", type=int, default=8, help="speculative_tokens")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = copy_model.CopyShape(
        hidden_size=args.hidden,
        num_layers=args.layers,
        num_heads=args.hidden // copy_model.HEAD_DIM,
        intermediate_size=3 * args.hidden,
    )
    with tempfile.TemporaryDirectory() as folder:
        copy_model.write(Path(folder), shape)
        backends = {
            name: create(
                folder,
                EngineConfig(
                    dtype="float32",
                    device="cpu",
                    kv_cache_bytes=256 << 20,
                    speculative_tokens=drafts,
                ),
            )
            for name, drafts in (("plain", None), ("drafts", args.drafts))
        }
        results = []
        for kind in args.kinds:
            for num_rows in args.rows:
                results.append(measure(backends, kind, num_rows, args))
                print(json.dumps({k: v for k, v in results[-1].items() if k != "cpu_s"}))
    conditions.write_result(
        args.out,
        "speculation.py",
        shape={k: v for k, v in vars(args).items() if k != "out"},
        results=results,
    )


if __name__ == "__main__":
    main()
