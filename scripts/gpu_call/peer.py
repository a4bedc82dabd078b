"""vLLM and the native engine on the same rows, each in a process: `scripts/gpu_peer.sh`."""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpu_call.models import DENSE, SPARSE
from raybatch.bench.checkpoints import write_checkpoint
from raybatch.bench.engine_run import EngineJob, Rows, requests_of, run_engine
from raybatch.bench.gpu import ROWS_ON_GPU

_MODELS = {"dense": DENSE, "experts": SPARSE}
_MAX_LEN = 8192
_NUM_REPEATS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True, help="packages that the host lacks")
    parser.add_argument("--engine", choices=("native", "vllm"))
    parser.add_argument("--model", choices=tuple(_MODELS))
    args = parser.parse_args()
    use_behind_host(args.site)
    if args.engine:
        run = _native if args.engine == "native" else _vllm
        run(args.work / args.model, args.model)
        return
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "runs": {}}
    for model, shape in _MODELS.items():
        write_checkpoint(shape, args.work / model, dtype=torch.bfloat16, device="cuda")
        torch.cuda.empty_cache()
        for engine in ("vllm", "native"):
            command = [sys.executable, "-m", "gpu_call.peer", "--engine", engine, "--model", model]
            command += ["--site", str(args.site), "--work", str(args.work), "--out", str(args.out)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            # each line is the result so far
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            result = json.loads(lines[-1]) if lines else {"failed": done.returncode}
            found["runs"][f"{model}, {engine}"] = result
            args.out.write_text(json.dumps(found, indent=1))
            print(f"{model}, {engine}: {json.dumps(result)[:300]}", flush=True)


def use_behind_host(site: Path) -> None:
    """Let packages of a folder be found where the host has none; PYTHONPATH would stand before."""
    sys.path.append(str(site))


def _native(path: Path, model: str) -> None:
    job = EngineJob(
        kind="native",
        model=str(path),
        rows=ROWS_ON_GPU,
        vocab_size=_MODELS[model].vocab_size,
        num_repeats=_NUM_REPEATS,
        engine={"device": "cuda", "max_model_len": _MAX_LEN},
    )

    def tell(result: Any) -> None:
        runs = {run.name: run.seconds for run in result.runs}
        print(json.dumps({"load_s": result.load_s, "seconds": runs}), flush=True)

    run_engine(job, tell)


def _vllm(path: Path, model: str) -> None:
    """Answer the same rows by vLLM, with random weights of its own and prefix caching."""
    from vllm import LLM, SamplingParams, TokensPrompt

    began = time.perf_counter()
    llm = LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=_MAX_LEN,
        max_num_seqs=1024,
        enable_prefix_caching=True,
    )
    load_s, runs = time.perf_counter() - began, {}
    for rows in ROWS_ON_GPU:
        seconds = []
        for repeat in range(1 + _NUM_REPEATS):
            requests = requests_of(rows, _MODELS[model].vocab_size, seed=repeat, first_id=0)
            prompts = [
                TokensPrompt(prompt_token_ids=each.prompt_token_ids.tolist()) for each in requests
            ]
            sampling = SamplingParams(
                temperature=0, max_tokens=rows.output_tokens, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            # the first run compiles
            if repeat:
                seconds.append(time.perf_counter() - start)
            _check(outputs, rows)
        runs[rows.name] = seconds
        print(json.dumps({"load_s": load_s, "seconds": runs, **asdict(rows)}), flush=True)


def _check(outputs: Any, rows: Rows) -> None:
    lens = {len(output.outputs[0].token_ids) for output in outputs}
    assert lens == {rows.output_tokens}, f"vLLM made {lens} tokens, of {rows.output_tokens}"


if __name__ == "__main__":
    main()
