"""The longest chain of a graph, against every chain that there is."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.batches.forward_dag import DagNode, critical_path


def node(name, seconds=1.0, after=(), resource=None):
    return DagNode(
        name=name, resource=resource or f"own {name}", seconds=seconds, after=tuple(after)
    )


@st.composite
def graphs(draw):
    """Nodes after earlier ones, some on shared resources; without these also in another order."""
    count = draw(st.integers(1, 8))
    shares = draw(st.booleans())
    made = []
    for idx in range(count):
        after = draw(st.lists(st.integers(0, idx - 1), unique=True)) if idx else []
        resource = draw(st.sampled_from(("device", "link", None))) if shares else None
        seconds = draw(st.integers(0, 9))
        made.append(node(f"n{idx}", seconds, [f"n{i}" for i in after], resource))
    return made if shares else draw(st.permutations(made))


def chains(nodes):
    """Every chain that ends at any node, by walking all edges backwards."""
    before = {}
    for idx, current in enumerate(nodes):
        same = [n.name for n in nodes[:idx] if n.resource == current.resource]
        before[current.name] = {*current.after, *same[-1:]}

    def back(name):
        yield (name,)
        for earlier in before[name]:
            for chain in back(earlier):
                yield (*chain, name)

    for current in nodes:
        yield from back(current.name)


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_the_critical_path_is_the_longest_chain_there_is(nodes):
    seconds = {n.name: n.seconds for n in nodes}
    found = critical_path(nodes)
    every = {chain: sum(seconds[name] for name in chain) for chain in chains(nodes)}
    assert max(every.values()) == found.seconds
    assert every[found.names] == found.seconds


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_nodes_wait_for_those_before_them_and_share_no_resource(nodes):
    finish = dict(zip((n.name for n in nodes), critical_path(nodes).finish_s, strict=True))
    for idx, current in enumerate(nodes):
        start = finish[current.name] - current.seconds
        assert all(finish[name] <= start for name in current.after)
        same = [n.name for n in nodes[:idx] if n.resource == current.resource]
        assert all(finish[name] <= start for name in same)


def test_work_on_two_resources_overlaps():
    found = critical_path(
        [
            node("load 0", 3.0, resource="link"),
            node("load 1", 3.0, resource="link"),
            node("run 0", 2.0, ["load 0"], "device"),
            node("run 1", 2.0, ["load 1"], "device"),
        ]
    )
    assert 8.0 == found.seconds
    assert ("load 0", "load 1", "run 1") == found.names
    assert {"link": 6.0, "device": 4.0} == found.busy_s


def test_an_empty_graph_takes_no_time():
    assert (0.0, ()) == (critical_path([]).seconds, critical_path([]).names)


def test_a_cycle_is_refused_with_its_names():
    nodes = [node("free"), node("a", after=["c"]), node("b", after=["a"]), node("c", after=["b"])]
    with pytest.raises(ConfigError, match="cycle: 'a' after 'c' after 'b' after 'a'"):
        critical_path([*nodes, node("behind", after=["c"])])


def test_an_order_on_a_resource_that_contradicts_an_edge_is_a_cycle():
    nodes = [node("first", after=["second"], resource="link"), node("second", resource="link")]
    with pytest.raises(ConfigError, match="cycle"):
        critical_path(nodes)


def test_a_node_after_itself_is_a_cycle():
    with pytest.raises(ConfigError, match="'a' after 'a'"):
        critical_path([node("a", after=["a"])])


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("a"), node("a")], "two nodes of the graph are named 'a'"),
        ([node("a", after=["b"])], "'a' comes after 'b', which is no node"),
        ([node("a", -1.0)], "takes -1.0 s"),
        ([node("a", float("inf"))], "takes inf s"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(nodes, message):
    with pytest.raises(ConfigError, match=message):
        critical_path(nodes)


def count_operations(nodes):
    """Bytecode instructions of `critical_path` and what it calls."""
    counted = 0

    def trace(frame, event, _):
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        critical_path(nodes)
    finally:
        sys.settrace(before)
    return counted


def ladder(num_nodes, num_edges_each):
    """Nodes that each come after the ones just before."""
    return [
        node(f"n{i}", 1.0, [f"n{j}" for j in range(max(0, i - num_edges_each), i)])
        for i in range(num_nodes)
    ]


@pytest.mark.parametrize("num_edges_each", [0, 3])
def test_operations_are_linear_in_nodes_and_edges(num_edges_each):
    small, large = (count_operations(ladder(n, num_edges_each)) for n in (100, 800))
    assert large < 8.5 * small


def test_operations_are_linear_in_edges_of_few_nodes():
    # 1,200 and 4,800 edges, in stars
    few, many = (
        count_operations(
            [*ladder(n, 0), *(node(f"s{i}", 1.0, [f"n{j}" for j in range(n)]) for i in range(40))]
        )
        for n in (30, 120)
    )
    assert many < 4.5 * few
