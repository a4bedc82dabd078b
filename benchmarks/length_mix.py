"""Measures how different lengths slow decode attention, and from which factor stages would pay.

Run: OMP_NUM_THREADS=1 python benchmarks/length_mix.py --out result.json

1. The curve: attention of decoding rows with the same total of KV tokens, and lengths whose
   standard deviation over mean grows (quantiles of a log-normal). One layer, no projections, with
   the kernel of an engine on this host. Rounds are interleaved; times are medians of thread CPU
   time.
2. The quality model: costs of an engine's steps (dense-4m; lengths and batches that double), and
   its error on held-out steps compared with that of a constant.
3. The choice: `choose_stages` for an H100 with costs from its data sheet, on rows of the length
   spread W7, with the curve of part 1 and with factors that CascadeInfer measured (1.1 to 2.1 if
   the deviation equals the mean). No GPU is measured here.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import conditions
import length_mix_picture
import models
import numpy as np
import torch
from stage_layouts import H100, H100_LIMITS, H100_MOVES

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.config.environment import kernel_vectors
from raybatch.kernels.attention import TORCH_DECODE
from raybatch.kernels.attention_plan import DecodeForm, DecodePart
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.policy.cost.cost_model import MeasuredStep, prompt_pairs
from raybatch.records.types import Request, Sampling
from raybatch_lab.stages.choice import choose_stages
from raybatch_lab.stages.heterogeneity import FLAT, MixCurve, MixPoint
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.quality import fit_quality
from raybatch_lab.stages.replica_seconds import StagePool

VARIATIONS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
# rows and their mean length: about 66,000 KV tokens per batch. The last block of a row is half
# full, as it is on average in rows of different lengths
BATCHES = ((64, 1032), (256, 264), (512, 136))
# query heads, KV heads, head dim
SHAPES = (((8, 2), 64), ((16, 2), 128))
BLOCK_SIZE = 16
# calls of a sample
CALLS = 4
STEP_LENS, STEP_ROWS, NUM_STEPS = (64, 128, 256, 512, 1024), (1, 2, 4, 8, 16, 32, 64), 5
# fewest prompt tokens of a step
CHUNK = 256
FACTORS = (1.1, 1.3, 1.5, 1.7, 1.9, 2.1, 3.0)
# rows of a job, and replicas
JOBS = ((2000, 16), (20_000, 16), (20_000, 4))


def lengths_of(num_rows: int, mean: int, variation: float) -> np.ndarray:
    """Return lengths with this mean, as exactly as whole tokens allow, in a random order."""
    sigma = np.sqrt(np.log1p(variation**2))
    normal = statistics.NormalDist()
    places = [normal.inv_cdf((i + 0.5) / num_rows) for i in range(num_rows)]
    drawn = np.exp(sigma * np.array(places))
    lengths = np.maximum(1, np.round(drawn * mean / drawn.mean())).astype(np.int64)
    # the longest row absorbs the rounding
    lengths[-1] += num_rows * mean - lengths.sum()
    return np.random.default_rng(0).permutation(lengths)


class Batch:
    """Rows over a pool that all batches read; the blocks of a row are adjacent."""

    def __init__(
        self, lengths: np.ndarray, pools: torch.Tensor, q: torch.Tensor, form: DecodeForm
    ) -> None:
        counts = torch.from_numpy(-(-lengths // BLOCK_SIZE))
        self.num_blocks = num_blocks = int(counts.sum())
        self.lengths, self.pools, self.q, self.form = lengths, pools, q, form
        firsts = torch.cat([torch.arange(n) for n in counts.tolist()]) * BLOCK_SIZE
        owners = torch.arange(len(lengths)).repeat_interleave(counts)
        part = DecodePart(
            block_ids=torch.arange(num_blocks),
            owners=owners,
            num_valid=(torch.from_numpy(lengths)[owners] - firsts).clamp(max=BLOCK_SIZE),
            is_contiguous=True,
            first_positions=firsts,
        )
        positions = torch.from_numpy(lengths) - 1
        self.plan = form.plan(part, positions=positions, pool=self.pools[0], windows=(None,))

    @property
    def variation(self) -> float:
        return float(self.lengths.std() / self.lengths.mean())

    def attend(self) -> torch.Tensor:
        return self.form.attend(self.q, self.pools[0], self.pools[1], self.plan, None)[0]

    def check(self) -> None:
        """Raise AssertionError unless the longest and the shortest row equal torch's attention."""
        found = self.attend()
        starts = np.cumsum(-(-self.lengths // BLOCK_SIZE)) - -(-self.lengths // BLOCK_SIZE)
        for row in (int(self.lengths.argmax()), int(self.lengths.argmin())):
            length = int(self.lengths[row])
            blocks = slice(int(starts[row]), int(starts[row]) - -length // BLOCK_SIZE)
            k, v = (pool[blocks].transpose(0, 1).flatten(1, 2)[:, :length] for pool in self.pools)
            q = self.q[row].view(k.shape[0], -1, self.q.shape[-1])
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            torch.testing.assert_close(found[row], expected.flatten(0, 1), rtol=1e-4, atol=1e-4)


def measure_curve(
    num_rows: int, mean: int, heads: tuple[int, int], head_dim: int, form: DecodeForm, rounds: int
) -> dict[str, Any]:
    """Return the CPU milliseconds of each variation, and its factor."""
    torch.manual_seed(0)
    num_blocks = num_rows * (mean // BLOCK_SIZE + 2)
    # all batches use the same memory, because some pages are faster than others
    pools = torch.randn(2, num_blocks, heads[1], BLOCK_SIZE, head_dim)
    q = torch.randn(num_rows, heads[0], head_dim)
    batches = [Batch(lengths_of(num_rows, mean, each), pools, q, form) for each in VARIATIONS]
    for batch in batches:
        batch.check()
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(rounds):
        for batch, own in zip(batches, times, strict=True):
            began = time.thread_time()
            for _ in range(CALLS):
                batch.attend()
            own.append((time.thread_time() - began) / CALLS * 1e3)
    medians = [statistics.median(own) for own in times]
    return {
        "rows": num_rows,
        "mean_length": mean,
        "query_heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": head_dim,
        "variation": [round(batch.variation, 3) for batch in batches],
        "blocks": [batch.num_blocks for batch in batches],
        "cpu_ms": [[round(each, 3) for each in own] for own in times],
        "median_ms": [round(each, 3) for each in medians],
        "factor": [round(each / medians[0], 3) for each in medians],
    }


class Steps:
    """Measures steps of an engine, one batch after another."""

    def __init__(self, backend: NativeBackend) -> None:
        self.backend, self.rng, self.num_requests = backend, np.random.default_rng(0), 0

    def decode(self, num_rows: int, length: int) -> MeasuredStep:
        """Return a step in which rows of about one length all decode."""
        # rows whose prompts are done decode while the prompts of others are computed
        num_more = num_rows * length // CHUNK
        requests = self._submit(num_rows, length, 2 * NUM_STEPS + num_more)
        seconds, total = [], 0
        while len(seconds) <= NUM_STEPS:
            before, began = self.backend.stats().generated_tokens, time.process_time()
            self.backend.poll()
            taken = time.process_time() - began
            generated = self.backend.stats().generated_tokens - before
            total += generated
            if generated == num_rows:
                seconds.append(taken)
        self.backend.abort(requests)
        return MeasuredStep(
            # the first step may have computed prompts
            seconds=statistics.median(seconds[1:]),
            tokens=num_rows,
            rows=num_rows,
            context_reads=num_rows * length + total - num_rows * NUM_STEPS / 2,
        )

    def prompt(self, length: int) -> MeasuredStep:
        self._submit(1, length, 1)
        began = time.process_time()
        while self.backend.num_unfinished():
            self.backend.poll()
        seconds, pairs = time.process_time() - began, prompt_pairs(np.array([length]))
        return MeasuredStep(seconds=seconds, tokens=length, rows=1, **pairs)

    def _submit(self, num_rows: int, length: int, max_tokens: int) -> list[int]:
        first = self.num_requests
        self.num_requests += num_rows
        numbers = range(first, self.num_requests)
        self.backend.submit(
            [
                Request(
                    request_id=number,
                    row_id=str(number),
                    prompt_token_ids=self.rng.integers(10, models.VOCAB_SIZE, length).astype(
                        np.int32
                    ),
                    sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
                )
                for number in numbers
            ]
        )
        return list(numbers)


def measure_steps(folder: str) -> list[MeasuredStep]:
    """Return steps of an engine: batches of one length that decode, and prompts."""
    models.write("dense-4m", Path(folder))
    config = EngineConfig(dtype="float32", device="cpu", kv_cache_bytes=1 << 30)
    steps = Steps(create(folder, config))
    steps.prompt(STEP_LENS[0])
    found = []
    for length in STEP_LENS:
        found += [steps.decode(num_rows, length) for num_rows in STEP_ROWS]
        found.append(steps.prompt(length))
    steps.backend.close()
    return found


def w7(num_rows: int) -> RowLengths:
    """Return rows of the length spread W7."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(6, 1.3, num_rows), 1, 120_000).astype(int)
    return RowLengths(prompts, np.clip(rng.lognormal(5.5, 1, num_rows), 1, 8192).astype(int))


def choices(measured: MixCurve) -> list[dict[str, Any]]:
    """Return the choice for each job and each curve."""
    curves = {"flat": FLAT, "measured here": measured}
    for factor in FACTORS:
        ends = MixPoint(variation=0.0, factor=1.0), MixPoint(variation=1.0, factor=factor)
        curves[f"{factor} at variation 1"] = MixCurve(points=ends)
    found = []
    for num_rows, num_replicas in JOBS:
        lengths = w7(num_rows)
        for name, curve in curves.items():
            pool = StagePool(
                num_replicas=num_replicas,
                quality=H100,
                curve=curve,
                limits=H100_LIMITS,
                moves=H100_MOVES,
            )
            choice = choose_stages(pool, lengths)
            row = {"rows": num_rows, "replicas": num_replicas, "curve": name}
            staged_s = None if choice.staged_s is None else round(choice.staged_s, 1)
            row |= {"sorted_s": round(choice.sorted_s, 1), "staged_s": staged_s}
            found.append({**row, "reason": choice.reason})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="use torch, not compiled kernels")
    parser.add_argument("--out", type=Path, help="write conditions, results and a picture (.svg)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    curves = []
    for heads, head_dim in SHAPES:
        form = None if options.torch else _compiled(heads, head_dim)
        for num_rows, mean in BATCHES:
            curve = measure_curve(
                num_rows, mean, heads, head_dim, form or TORCH_DECODE, options.rounds
            )
            curves.append(curve)
            cells = " ".join(
                f"{v:.2f}:{f:.2f}" for v, f in zip(curve["variation"], curve["factor"], strict=True)
            )
            print(f"{num_rows:4} rows of {mean:5}, heads {heads}, dim {head_dim}: {cells}")
    with tempfile.TemporaryDirectory() as folder:
        quality = fit_quality(measure_steps(folder))
    print(quality)
    worst = max(curves, key=lambda curve: max(curve["factor"]))
    chosen = choices(MixCurve.of_seconds(worst["variation"], worst["median_ms"]))
    for row in chosen:
        print(
            f"{row['rows']:6} rows, {row['replicas']:2} replicas, {row['curve']}: {row['reason']}"
        )
    conditions.write_result(
        options.out,
        "length_mix.py",
        vectors="torch" if options.torch else kernel_vectors() or "native",
        curves=curves,
        quality={"costs": quality.costs.tolist(), "says": str(quality)},
        choices=chosen,
    )
    if options.out is not None:
        options.out.with_suffix(".svg").write_text(length_mix_picture.picture(curves))


def _compiled(heads: tuple[int, int], head_dim: int) -> DecodeForm | None:
    return decode_form(
        head_dim=head_dim,
        num_grouped=heads[0] // heads[1],
        block_size=BLOCK_SIZE,
        kv_dtype=torch.float32,
    )


if __name__ == "__main__":
    main()
