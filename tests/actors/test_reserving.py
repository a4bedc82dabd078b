"""What Ray is asked for, and that it gets it back."""

import time

import pytest
import ray

from raybatch.actors.executors.ray_pools import RayHandle, reserve
from raybatch.actors.replicas.placement import Placement
from raybatch.config import PoolConfig

PLAN = Placement(num_replicas=1, num_cpus=0.5, num_gpus=0, num_engines_on_host=1)
GROUPED = Placement(
    num_replicas=1,
    num_cpus=0,
    num_gpus=0,
    num_engines_on_host=1,
    bundles=({"CPU": 0.1}, {"CPU": 0.2}),
)


def test_ray_is_told_where_engines_run_and_nothing_of_what_is_not_set():
    options = {"accelerator_type": "H100", "resources": {"fast": 1}, "runtime_env": {"pip": ["x"]}}
    requested = {"max_restarts": 0, "num_cpus": 0.5, "num_gpus": 0}
    assert reserve(PLAN, PoolConfig(**options), name="x").options == requested | options
    assert reserve(PLAN, PoolConfig(), name="x").options == requested


def test_several_kinds_and_hosts_to_avoid_are_labels_of_the_host():
    pool = PoolConfig(accelerator_type=["H100", "L4"])
    labels = reserve(PLAN, pool, name="x", avoid={"b", "a"}).options["label_selector"]
    assert labels == {"ray.io/accelerator-type": "in(H100,L4)", "ray.io/node-id": "!in(a,b)"}


@pytest.mark.ray
def test_ranks_get_the_bundles_and_the_actor_that_drives_them_nothing(ray_cluster):
    reserved = reserve(GROUPED, PoolConfig(strategy="SPREAD"), name="driven")

    table = ray.util.placement_group_table(reserved.group)
    assert list(table["bundles"].values()) == [{"CPU": 0.1}, {"CPU": 0.2}]
    assert table["strategy"] == "SPREAD"
    assert (reserved.options["num_cpus"], reserved.options["num_gpus"]) == (0, 0)
    reserved.release()
    assert ray.util.placement_group_table(reserved.group)["state"] == "REMOVED"


@pytest.mark.ray
def test_a_group_that_was_left_behind_is_released(ray_cluster):
    left = reserve(GROUPED, PoolConfig(), name="pool-0")
    other = reserve(GROUPED, PoolConfig(), name="pool-1")
    again = reserve(GROUPED, PoolConfig(), name="pool-0")

    states = [ray.util.placement_group_table(r.group)["state"] for r in (left, other, again)]
    assert (states[0], "REMOVED" in states[1:]) == ("REMOVED", False)
    other.release()
    again.release()


class Idle:
    """What an engine would be."""


@pytest.mark.ray
def test_a_group_is_released_where_ray_refuses_its_actor(ray_cluster, tmp_path):
    pool = PoolConfig(runtime_env={"working_dir": str(tmp_path)})
    reserved = reserve(GROUPED, pool, name="refused")
    with pytest.raises(ValueError, match="is not a valid URI"):
        reserved.start(Idle)
    assert ray.util.placement_group_table(reserved.group)["state"] == "REMOVED"


@pytest.mark.ray
def test_a_group_is_released_where_its_actor_cannot_be_killed(ray_cluster):
    reserved = reserve(GROUPED, PoolConfig(), name="unkilled")
    reserved.actor = RayHandle("no actor")
    with pytest.raises(ValueError, match="only supported for actors"):
        reserved.end()
    assert ray.util.placement_group_table(reserved.group)["state"] == "REMOVED"


@pytest.mark.ray
def test_groups_that_end_at_once_keep_nothing_of_the_cluster(ray_cluster):
    free = ray.available_resources()["CPU"]
    # without care Ray loses one of ten
    for _ in range(60):
        reserve(GROUPED, PoolConfig(), name="short").release()
    # Ray tells with a delay what is free
    time.sleep(1)
    for _ in range(100):
        if ray.available_resources()["CPU"] >= free:
            break
        time.sleep(0.1)
    assert ray.available_resources()["CPU"] >= free
