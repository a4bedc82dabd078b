"""How long a forward pass takes under a plan, as a graph of its computations and copies.

A pass follows Algorithm 1 of BatchGen (arXiv:2606.21712, section 5.1): in every layer attention
runs over sub-batches, then all their tokens meet at the gate and the experts run once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from raybatch.policy.batches.layer_dag import DagNode, critical_path
from raybatch.policy.batches.layer_plan import (
    KV_SLOTS,
    BatchPlan,
    ModelShape,
    ModuleCosts,
    Workload,
)
from raybatch.policy.cost.roofline import Roofline, Work

# layers that are laid out one by one; what is beyond repeats the second half of them
_UNROLLED_LAYERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTime:
    """Predicted time of one forward pass through all layers.

    Embedding and head are left out: no choice of a plan changes what they take for a token.

    Args:
        busy_fraction: by resource, the share of the time that it works, in the laid out layers.
        longest_chain: names of the nodes that decide the time, in the laid out layers.
    """

    seconds: float
    layer_s: float
    busy_fraction: dict[str, float]
    longest_chain: tuple[str, ...]


def forward_time(
    model: ModelShape, costs: ModuleCosts, plan: BatchPlan, workload: Workload
) -> ForwardTime:
    """Return how long a forward pass takes by the critical path of its first layers.

    What one more layer adds is taken from the second half of the layers that are laid out, where
    prefetched parameters no longer have the head start of the first.
    """
    num_laid = min(_UNROLLED_LAYERS, model.num_layers)
    nodes = forward_dag(model, costs, plan, workload, num_layers=num_laid)
    laid = critical_path(nodes)
    num_first = num_laid // 2
    if num_first:
        # no node waits for one of a later layer, so the first ones end as they would alone
        per_layer = len(nodes) // num_laid
        first_s = max(laid.finish_s[: num_first * per_layer])
        layer_s = (laid.seconds - first_s) / (num_laid - num_first)
    else:
        layer_s = laid.seconds
    # a plan that takes no time keeps nothing busy
    total = laid.seconds or 1.0
    return ForwardTime(
        seconds=laid.seconds + (model.num_layers - num_laid) * layer_s,
        layer_s=layer_s,
        busy_fraction={name: busy / total for name, busy in laid.busy_s.items()},
        longest_chain=laid.names,
    )


def forward_dag(
    model: ModelShape, costs: ModuleCosts, plan: BatchPlan, workload: Workload, *, num_layers: int
) -> list[DagNode]:
    """Return the nodes of the first layers, each after all that it waits for.

    A name is "layer.module.number". A restore and a run of attention wait for a free slot of KV, a
    load for a free buffer of the ring, the experts for all of the layer's attention.
    """
    layout = _Layout(model, costs, plan, workload)
    return [node for idx in range(num_layers) for node in layout.layer(idx)]


class _Layout:
    """Lays out one layer after the other; numbers of pieces and sub-batches count on."""

    def __init__(
        self, model: ModelShape, costs: ModuleCosts, plan: BatchPlan, workload: Workload
    ) -> None:
        self._costs, self._plan = costs, plan
        shape, self._workload = model.layer, workload
        self._shape = shape
        full, rest = divmod(plan.gate_tokens, plan.attention_tokens)
        self._runs = [plan.attention_tokens] * full + [rest] * (rest > 0)
        self._num_pieces = 1 if plan.parameter_buffers is None else model.num_pieces
        whole = shape.ffn_work(plan.gate_tokens)
        piece = Work(
            operations=whole.operations / self._num_pieces,
            moved_bytes=whole.moved_bytes / self._num_pieces,
        )
        self._piece_s = costs.ffn.seconds(piece)
        self._load_s = _copy_s(costs.to_device, shape.ffn_bytes / self._num_pieces)

    def layer(self, idx: int) -> Iterator[DagNode]:
        """Give the nodes of one layer; loads that find a buffer run during attention."""
        buffers = self._plan.parameter_buffers
        num_early = min(buffers or 0, self._num_pieces)
        if not self._plan.has_kv_on_host:
            yield from (self._load(idx, piece) for piece in range(num_early))
            # nothing runs between runs of attention, so one node stands for all of them
            seconds = sum(self._attention_s(tokens) for tokens in self._runs)
            yield self._compute(f"{idx}.attention.0", seconds, self._ffn_before(idx))
            last_attention = f"{idx}.attention.0"
        else:
            num_runs, piece = len(self._runs), 0
            for run, tokens in enumerate(self._runs):
                yield from self._restore(idx, run, tokens)
                while piece * num_runs < (run + 1) * num_early:
                    yield self._load(idx, piece)
                    piece += 1
                yield from self._attend(idx, run, tokens)
            last_attention = f"{idx}.attention.{num_runs - 1}"
        for piece in range(self._num_pieces):
            after = [last_attention]
            if buffers is not None:
                if piece >= num_early:
                    yield self._load(idx, piece)
                after.append(f"{idx}.load.{piece}")
            yield self._compute(f"{idx}.ffn.{piece}", self._piece_s, tuple(after))

    def _restore(self, idx: int, run: int, tokens: int) -> Iterator[DagNode]:
        cached = self._workload.num_sequences(tokens) * self._workload.cached_tokens
        if cached:
            seconds = _copy_s(self._costs.to_device, cached * self._shape.kv_bytes_per_token)
            yield self._copy(f"{idx}.restore.{run}", "to_device", seconds, self._slot(idx, run))

    def _attend(self, idx: int, run: int, tokens: int) -> Iterator[DagNode]:
        after = self._ffn_before(idx) + self._slot(idx, run)
        if self._workload.cached_tokens:
            after += (f"{idx}.restore.{run}",)
        yield self._compute(f"{idx}.attention.{run}", self._attention_s(tokens), after)
        seconds = _copy_s(self._costs.to_host, tokens * self._shape.kv_bytes_per_token)
        yield self._copy(f"{idx}.checkpoint.{run}", "to_host", seconds, (f"{idx}.attention.{run}",))

    def _attention_s(self, tokens: int) -> float:
        return self._costs.attention.seconds(self._shape.attention_work(tokens, self._workload))

    def _ffn_before(self, idx: int) -> tuple[str, ...]:
        return (f"{idx - 1}.ffn.{self._num_pieces - 1}",) if idx else ()

    def _slot(self, idx: int, run: int) -> tuple[str, ...]:
        """Return the checkpoint that leaves its slot of KV to this run."""
        number = idx * len(self._runs) + run - KV_SLOTS
        if number < 0:
            return ()
        layer, earlier = divmod(number, len(self._runs))
        return (f"{layer}.checkpoint.{earlier}",)

    def _load(self, idx: int, piece: int) -> DagNode:
        """Copy a piece into the buffer that the ring has next."""
        assert self._plan.parameter_buffers is not None, "only streamed experts are loaded"
        number = idx * self._num_pieces + piece - self._plan.parameter_buffers
        after: tuple[str, ...] = ()
        if number >= 0:
            layer, earlier = divmod(number, self._num_pieces)
            after = (f"{layer}.ffn.{earlier}",)
        return self._copy(f"{idx}.load.{piece}", "to_device", self._load_s, after)

    def _compute(self, name: str, seconds: float, after: tuple[str, ...]) -> DagNode:
        return DagNode(name=name, kind="compute", resource="compute", seconds=seconds, after=after)

    def _copy(self, name: str, link: str, seconds: float, after: tuple[str, ...]) -> DagNode:
        resource = link if self._costs.copies_overlap else "compute"
        return DagNode(name=name, kind="transfer", resource=resource, seconds=seconds, after=after)


def _copy_s(link: Roofline, num_bytes: float) -> float:
    return link.seconds(Work(operations=0.0, moved_bytes=num_bytes))
