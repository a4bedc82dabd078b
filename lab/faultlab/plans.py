"""The plans of simulated jobs: which rows make a unit, and which files its store has."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from raybatch.durable.storage import Store
from raybatch.durable.units import UnitPlan, join_plans, row_sums

# rows of each unit, in their order, as different planners might cut one input
PLANS = (((0, 1, 2), (3, 4)), ((4, 2), (1, 3, 0)), ((0,), (1, 2), (3, 4)))
NUM_ROWS = 5
# rows that are added to the input later
LATER_ROWS = (5, 6)
_LATER_PLANS = (((5, 6),), ((6,), (5,)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Opened:
    """A plan as a driver has read it."""

    rows: Sequence[Sequence[int]]
    plan: UnitPlan


def joined(plans: Sequence[Opened]) -> UnitPlan:
    """Return the plans of an output in one."""
    return join_plans([opened.plan for opened in plans])


def make_plan(store: Store, variant: int, before: Sequence[Opened]) -> bytes:
    """Write the shard of a plan and return the text of its file."""
    values = {
        "hash": f"plan-{variant}" if not before else f"later-{variant}",
        "rows": _LATER_PLANS[variant % len(_LATER_PLANS)] if before else PLANS[variant],
        "first_unit": sum(opened.plan.num_units for opened in before),
    }
    shard = f"_raybatch/plan/{values['hash']}/units.json"
    store.create(shard, json.dumps(values).encode())
    return json.dumps({"shard": shard}).encode()


@lru_cache(maxsize=64)
def read_shard(shard: bytes, is_partitioned: bool) -> Opened:
    """Return the plan that a shard holds."""
    values = json.loads(shard)
    units = values["rows"]
    unit = np.repeat(np.arange(len(units)), [len(rows) for rows in units])
    rows = np.array([row for one in units for row in one], np.int64)
    plan = UnitPlan(
        hash=values["hash"],
        unit_rows=np.array([len(one) for one in units], np.int64),
        row_sums=row_sums(unit, rows, len(units)),
        is_partitioned=is_partitioned,
        first_unit=values["first_unit"],
    )
    return Opened(rows=units, plan=plan)
