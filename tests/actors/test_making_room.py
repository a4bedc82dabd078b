"""Idle engines end where engines with other options wait for what they hold."""

import pytest

from raybatch.actors.replicas.placement import Placement, WaitForRay, has_reserved, shortage
from raybatch.config import PoolConfig
from tests.actors.pools import SAMPLING, generate, prompts_of, table_of

# of the four of the cluster
POOL = {"replicas": 1, "num_cpus_per_replica": 3}
PLAN = Placement(num_replicas=1, num_cpus=3, num_gpus=0, num_engines_on_host=1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_engines_that_are_idle_end_for_others_that_wait(own):
    first, second = own(pool=POOL), own(pool=POOL, step_s=0.001)
    table = table_of(prompts_of(10))
    assert generate(first, table, (SAMPLING,)).num_rows == 10
    # longer than it takes would wait for idle_release_s
    assert generate(second, table, (SAMPLING,)).num_rows == 10
    assert (len(first.state().pids), len(second.state().pids)) == (0, 1)
    assert generate(first, table, (SAMPLING,)).num_rows == 10


def test_room_is_sought_after_a_while_and_not_at_every_look():
    seeker = WaitForRay(PoolConfig(), PLAN)
    looks = [seeker.is_due(waits_s=float(s), now_s=100.0 + s) for s in range(14)]
    assert [s for s, is_due in enumerate(looks) if is_due] == [6, 12]


def test_a_long_wait_is_told_once_with_what_is_waited_for():
    pool = PoolConfig(resources={"disk": 2}, accelerator_type=["H100", "L4"])
    waits = WaitForRay(pool, PLAN)
    output = [waits.message(2, waits_s) for waits_s in (20.0, 31.0, 40.0)]
    requested = "3 CPUs and 0 GPUs, 2 disk, a host with H100 or L4"
    assert output == ["", f"waiting for 2 engines: each needs {requested} (31 s so far)", ""]


ON_GPU = Placement(num_replicas=2, num_cpus=0, num_gpus=1, num_engines_on_host=1)
IN_GROUP = Placement(
    num_replicas=1, num_cpus=0, num_gpus=2, num_engines_on_host=1, bundles=({"GPU": 1}, {"GPU": 1})
)
L4 = {"CPU": 8, "GPU": 1, "accelerator_type:L4": 1}


@pytest.mark.parametrize(
    ("plan", "pool", "hosts", "infeasible", "expected"),
    [
        (ON_GPU, {}, [{"CPU": 8}, L4], [], ""),
        (ON_GPU, {"accelerator_type": ["H100", "L4"]}, [L4], [], ""),
        (ON_GPU, {"accelerator_type": "H100"}, [L4], [], "no host of the cluster could hold it"),
        (ON_GPU, {"resources": {"disk": 1}}, [L4], [], "no host of the cluster could hold it"),
        (ON_GPU, {}, [{"CPU": 8}], [{"GPU": 2.0}], "no node type of the cluster"),
        (ON_GPU, {}, [{"CPU": 8}], [{"CPU": 64.0}], "no host of the cluster could hold it"),
        (IN_GROUP, {}, [L4], [], ""),
        (IN_GROUP, {}, [{"CPU": 8}], [], "no host of the cluster could hold it"),
    ],
)
def test_engines_that_no_host_could_hold_are_told_with_the_way_out(
    plan, pool, hosts, infeasible, expected
):
    assert shortage(plan, PoolConfig(**pool), hosts, infeasible).startswith(expected)
    assert bool(expected) == bool(shortage(plan, PoolConfig(**pool), hosts, infeasible))


@pytest.mark.parametrize(
    ("pool", "num_cpus", "is_so"),
    [({}, 0, False), ({}, 0.5, True), ({"resources": {"disk": 1}}, 0, True)],
    ids=["nothing", "cpus", "resource"],
)
def test_engines_that_hold_nothing_are_in_nobodys_way(pool, num_cpus, is_so):
    plan = Placement(num_replicas=1, num_cpus=num_cpus, num_gpus=0, num_engines_on_host=1)
    assert has_reserved(PoolConfig(**pool), plan) == is_so
