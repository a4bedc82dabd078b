"""The sides of the prefix benchmark: engines, jobs and pools, and the orders that they get.

A contestant is one side that gets the prompts in one order, with one KV size, on some replicas. Its
name has all four.
"""

from dataclasses import dataclass

from prefix_orders import PROMPT_ORDERS, PromptOrder
from suites import Peer, PeerKind

# vLLM's attention on a CPU takes only multiples of this block size
VLLM_BLOCK_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One way to run prompts; the fields are those of a `Peer`.

    Args:
        block_size: None means `VLLM_BLOCK_SIZE` for vLLM and the common block size for others.
    """

    venv: str
    script: str
    variant: str
    kind: PeerKind = "engine"
    block_size: int | None = None

    @property
    def positions_per_block(self) -> int | None:
        """Return the block size of the side's engines; None for the common one."""
        if self.block_size is None and self.venv == "vllm":
            return VLLM_BLOCK_SIZE
        return self.block_size


SIDES = {
    "raybatch-plan": Side(venv="raybatch", script="peer_raybatch.py", variant="engine-plan"),
    "raybatch-32-plan": Side(
        venv="raybatch",
        script="peer_raybatch.py",
        variant="engine-plan",
        block_size=VLLM_BLOCK_SIZE,
    ),
    "raybatch-multi-plan": Side(
        venv="raybatch", script="peer_raybatch.py", variant="engine-plan-multi"
    ),
    "raybatch": Side(venv="raybatch", script="peer_raybatch.py", variant="engine"),
    "vllm-compiled": Side(venv="vllm", script="peer_vllm.py", variant="compiled"),
    "vllm-eager": Side(venv="vllm", script="peer_vllm.py", variant="eager"),
    "raybatch-vllm-plan": Side(
        venv="vllm", script="peer_raybatch_vllm.py", variant="engine-compiled-plan"
    ),
    "raybatch-vllm": Side(venv="vllm", script="peer_raybatch_vllm.py", variant="engine-compiled"),
    "raybatch-vllm-job-plan": Side(
        venv="vllm", script="peer_raybatch_vllm.py", variant="job-eager-plan", kind="job"
    ),
    "raybatch-vllm-job": Side(
        venv="vllm", script="peer_raybatch_vllm.py", variant="job-eager", kind="job"
    ),
    "raybatch-vllm-pipeline-plan": Side(
        venv="vllm", script="peer_raybatch_vllm.py", variant="pipeline-eager-plan", kind="job"
    ),
    "raybatch-vllm-pipeline": Side(
        venv="vllm", script="peer_raybatch_vllm.py", variant="pipeline-eager", kind="job"
    ),
    "raybatch-job-plan": Side(
        venv="raybatch", script="peer_raybatch.py", variant="job-plan", kind="job"
    ),
    "raybatch-job": Side(venv="raybatch", script="peer_raybatch.py", variant="job", kind="job"),
    "raydata-llm": Side(venv="vllm", script="peer_raydata_llm.py", variant="eager", kind="job"),
    "raydata-llm-default": Side(
        venv="vllm", script="peer_raydata_llm.py", variant="default", kind="job"
    ),
    "raybatch-pool-plan": Side(
        venv="raybatch", script="peer_pool.py", variant="pool-plan", kind="pool"
    ),
    "raybatch-pool": Side(venv="raybatch", script="peer_pool.py", variant="pool", kind="pool"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """A side in one setting; `name` and `parse` are inverse."""

    side: str
    order: PromptOrder = "shuffled"
    replicas: int = 1

    def name(self, kv_percent: int) -> str:
        return f"{self.side}/{self.order}/kv{kv_percent}/x{self.replicas}"

    def peer(self, kv_percent: int) -> Peer:
        """Return the peer that `Bench` runs; all orders share one engine process."""
        side = SIDES[self.side]
        engine = f"{self.side}-kv{kv_percent}"
        process = engine if side.kind == "engine" else f"{engine}-{self.order}-x{self.replicas}"
        return Peer(
            name=self.name(kv_percent),
            venv=side.venv,
            script=side.script,
            variant=side.variant,
            kind=side.kind,
            replicas=self.replicas,
            order=self.order,
            process=process,
            block_size=side.positions_per_block,
        )


def parse(name: str) -> tuple[Contestant, int]:
    """Return the contestant and the KV percentage of a name."""
    side, order, kv, replicas = name.split("/")
    contestant = Contestant(
        side=side,
        order=next(known for known in PROMPT_ORDERS if known == order),
        replicas=int(replicas.removeprefix("x")),
    )
    return contestant, int(kv.removeprefix("kv"))
