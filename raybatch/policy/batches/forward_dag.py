"""How long a forward pass takes under a plan, as a graph of computations and copies.

A pass follows Algorithm 1 of BatchGen (arXiv:2606.21712, section 5.1): in every layer attention
runs over sub-batches, then all their tokens meet at the gate and the experts run once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raybatch.errors import ConfigError, range_text
from raybatch.policy.batches.layer_plan import (
    KV_SLOTS,
    BatchPlan,
    ModelShape,
    ModuleCosts,
    Workload,
)
from raybatch.policy.cost.roofline import Work

# layers that are laid out one by one; what is beyond repeats the second half of them
_UNROLLED_LAYERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DagNode:
    """One computation or one transfer.

    It has its resource for itself while it runs; nodes of one resource run one after another, in
    the order in which the graph lists them, and after those that `after` names.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalPath:
    """How long a graph takes, and why."""

    seconds: float
    names: tuple[str, ...]  # of the nodes of the longest chain, first to last
    finish_s: tuple[float, ...]  # when each node ends, in the order in which the graph lists them
    busy_s: dict[str, float]  # by resource, how long it works


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardTime:
    """Predicted time of one forward pass through all layers.

    Embedding and head are left out: no choice of a plan changes what they take for a token.
    """

    seconds: float
    layer_s: float
    # by resource, the share of the time that it works, in the laid out layers
    busy_fraction: dict[str, float]
    # names of the nodes that decide the time, in the laid out layers
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
    laid, num_first = critical_path(nodes), num_laid // 2
    # no node waits for one of a later layer, so the first ones end as they would alone
    first_s = max(laid.finish_s[: num_first * (len(nodes) // num_laid)], default=0.0)
    layer_s = (laid.seconds - first_s) / (num_laid - num_first)
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
        shape, self._costs, self._plan, self._workload = model.layer, costs, plan, workload
        full, rest = divmod(plan.gate_tokens, plan.attention_tokens)
        self._runs = [plan.attention_tokens] * full + [rest] * (rest > 0)
        works = (shape.attention_work(tokens, workload) for tokens in self._runs)
        self._attention_s = [costs.attention.seconds(work) for work in works]
        self._kv_bytes = shape.kv_bytes_per_token
        self._num_pieces = 1 if plan.parameter_buffers is None else model.num_pieces
        whole = shape.ffn_work(plan.gate_tokens)
        piece = Work(
            operations=whole.operations / self._num_pieces,
            moved_bytes=whole.moved_bytes / self._num_pieces,
        )
        self._piece_s = costs.ffn.seconds(piece)
        self._load_s = costs.to_device.copy_s(shape.ffn_bytes / self._num_pieces)

    def layer(self, idx: int) -> Iterator[DagNode]:
        """Give the nodes of one layer; loads that find a buffer run during attention."""
        buffers, num_runs = self._plan.parameter_buffers, len(self._runs)
        num_early = min(buffers or 0, self._num_pieces)
        ffn_before = (f"{idx - 1}.ffn.{self._num_pieces - 1}",) if idx else ()
        if not self._plan.has_kv_on_host:
            yield from (self._load(idx, piece) for piece in range(num_early))
            # nothing runs between runs of attention, so one node stands for all of them
            yield self._node(f"{idx}.attention.0", "compute", sum(self._attention_s), ffn_before)
            num_runs = 1
        else:
            piece = 0
            for run, tokens in enumerate(self._runs):
                slot, restored = self._slot(idx, run), tuple[str, ...]()
                cached = self._workload.num_sequences(tokens) * self._workload.cached_tokens
                if cached:
                    restored = (f"{idx}.restore.{run}",)
                    seconds = self._costs.to_device.copy_s(cached * self._kv_bytes)
                    yield self._node(restored[0], "to_device", seconds, slot)
                while piece * num_runs < (run + 1) * num_early:
                    yield self._load(idx, piece)
                    piece += 1
                name, after = f"{idx}.attention.{run}", ffn_before + slot + restored
                yield self._node(name, "compute", self._attention_s[run], after)
                seconds = self._costs.to_host.copy_s(tokens * self._kv_bytes)
                yield self._node(f"{idx}.checkpoint.{run}", "to_host", seconds, (name,))
        for piece in range(self._num_pieces):
            after = (f"{idx}.attention.{num_runs - 1}",)
            if buffers is not None:
                if piece >= num_early:
                    yield self._load(idx, piece)
                after += (f"{idx}.load.{piece}",)
            yield self._node(f"{idx}.ffn.{piece}", "compute", self._piece_s, after)

    def _slot(self, idx: int, run: int) -> tuple[str, ...]:
        """Return the checkpoint that leaves its slot of KV to this run."""
        layer, earlier = divmod(idx * len(self._runs) + run - KV_SLOTS, len(self._runs))
        return (f"{layer}.checkpoint.{earlier}",) if layer >= 0 else ()

    def _load(self, idx: int, piece: int) -> DagNode:
        """Copy a piece into the buffer that the ring has next."""
        assert self._plan.parameter_buffers is not None, "only streamed experts are loaded"
        number = idx * self._num_pieces + piece - self._plan.parameter_buffers
        layer, earlier = divmod(number, self._num_pieces)
        after = (f"{layer}.ffn.{earlier}",) if layer >= 0 else ()
        return self._node(f"{idx}.load.{piece}", "to_device", self._load_s, after)

    def _node(self, name: str, resource: str, seconds: float, after: tuple[str, ...]) -> DagNode:
        # a copy takes the processor where it cannot run beside it
        resource = resource if self._costs.copies_overlap else "compute"
        return DagNode(name=name, resource=resource, seconds=seconds, after=after)


def critical_path(nodes: Sequence[DagNode]) -> CriticalPath:
    """Return the longest chain of a graph, by dynamic programming in topological order.

    Edges are what `DagNode.after` names, and one chain for each resource. O(V + E). Among chains of
    one length, the one whose nodes are listed first is returned.

    Raises:
        ConfigError: a name occurs twice or is unknown, a node has negative or no finite seconds, or
            edges form a cycle: then no order of the nodes keeps to them.
    """
    before = _predecessors(nodes)
    followers: list[list[int]] = [[] for _ in nodes]
    num_open = [len(earlier) for earlier in before]
    for idx, earlier in enumerate(before):
        for other in earlier:
            followers[other].append(idx)
    ready = [idx for idx, count in enumerate(num_open) if not count]
    finish = [0.0] * len(nodes)
    via: list[int | None] = [None] * len(nodes)
    # it grows while it is gone through
    for idx in ready:
        start = 0.0
        for other in before[idx]:
            if via[idx] is None or finish[other] > start:
                start, via[idx] = finish[other], other
        finish[idx] = start + nodes[idx].seconds
        for follower in followers[idx]:
            num_open[follower] -= 1
            if not num_open[follower]:
                ready.append(follower)
    if len(ready) < len(nodes):
        # a node that was never reached waits for another such node
        around = [next(i for i, count in enumerate(num_open) if count)]
        while around[-1] not in around[:-1]:
            around.append(next(other for other in before[around[-1]] if num_open[other]))
        cycle = around[around.index(around[-1]) :]
        names = " after ".join(repr(nodes[i].name) for i in cycle)
        raise ConfigError(f"the graph has a cycle: {names}")
    busy: dict[str, float] = {}
    for node in nodes:
        busy[node.resource] = busy.get(node.resource, 0.0) + node.seconds
    chain, last = list[str](), max(range(len(nodes)), key=finish.__getitem__, default=None)
    while last is not None:
        chain.append(nodes[last].name)
        last = via[last]
    return CriticalPath(
        seconds=max(finish, default=0.0),
        names=tuple(reversed(chain)),
        finish_s=tuple(finish),
        busy_s=busy,
    )


def _predecessors(nodes: Sequence[DagNode]) -> list[list[int]]:
    """Return for each node those that end before it starts, in the order of the list."""
    idx_of: dict[str, int] = {}
    for idx, node in enumerate(nodes):
        if node.name in idx_of:
            raise ConfigError(f"two nodes of the graph are named {node.name!r}")
        if not 0 <= node.seconds < float("inf"):
            allowed = range_text("at least 0", node.seconds)
            raise ConfigError(f"node {node.name!r} takes {node.seconds} s; it must be {allowed}")
        idx_of[node.name] = idx
    last_of: dict[str, int] = {}
    before = []
    for idx, node in enumerate(nodes):
        unknown = [name for name in node.after if name not in idx_of]
        if unknown:
            raise ConfigError(f"node {node.name!r} comes after {unknown[0]!r}, which is no node")
        same_resource = [last_of[node.resource]] if node.resource in last_of else []
        before.append(sorted({*(idx_of[name] for name in node.after), *same_resource}))
        last_of[node.resource] = idx
    return before
