"""Messages between a peer process and the driver: one JSON line per answer, over pipes.

A peer starts its engine, answers with a line about it, and then answers each command line until its
input ends. Output of libraries goes to stderr, so that stdout has only answers. This module runs in
every peer's venv, so it imports only the standard library.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

import workloads_e2e
from workloads_e2e import TokenRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options that are equal for every peer, if the peer has them.

    Args:
        kv_tokens: positions of KV cache.
        block_size: positions of one cache block.
        max_num_seqs: sequences that may run at once.
        max_batched_tokens: token budget of one step.
        max_model_len: longest prompt plus output.
        num_threads: computing threads of one engine.
    """

    kv_tokens: int = 65_536
    block_size: int = 64
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_model_len: int = 2048
    num_threads: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerConfig:
    """The only argument of a peer process.

    Args:
        model: checkpoint folder.
        variant: form of the peer, such as "eager" or "compiled".
        settings: options that are equal for every peer.
        options: options of this peer alone, such as the paths of a whole job.
    """

    model: str
    variant: str
    settings: Settings = field(default_factory=Settings)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Results of a workload: tokens of each request in order, and counters."""

    token_ids: Sequence[Sequence[int]]
    counters: dict[str, float] = field(default_factory=dict)


class PeerEngine(Protocol):
    """One loaded engine."""

    def reset(self) -> None:
        """Forget the KV of earlier runs; not measured."""

    def warm_up(self, requests: Sequence[TokenRequest]) -> Answer:
        """Run some requests before anything is measured; may tune itself for their lengths."""

    def generate(self, requests: Sequence[TokenRequest]) -> Answer:
        """Run all requests greedily to their exact lengths; measured."""


def read_config(argument: str) -> PeerConfig:
    """Read the process argument that `dataclasses.asdict` and `json.dumps` made."""
    fields = json.loads(argument)
    return PeerConfig(**{**fields, "settings": Settings(**fields["settings"])})


def take_stdout() -> TextIO:
    """Keep stdout for answers, and send all other output to stderr."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of `names` without missing packages."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def say(answers: TextIO, answer: dict[str, Any]) -> None:
    """Write one answer line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def outputs(config: PeerConfig) -> list[str]:
    """Return an output folder for each run of a job."""
    folder, times = config.options["output"], config.options.get("times", 1)
    return [folder, *(f"{folder}-{number}" for number in range(1, times))]


def say_runs(answers: TextIO, runs: Sequence[dict[str, float]], packages: Iterable[str]) -> None:
    """Answer with the seconds of each run of a job; top-level fields are those of the first run."""
    say(answers, {"versions": versions(packages), "runs": list(runs), **runs[0]})


def serve(start: Callable[[PeerConfig], PeerEngine], packages: Iterable[str]) -> None:
    """Load the engine of this process's config and answer commands until stdin ends.

    A command is {"workload": fields, "rows": indices or null, "is_warm_up": bool}; `rows` picks
    some of the workload's requests.
    """
    answers = take_stdout()
    config = read_config(sys.argv[1])
    began = time.perf_counter()
    engine = start(config)
    load_s = time.perf_counter() - began
    say(answers, {"load_s": load_s, "versions": versions(packages)})
    for line in sys.stdin:
        say(answers, _run(engine, json.loads(line)))


def _run(engine: PeerEngine, command: dict[str, Any]) -> dict[str, Any]:
    workload = workloads_e2e.from_json(command["workload"])
    requests = workloads_e2e.build(workload)
    workload_digest = workloads_e2e.digest(requests)
    if command.get("rows") is not None:
        requests = [requests[i] for i in command["rows"]]
    engine.reset()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    answer = (engine.warm_up if command.get("is_warm_up") else engine.generate)(requests)
    cpu_s = time.process_time() - cpu_s
    wall_s = time.perf_counter() - wall_s
    return {
        "workload_digest": workload_digest,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        **outcome(requests, answer),
    }


def outcome(requests: Sequence[TokenRequest], answer: Answer) -> dict[str, Any]:
    """Describe the tokens of an answer, and list rows whose length is not the requested one."""
    wrong = [
        i
        for i, (request, tokens) in enumerate(zip(requests, answer.token_ids, strict=True))
        if len(tokens) != request.output_len
    ]
    return {
        "num_requests": len(requests),
        "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        "output_tokens": sum(len(tokens) for tokens in answer.token_ids),
        "rows_of_wrong_length": wrong,
        "row_digests": [workloads_e2e.row_digest(tokens) for tokens in answer.token_ids],
        "counters": answer.counters,
    }
