"""Idle engines end where engines with other options wait for what they hold."""

import pytest

from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import IdlePoolReclaimer, has_reserved
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
    seeker = IdlePoolReclaimer(PoolConfig(), PLAN)
    looks = [seeker.is_due(waits_s=float(s), now_s=100.0 + s) for s in range(14)]
    assert [s for s, is_due in enumerate(looks) if is_due] == [6, 12]


def test_a_long_wait_is_told_once_with_what_is_waited_for(caplog):
    pool = PoolConfig(resources={"disk": 2}, accelerator_type="H100")
    seeker = IdlePoolReclaimer(pool, PLAN)
    for waits_s in (20.0, 31.0, 40.0):
        seeker.is_due(waits_s, now_s=0.0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("31 s for 3 CPUs and 0 GPUs, 2 disk, a host with H100 of the cluster")


@pytest.mark.parametrize(
    ("pool", "num_cpus", "is_so"),
    [({}, 0, False), ({}, 0.5, True), ({"resources": {"disk": 1}}, 0, True)],
    ids=["nothing", "cpus", "resource"],
)
def test_engines_that_hold_nothing_are_in_nobodys_way(pool, num_cpus, is_so):
    plan = Placement(num_replicas=1, num_cpus=num_cpus, num_gpus=0, num_engines_on_host=1)
    assert has_reserved(PoolConfig(**pool), plan) == is_so
