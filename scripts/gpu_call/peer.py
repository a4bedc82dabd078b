"""Times vLLM and the native engine on the same rows, each in a process: `scripts/gpu_peer.sh`."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gpu_call.models import DENSE, SPARSE
from raybatch.bench.checkpoints import write_checkpoint
from raybatch.bench.engine_run import EngineJob, Rows, requests_of, run_engine
from raybatch.bench.gpu import ROWS_ON_GPU

_MODELS = {"dense": DENSE, "experts": SPARSE}
_ENGINES = ("vllm", "native")
_MAX_LEN = 8192
_NUM_REPEATS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of all engines")
    parser.add_argument("--engine", choices=("native", "vllm"))
    parser.add_argument("--model", choices=tuple(_MODELS))
    args = parser.parse_args()
    if args.engine:
        run = _native if args.engine == "native" else _vllm
        run(args.work / args.model, args.model)
        return
    if find_spec("vllm") is None:
        parser.exit(
            2, "scripts/gpu_peer.sh: vLLM is not installed; the script's head says how to get it\n"
        )
    end = time.monotonic() + args.seconds
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "runs": {}}
    has_failed = False
    for idx, (model, shape) in enumerate(_MODELS.items()):
        write_checkpoint(shape, args.work / model, dtype=torch.bfloat16, device="cuda")
        torch.cuda.empty_cache()
        for number, engine in enumerate(_ENGINES):
            command = [sys.executable, "-m", "gpu_call.peer", "--engine", engine, "--model", model]
            command += ["--work", str(args.work), "--out", str(args.out)]
            # the engines that are left share the time that is left equally
            num_left = len(_MODELS) * len(_ENGINES) - len(_ENGINES) * idx - number
            left_s = (end - time.monotonic()) / num_left
            for result in results_of(command, seconds=left_s):
                found["runs"][f"{model}, {engine}"] = result
                args.out.write_text(json.dumps(found, indent=1))
            has_failed |= "failed" in result
        print("\n".join(compared(model, found["runs"])), flush=True)
    sys.exit(has_failed)


def results_of(command: Sequence[str], *, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the results so far at each output line of a process; "failed" in the last if it is."""
    result: dict[str, Any] = {}
    # a session, so that `_end` reaches child processes, which may hold the pipe and GPU memory
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        ends = threading.Timer(max(seconds, 0.0), _end, (process.pid,))
        ends.start()
        try:
            assert process.stdout is not None, "it is a pipe"
            for line in process.stdout:
                if line.startswith("{") and line.endswith("}\n"):
                    result = json.loads(line)
                    yield result
            code = process.wait()
        finally:
            ends.cancel()
            _end(process.pid)
    yield {**result, "failed": code} if code else result


def _end(process_id: int) -> None:
    """End a process and its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)


def compared(model: str, runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line per kind of rows: both rates, and the native engine's as a share of vLLM's."""
    lines = []
    for rows in ROWS_ON_GPU:
        seconds = [runs[f"{model}, {each}"].get("seconds", {}).get(rows.name) for each in _ENGINES]
        theirs, ours = (rows.num_rows / median(each) if each else None for each in seconds)
        rates = ", ".join(
            f"{name} {'no result' if rate is None else f'{rate:.3g} rows/s'}"
            for name, rate in (("native", ours), ("vLLM", theirs))
        )
        share = f": {ours / theirs:.0%}" if ours and theirs else ""
        lines.append(f"{model}, {rows.name}: {rates}{share}")
    return lines


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
    """Answer the same rows by vLLM with prefix caching."""
    from vllm import LLM, SamplingParams, TokensPrompt

    began = time.perf_counter()
    llm = LLM(
        model=str(path),
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
        print(json.dumps({"load_s": load_s, "seconds": runs}), flush=True)


def _check(outputs: Any, rows: Rows) -> None:
    lens = {len(output.outputs[0].token_ids) for output in outputs}
    assert lens == {rows.output_tokens}, f"vLLM generated {lens} tokens, not {rows.output_tokens}"


if __name__ == "__main__":
    main()
