"""What is measured: the peers, the workloads for each model, and which of them meet.

An engine peer stays loaded and answers one workload after the other; a job peer is a process per
repetition, measured from its start to its exit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from workloads_e2e import Kind, Workload, scaled

REFERENCE = "transformers-reference"
BASELINE = "raybatch"
JOB_BASELINE = "raybatch-job"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One contestant.

    Args:
        name: as printed.
        venv: key of `venvs.RECIPES`.
        script: in this folder.
        variant: passed to the script.
        kind: "engine" or "job".
        max_requests: a slow peer runs only so many requests of a workload; rates are compared.
        capped_kinds: the kinds of workload to which `max_requests` applies.
        replicas: engines of one job.
    """

    name: str
    venv: str
    script: str
    variant: str
    kind: Literal["engine", "job"] = "engine"
    max_requests: int | None = None
    capped_kinds: tuple[Kind, ...] = ("random", "mixed", "shared")
    replicas: int = 1


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name=BASELINE, venv="raybatch", script="peer_raybatch.py", variant="engine"),
        Peer(name="vllm-eager", venv="vllm", script="peer_vllm.py", variant="eager"),
        Peer(name="vllm-compiled", venv="vllm", script="peer_vllm.py", variant="compiled"),
        Peer(
            name="transformers-static",
            venv="transformers",
            script="peer_transformers.py",
            variant="static",
            max_requests=64,
            capped_kinds=("shared",),
        ),
        Peer(
            name="transformers-continuous",
            venv="transformers",
            script="peer_transformers.py",
            variant="continuous",
            max_requests=32,
        ),
        Peer(
            name=JOB_BASELINE,
            venv="raybatch",
            script="peer_raybatch.py",
            variant="job",
            kind="job",
        ),
        Peer(
            name="raybatch-job-2",
            venv="raybatch",
            script="peer_raybatch.py",
            variant="job",
            kind="job",
            replicas=2,
        ),
        Peer(
            name="raydata-llm",
            venv="vllm",
            script="peer_raydata_llm.py",
            variant="eager",
            kind="job",
        ),
        Peer(
            name="raydata-llm-2",
            venv="vllm",
            script="peer_raydata_llm.py",
            variant="eager",
            kind="job",
            replicas=2,
        ),
    )
}

# the quick suite leaves out what takes minutes and answers the same question
DEFAULT_PEERS = {
    "quick": tuple(name for name, peer in PEERS.items() if peer.replicas == 1),
    "full": tuple(PEERS),
}

RANDOM = Workload(name="random", kind="random", num_requests=256, prompt_len=128, output_len=64)
MIXED = Workload(name="mixed", kind="mixed", num_requests=256, prompt_len=128, output_len=64)
SHARED = Workload(
    name="shared",
    kind="shared",
    num_requests=256,
    prompt_len=32,
    output_len=16,
    doc_len=1024,
    queries_per_doc=16,
)
SHUFFLED = Workload(
    name="shared-shuffled",
    kind="shared",
    num_requests=256,
    prompt_len=32,
    output_len=16,
    doc_len=1024,
    queries_per_doc=16,
    order="shuffled",
)
SHORT = Workload(name="short256", kind="random", num_requests=256, prompt_len=32, output_len=16)

WORKLOADS = {w.name: w for w in (RANDOM, MIXED, SHARED, SHUFFLED, SHORT)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One model with the workloads that its engines and its jobs run."""

    model: str
    engine: tuple[Workload, ...]
    job: tuple[Workload, ...] = ()

    def workloads(self, peer: Peer) -> tuple[Workload, ...]:
        """Return what `peer` runs."""
        return self.engine if peer.kind == "engine" else self.job


SUITES: dict[str, tuple[Part, ...]] = {
    "quick": (
        Part(
            model="dense-4m",
            engine=(scaled(RANDOM, 64), scaled(MIXED, 64), scaled(SHARED, 64)),
            job=(SHORT,),
        ),
        Part(model="moe-8m", engine=(scaled(RANDOM, 64),)),
    ),
    "full": (
        Part(model="dense-4m", engine=(RANDOM, MIXED, SHARED, SHUFFLED), job=(SHORT,)),
        Part(model="moe-8m", engine=(RANDOM, MIXED, SHARED), job=(SHORT,)),
        Part(model="dense-60m", engine=(scaled(RANDOM, 64), scaled(MIXED, 64), scaled(SHARED, 64))),
        Part(model="moe-100m", engine=(scaled(RANDOM, 64), scaled(MIXED, 64), scaled(SHARED, 64))),
    ),
}


def parts(
    suite: str, models: Sequence[str], workloads: Sequence[str], requests: int | None
) -> list[Part]:
    """Return the parts of a suite, narrowed to what the command line names.

    Args:
        suite: key of `SUITES`.
        models: names, or none for those of the suite; a folder or "demo" takes the workloads of
            the suite's first part.
        workloads: names, or none for those of the suite.
        requests: another size for every workload.
    """

    def narrowed(those: tuple[Workload, ...]) -> tuple[Workload, ...]:
        kept = [w for w in those if not workloads or w.name in workloads]
        return tuple(scaled(w, requests) if requests else w for w in kept)

    known = {part.model: part for part in SUITES[suite]}
    first = SUITES[suite][0]
    chosen = [
        known.get(model) or Part(model=model, engine=first.engine, job=first.job)
        for model in (models or known)
    ]
    return [
        Part(model=part.model, engine=narrowed(part.engine), job=narrowed(part.job))
        for part in chosen
    ]


def rows_to_run(workload: Workload, peer: Peer) -> list[int] | None:
    """Return the requests that a slow peer runs, from the start; None for all."""
    if peer.max_requests is None or workload.kind not in peer.capped_kinds:
        return None
    if peer.max_requests >= workload.num_requests:
        return None
    return list(range(peer.max_requests))


def sample_rows(workload: Workload, count: int) -> list[int]:
    """Return `count` requests spread evenly over the workload."""
    count = min(count, workload.num_requests)
    return [i * workload.num_requests // count for i in range(count)]
