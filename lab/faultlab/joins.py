"""Parts of a simulated job that are joined into larger ones of another output while it runs."""

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from faultlab.plans import Opened, joined, read_shard
from faultlab.world import Process
from raybatch.durable import audit as audits
from raybatch.durable import commit
from raybatch.durable.joins import PartJoin, drop_if_lost, remove_parts, reopen_lost
from raybatch.durable.layout import DATA, DONE, done_name, part_name, part_unit, plan_name
from raybatch.durable.storage import Store
from raybatch.errors import CommitError

if TYPE_CHECKING:
    from faultlab.players import Player

# the column that cuts the rows of a partitioned output
BY = ("half",)
# how often a driver looks for parts to join while its units run
_NUM_LOOKS = 3


class JoinedPlan(NamedTuple):
    """A plan of joined units, and the units of the other output that each of them is made of."""

    opened: Opened
    stretches: list[range]


def follow(player: "Player", process: Process) -> None:
    """Join parts while units run; an error is tried again, as `PartJoiner` does."""
    for _ in range(_NUM_LOOKS):
        try:
            join_committed(player, process)
        except (OSError, CommitError) as error:
            player.world.note(process, f"could not join: {error}")
        player.world.yield_turn()


def reopen(player: "Player", process: Process) -> None:
    """Let units run again whose joined part is gone, as a driver does at its start."""
    units, sink = player.store(process, of_units=True), player.store(process)
    records = commit.joined_ranges(units)
    names = set(sink.names(DATA))
    plans = [_read_joined(player, sink, opened, number) for number, opened in _plans(player, units)]
    known = {
        stretch
        for plan in plans
        if plan is not None
        for number, stretch in enumerate(plan.stretches, plan.opened.plan.first_unit)
        if stretch in records
        and not drop_if_lost(sink, number, names, is_partitioned=player.is_partitioned)
    }
    reopen_lost(units, records, known)


def finish(player: "Player", process: Process, num_plans: int) -> None:
    """Join the rest of an output whose units are complete, and mark it as complete."""
    units, sink = player.store(process, of_units=True), player.store(process)
    if len(plans := join_committed(player, process)) < num_plans:
        raise CommitError("units were removed")
    whole = joined([plan.opened for plan in plans])
    audits.finish(sink, whole, player.steps.audit(sink, whole, num_threads=1))
    recorded = commit.joined_ranges(units)
    late = [n for n in units.names(DATA) if any(part_unit(n) in some for some in recorded)]
    remove_parts(units, late)


def join_committed(player: "Player", process: Process) -> list[JoinedPlan]:
    """Join the stretches whose units are all committed; return the plans that are complete."""
    units, sink = player.store(process, of_units=True), player.store(process)
    plans = _plans(player, units)
    complete: list[JoinedPlan] = []
    if not plans:
        return complete
    is_done = commit.committed(units, joined([opened for _, opened in plans]))
    recorded = set(commit.joined_ranges(units))
    names = {*sink.names(DATA), *sink.names(DONE)}
    name_of = done_name if player.is_partitioned else part_name
    for number, opened in plans:
        first, num_units = opened.plan.first_unit, opened.plan.num_units
        of_plan = is_done[first : first + num_units]
        if not of_plan.any():
            break
        plan = _open_joined(player, sink, number, opened, complete)
        for place, stretch in enumerate(plan.stretches):
            name = name_of(plan.opened.plan.first_unit + place)
            is_joined = stretch in recorded and name in names
            if is_done[stretch.start : stretch.stop].all() and not is_joined:
                player.steps.join(_join_of(player, process, plan, place, opened), num_threads=1)
        if not of_plan.all():
            break
        complete.append(plan)
    return complete


def _join_of(
    player: "Player", process: Process, plan: JoinedPlan, place: int, opened: Opened
) -> PartJoin:
    first = opened.plan.first_unit
    return PartJoin(
        source=player.store(process, of_units=True),
        units=tuple(opened.plan.unit(unit - first) for unit in plan.stretches[place]),
        source_hash=opened.plan.hash,
        target=player.store(process),
        unit=plan.opened.plan.unit(place),
        plan_hash=plan.opened.plan.hash,
        by=BY if player.is_partitioned else (),
        attempt="joined",
        removes_parts=True,
    )


def _plans(player: "Player", units: Store) -> list[tuple[int, Opened]]:
    """Return the numbers and plans of units that exist, from 1."""
    plans = []
    for number in range(1, 2 + player.may_grow):
        if units.size(plan_name(number)) is None:
            break
        shard = json.loads(units.read(plan_name(number)))["shard"]
        plans.append((number, read_shard(units.read(shard), False)))
    return plans


def _open_joined(
    player: "Player", sink: Store, number: int, opened: Opened, before: Sequence[JoinedPlan]
) -> JoinedPlan:
    """Open the joined plan of a plan, making it where there is none."""
    num_units = opened.plan.num_units
    # different drivers join other stretches
    starts = [[0], list(range(num_units)), sorted({0, num_units - 1})][player.variant % 3]

    def make() -> bytes:
        bounds = [*starts, num_units]
        values = {
            "hash": f"{opened.plan.hash} joined {starts}",
            "rows": [list(chain(*opened.rows[a:b])) for a, b in pairwise(bounds)],
            "first_unit": sum(plan.opened.plan.num_units for plan in before),
            "starts": starts,
        }
        shard = f"_raybatch/plan/{values['hash']}/units.json"
        sink.create(shard, json.dumps(values).encode())
        return json.dumps({"shard": shard}).encode()

    player.steps.open_plan(sink, make, name=plan_name(number))
    plan = _read_joined(player, sink, opened, number)
    assert plan is not None, "a plan is never removed"
    return plan


def _read_joined(player: "Player", sink: Store, opened: Opened, number: int) -> JoinedPlan | None:
    if sink.size(plan_name(number)) is None:
        return None
    shard = sink.read(json.loads(sink.read(plan_name(number)))["shard"])
    first = opened.plan.first_unit
    bounds = [*json.loads(shard)["starts"], opened.plan.num_units]
    stretches = [range(first + start, first + stop) for start, stop in pairwise(bounds)]
    return JoinedPlan(read_shard(shard, player.is_partitioned), stretches)
