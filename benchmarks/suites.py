"""Suites of measurements: the peers, the workloads for each model, and which peers run them.

An engine peer stays loaded and runs one workload after another. A job peer is a process per
repetition, measured from its start to its exit. A pool peer is also a process per repetition,
measured while its engines work.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from prefix_orders import PromptOrder, rows_in_order
from workloads_e2e import Kind, Workload, scaled

PeerKind = Literal["engine", "job", "pool"]
REFERENCE = "transformers-reference"
BASELINE = "raybatch"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One contestant.

    Args:
        name: name in tables.
        venv: key of `venvs.RECIPES`.
        script: script in this folder.
        variant: variant that the script gets.
        kind: "engine" (one in the peer's process), "job" or "pool" (of engine actors).
        max_requests: most requests of a workload that a slow peer runs; rates are compared.
        capped_kinds: the kinds of workload to which `max_requests` applies.
        replicas: engines of one job or pool.
        baseline: the peer that its rates are compared with.
        order: order of its prompts; None keeps the order of the workload.
        process: name of the engine process that is shared by peers that differ only in the order
            of their prompts; None for a separate process.
        block_size: positions of one cache block, if it is not the common one.
    """

    name: str
    venv: str
    script: str
    variant: str
    kind: PeerKind = "engine"
    max_requests: int | None = None
    capped_kinds: tuple[Kind, ...] = ("random", "mixed", "tail", "shared")
    replicas: int = 1
    baseline: str = BASELINE
    order: PromptOrder | None = None
    process: str | None = None
    block_size: int | None = None

    @property
    def process_name(self) -> str:
        """Name of the process that answers for this peer."""
        return self.process or self.name


def _on_one_and_two(name: str, *, venv: str, script: str, variant: str) -> tuple[Peer, Peer]:
    """Return a job on one replica and on two, each compared with ours on the same number."""
    one = Peer(
        name=name, venv=venv, script=script, variant=variant, kind="job", baseline="raybatch-job"
    )
    two = dataclasses.replace(one, name=f"{name}-2", replicas=2, baseline="raybatch-job-2")
    return one, two


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name=BASELINE, venv="raybatch", script="peer_raybatch.py", variant="engine"),
        Peer(name="vllm-eager", venv="vllm", script="peer_vllm.py", variant="eager"),
        Peer(name="vllm-compiled", venv="vllm", script="peer_vllm.py", variant="compiled"),
        Peer(
            name="raybatch-vllm",
            venv="vllm",
            script="peer_raybatch_vllm.py",
            variant="engine-compiled",
        ),
        Peer(
            name="transformers-static",
            venv="transformers",
            script="peer_transformers.py",
            variant="static",
            max_requests=64,
            capped_kinds=("tail", "shared"),
        ),
        Peer(
            name="transformers-continuous",
            venv="transformers",
            script="peer_transformers.py",
            variant="continuous",
            max_requests=32,
        ),
        *_on_one_and_two("raybatch-job", venv="raybatch", script="peer_raybatch.py", variant="job"),
        *_on_one_and_two(
            "raybatch-vllm-job", venv="vllm", script="peer_raybatch_vllm.py", variant="job-eager"
        ),
        *_on_one_and_two("raydata-llm", venv="vllm", script="peer_raydata_llm.py", variant="eager"),
        Peer(
            name="raybatch-pool",
            venv="raybatch",
            script="peer_pool.py",
            variant="pool",
            kind="pool",
            baseline="raybatch-pool",
        ),
        Peer(
            name="raybatch-pool-2",
            venv="raybatch",
            script="peer_pool.py",
            variant="pool",
            kind="pool",
            replicas=2,
            baseline="raybatch-pool",
        ),
    )
}

# the quick suite leaves out peers that take minutes and answer the same question
DEFAULT_PEERS = {
    "quick": tuple(n for n, peer in PEERS.items() if peer.replicas == 1 and peer.kind != "pool"),
    "full": tuple(PEERS),
}

RANDOM = Workload(name="random", kind="random", num_requests=256, prompt_len=128, output_len=64)
MIXED = Workload(name="mixed", kind="mixed", num_requests=256, prompt_len=128, output_len=64)
TAIL = Workload(name="tail", kind="tail", num_requests=512, prompt_len=32, output_len=6)
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
POOL = Workload(name="pool", kind="random", num_requests=256, prompt_len=128, output_len=64)

WORKLOADS = {w.name: w for w in (RANDOM, MIXED, TAIL, SHARED, SHUFFLED, SHORT, POOL)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One model with the workloads that its engines, its jobs and its pools run."""

    model: str
    engine: tuple[Workload, ...]
    job: tuple[Workload, ...] = ()
    pool: tuple[Workload, ...] = ()

    def workloads(self, kind: PeerKind) -> tuple[Workload, ...]:
        """Return the workloads that peers of a kind run."""
        return {"engine": self.engine, "job": self.job, "pool": self.pool}[kind]

    def changed(self, change: Callable[[Workload], Workload | None]) -> "Part":
        """Return the part with every workload changed; those that become None are left out."""

        def changes(those: tuple[Workload, ...]) -> tuple[Workload, ...]:
            return tuple(new for w in those if (new := change(w)) is not None)

        return Part(
            model=self.model,
            engine=changes(self.engine),
            job=changes(self.job),
            pool=changes(self.pool),
        )


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
        Part(
            model="dense-4m",
            engine=(RANDOM, MIXED, TAIL, SHARED, SHUFFLED),
            job=(SHORT, TAIL),
            pool=(POOL,),
        ),
        Part(model="moe-8m", engine=(RANDOM, MIXED, SHARED), job=(SHORT,)),
        Part(
            model="dense-60m",
            engine=(scaled(RANDOM, 64), scaled(MIXED, 64), scaled(SHARED, 64)),
            pool=(scaled(POOL, 128),),
        ),
        Part(
            model="moe-100m",
            engine=(scaled(RANDOM, 64), scaled(MIXED, 64), scaled(SHARED, 64)),
            pool=(scaled(POOL, 128),),
        ),
    ),
}


def parts(
    suite: str, models: Sequence[str], workloads: Sequence[str], requests: int | None
) -> list[Part]:
    """Return the parts of a suite, limited to those that the command line names.

    Args:
        suite: key of `SUITES`.
        models: names, or none for those of the suite; a model that the suite does not have runs
            the workloads of its first part.
        workloads: names, or none for those of the suite.
        requests: number of requests of every workload; None keeps the suite's.
    """

    def narrowed(workload: Workload) -> Workload | None:
        if workloads and workload.name not in workloads:
            return None
        return scaled(workload, requests) if requests else workload

    known = {part.model: part for part in SUITES[suite]}
    chosen = [
        known.get(model) or dataclasses.replace(SUITES[suite][0], model=model)
        for model in (models or known)
    ]
    return [part.changed(narrowed) for part in chosen]


def rows_to_run(workload: Workload, peer: Peer) -> list[int] | None:
    """Return the requests that a peer runs, in its order; None for all in the workload's order.

    A slow peer runs only the first ones.
    """
    if peer.order is not None:
        return list(rows_in_order(workload, peer.order))
    if peer.max_requests is None or workload.kind not in peer.capped_kinds:
        return None
    if peer.max_requests >= workload.num_requests:
        return None
    return list(range(peer.max_requests))


def sample_rows(workload: Workload, count: int) -> list[int]:
    """Return `count` requests spread evenly over the workload."""
    count = min(count, workload.num_requests)
    return [i * workload.num_requests // count for i in range(count)]
