"""How many feeders there are, where they run, and what Ray reserves for them."""

import pytest

from raybatch.actors.replicas.placement import HostView, Placement, place_feeders
from raybatch.config import PoolConfig

A = HostView(host_id="a", num_cpus=64, num_gpus=8, kinds=frozenset({"H100"}))
B = HostView(host_id="b", num_cpus=16, num_gpus=2, kinds=frozenset({"L4"}))
HEAD = HostView(host_id="head", num_cpus=4)


def places_of(hosts, num_replicas, *, num_gpus=1.0, num_cpus=0.0, kinds=None):
    plan = Placement(
        num_replicas=num_replicas, num_cpus=num_cpus, num_gpus=num_gpus, num_engines_on_host=1
    )
    return place_feeders(plan, PoolConfig(accelerator_type=kinds), hosts)


@pytest.mark.parametrize(
    ("hosts", "num_replicas", "options", "expected"),
    [
        ([HEAD, A], 8, {}, (2, ["a"])),
        ([HEAD, A, B], 10, {}, (3, ["a", "b"])),
        ([HEAD, A, B], 8, {"kinds": "H100"}, (2, ["a"])),
        ([A, A, A], 2, {}, (2, [])),
        ([HEAD], 8, {}, (2, [])),
        ([HEAD, B], 8, {}, (3, ["b"])),
        ([HEAD], 4, {"num_gpus": 0}, (1, ["head"])),
        ([HEAD, A], 64, {"num_gpus": 0}, (2, ["head", "a"])),
        ([HEAD, A, B], 1, {"num_gpus": 0}, (1, [])),
        ([], 3, {"num_gpus": 0}, (1, [])),
        ([A], 16, {"num_gpus": 0.5}, (4, ["a"])),
    ],
    ids=str,
)
def test_feeders_are_where_engines_are_one_for_four(hosts, num_replicas, options, expected):
    places = places_of(hosts, num_replicas, **options)
    assert (places.num_feeders, list(places.hosts)) == expected


def test_hosts_of_feeders_are_a_wish():
    labels = places_of([A, B], 10).labels()
    assert labels["label_selector"] == {"ray.io/node-id": "in(a,b)"}
    assert labels["fallback_strategy"] == [{"label_selector": {}}]
    assert places_of([HEAD], 8).labels() == {}


@pytest.mark.parametrize(
    ("num_cpus", "num_replicas", "per_engine", "expected"),
    [
        (64, 8, 0, 0.5),
        (4, 4, 0, 0.5),
        (2, 2, 0, 0.25),
        (1, 1, 0, 0.0),
        (4, 3, 1, 0.0),
        (8, 8, 0, 0.5),
    ],
)
def test_feeders_of_a_host_leave_most_of_its_cpus(num_cpus, num_replicas, per_engine, expected):
    host = HostView(host_id="h", num_cpus=num_cpus)
    places = places_of([host], num_replicas, num_gpus=0, num_cpus=per_engine)
    assert places.num_cpus == expected


def test_feeders_of_a_host_share_its_part():
    host = HostView(host_id="h", num_cpus=8, num_gpus=8)
    assert places_of([host], 8).num_cpus == 0.5
    assert places_of([HostView(host_id="h", num_cpus=4, num_gpus=8)], 8).num_cpus == 0.25
