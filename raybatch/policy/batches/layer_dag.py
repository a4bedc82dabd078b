"""A layer as a graph of computations and transfers, and the longest chain through it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raybatch.errors import ConfigError, range_text


@dataclass(frozen=True, kw_only=True, slots=True)
class DagNode:
    """One computation or one transfer.

    Args:
        resource: what it has for itself while it runs; nodes of one resource run one after
            another, in the order in which the graph lists them.
        after: names of the nodes that must have ended before it starts.
    """

    name: str
    kind: Literal["compute", "transfer"]
    resource: str
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticalPath:
    """How long a graph takes, and why.

    Args:
        names: of the nodes of the longest chain, first to last.
        finish_s: when each node ends, in the order in which the graph lists them.
        busy_s: by resource, how long it works.
    """

    seconds: float
    names: tuple[str, ...]
    finish_s: tuple[float, ...]
    busy_s: dict[str, float]


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
    num_done = 0
    while num_done < len(ready):
        idx = ready[num_done]
        num_done += 1
        start = 0.0
        for other in before[idx]:
            if via[idx] is None or finish[other] > start:
                start, via[idx] = finish[other], other
        finish[idx] = start + nodes[idx].seconds
        for follower in followers[idx]:
            num_open[follower] -= 1
            if not num_open[follower]:
                ready.append(follower)
    if num_done < len(nodes):
        raise ConfigError(f"the graph has a cycle: {_cycle(nodes, before, num_open)}")
    busy: dict[str, float] = {}
    for node in nodes:
        busy[node.resource] = busy.get(node.resource, 0.0) + node.seconds
    return CriticalPath(
        seconds=max(finish, default=0.0),
        names=_chain(nodes, finish, via),
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
        earlier = {idx_of[name] for name in node.after}
        if node.resource in last_of:
            earlier.add(last_of[node.resource])
        last_of[node.resource] = idx
        before.append(sorted(earlier))
    return before


def _chain(nodes: Sequence[DagNode], finish: list[float], via: list[int | None]) -> tuple[str, ...]:
    if not nodes:
        return ()
    idx: int | None = max(range(len(nodes)), key=finish.__getitem__)
    names = []
    while idx is not None:
        names.append(nodes[idx].name)
        idx = via[idx]
    return tuple(reversed(names))


def _cycle(nodes: Sequence[DagNode], before: list[list[int]], num_open: list[int]) -> str:
    """Return the names along one cycle, such as "a -> b -> a"; a node comes after its right one."""
    idx = next(i for i, count in enumerate(num_open) if count)
    seen: list[int] = []
    position: dict[int, int] = {}
    while idx not in position:
        position[idx] = len(seen)
        seen.append(idx)
        # a node that was never reached waits for another such node
        idx = next(other for other in before[idx] if num_open[other])
    around = [*seen[position[idx] :], idx]
    return " after ".join(repr(nodes[i].name) for i in around)
