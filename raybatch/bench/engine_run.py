"""Times one engine in a separate process, on random rows that are equal for all engines.

Run it with a JSON object (`EngineJob`) as the only argument; each line of stdout is the result so
far.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from raybatch.backends.base import Backend
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.records.types import Request, Sampling

# rows whose tokens are compared between engines
NUM_COMPARED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A kind of random rows: groups of rows that share a prefix, each row with its own suffix."""

    name: str
    num_rows: int
    prompt_tokens: int
    output_tokens: int
    rows_per_group: int = 1
    shared_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJob:
    """What one benchmark process runs: an engine of backend `kind` on several kinds of rows.

    `engine` are options of `EngineConfig`, `options` those of the backend.
    """

    kind: str
    model: str
    rows: tuple[Rows, ...]
    vocab_size: int
    num_repeats: int = 3
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsRun:
    """Result of one kind of rows: seconds of each repeat, and the tokens of the first few rows."""

    name: str
    num_rows: int
    seconds: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    token_ids: tuple[tuple[int, ...], ...]
    num_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineResult:
    kind: str
    load_s: float
    runs: tuple[RowsRun, ...]


def requests_of(rows: Rows, vocab_size: int, *, seed: int, first_id: int) -> list[Request]:
    """Return the requests for `rows`; each seed gives other tokens, so no prefix cache hits.

    Request ids count from `first_id`.
    """
    random = np.random.default_rng((seed, rows.num_rows, rows.prompt_tokens))
    sampling = Sampling(temperature=0, max_tokens=rows.output_tokens, ignore_eos=True)
    requests, shared = [], np.empty(0, np.int32)
    for i in range(rows.num_rows):
        if i % rows.rows_per_group == 0:
            shared = random.integers(1, vocab_size, rows.shared_tokens).astype(np.int32)
        own = random.integers(1, vocab_size, rows.prompt_tokens - rows.shared_tokens)
        prompt = np.concatenate([shared, own.astype(np.int32)])
        group = i // rows.rows_per_group if rows.shared_tokens else None
        requests.append(
            Request(
                request_id=first_id + i,
                row_id=str(i),
                prompt_token_ids=prompt,
                sampling=sampling,
                group_id=None if group is None else first_id + group,
                prefix_len=rows.shared_tokens,
            )
        )
    return requests


def run_engine(job: EngineJob, tell: Callable[[EngineResult], None]) -> None:
    """Start the engine of a job and time it; raises RuntimeError if a row fails.

    After each kind of rows, `tell` is called with the results so far.
    """
    began = time.perf_counter()
    config = EngineConfig(**job.engine)
    backend = create_backend(job.model, BackendConfig(kind=job.kind, options=job.options), config)
    load_s = time.perf_counter() - began
    try:
        runs: list[RowsRun] = []
        next_id = 0
        for rows in job.rows:
            # warm-up: compiles and captures for this kind of rows
            seconds: list[float] = []
            first_tokens: tuple[tuple[int, ...], ...] = ()
            num_steps = 0
            for repeat in range(1 + job.num_repeats):
                requests = requests_of(rows, job.vocab_size, seed=repeat, first_id=next_id)
                next_id += rows.num_rows
                taken_s, tokens, steps = answer(backend, requests)
                if repeat:
                    seconds.append(taken_s)
                else:
                    first_tokens, num_steps = tokens, steps
            runs.append(
                RowsRun(
                    name=rows.name,
                    num_rows=rows.num_rows,
                    seconds=tuple(seconds),
                    prompt_tokens=rows.num_rows * rows.prompt_tokens,
                    output_tokens=rows.num_rows * rows.output_tokens,
                    token_ids=first_tokens[:NUM_COMPARED],
                    num_steps=num_steps,
                )
            )
            tell(EngineResult(kind=job.kind, load_s=load_s, runs=tuple(runs)))
    finally:
        backend.close()


def answer(
    backend: Backend, requests: list[Request]
) -> tuple[float, tuple[tuple[int, ...], ...], int]:
    """Run requests to the end; return (seconds, tokens of each row, number of engine steps)."""
    first_id, steps = requests[0].request_id, backend.stats().num_steps
    tokens: dict[int, tuple[int, ...]] = {}
    began = time.perf_counter()
    backend.submit(requests)
    while backend.num_unfinished():
        for completion in backend.poll():
            if completion.error:
                number = completion.request_id - first_id
                raise RuntimeError(f"row {number} failed: {completion.error}")
            tokens[completion.request_id - first_id] = tuple(completion.token_ids.tolist())
    seconds = time.perf_counter() - began
    answers = tuple(tokens[i] for i in range(len(requests)))
    return seconds, answers, backend.stats().num_steps - steps


def main() -> None:
    """Run the `EngineJob` given as JSON on the command line; print results as JSON lines to stdout.

    Libraries print to stderr.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    fields = json.loads(sys.argv[1])
    job = EngineJob(**fields | {"rows": tuple(Rows(**rows) for rows in fields["rows"])})
    run_engine(job, lambda result: print(json.dumps(asdict(result)), file=answers, flush=True))


if __name__ == "__main__":
    main()
