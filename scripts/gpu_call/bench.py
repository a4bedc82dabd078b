"""Rows per second of the native engine on the rows of `raybatch bench gpu`."""

import statistics
from dataclasses import asdict

import torch

from gpu_call.engine import dense_checkpoint, dense_shape, options
from gpu_call.models import SPARSE
from gpu_call.stage import Stage, run_stage
from raybatch.bench.checkpoints import Shape, write_checkpoint
from raybatch.bench.engine_run import EngineJob, EngineResult, run_engine
from raybatch.bench.gpu import ROWS_ON_CPU, ROWS_ON_GPU

# fewest seconds left with which an engine of the other model is started
_LEAST_SPARSE_S = 45.0


def main(stage: Stage) -> None:
    run = _Runs(stage)
    path = dense_checkpoint(stage)
    stage.attempt("dense", lambda: run.of("dense", str(path), dense_shape(stage)))
    if stage.is_gpu and stage.left_s() > _LEAST_SPARSE_S:
        path = stage.work / "sparse"
        write_checkpoint(SPARSE, path, dtype=torch.bfloat16, device=stage.device)
        torch.cuda.empty_cache()
        stage.attempt("experts", lambda: run.of("experts", str(path), SPARSE))


class _Runs:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        stage.put(engines={})

    def of(self, name: str, path: str, shape: Shape) -> None:
        stage = self._stage
        # the two kinds of rows that differ in sharing come first, long prompts last
        rows = sorted(ROWS_ON_GPU if stage.is_gpu else ROWS_ON_CPU, key=lambda r: r.num_rows < 64)
        job = EngineJob(
            kind="native",
            model=path,
            rows=tuple(rows),
            vocab_size=shape.vocab_size,
            num_repeats=1,
            # an engine that cannot capture graphs raises instead of timing eager steps
            engine=options(stage, **({"cuda_graphs": True} if stage.is_gpu else {})),
        )
        run_engine(job, lambda result: self._note(name, result))
        runs = stage.found["engines"][name]["runs"]
        for unit in ("rows", "tokens"):
            rates = [f"{run['name']} {_short(run[f'{unit}_per_s'])}" for run in runs]
            stage.figure(f"{name}, {unit}/s: {', '.join(rates)}")

    def _note(self, name: str, result: EngineResult) -> None:
        runs = []
        for run in result.runs:
            seconds = statistics.median(run.seconds)
            tokens = run.prompt_tokens + run.output_tokens
            rates = {"rows_per_s": run.num_rows / seconds, "tokens_per_s": tokens / seconds}
            fields = asdict(run)
            del fields["token_ids"]
            runs.append({**fields, **rates})
        self._stage.found["engines"][name] = {"load_s": result.load_s, "runs": runs}
        self._stage.put()


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


if __name__ == "__main__":
    run_stage("bench", main)
