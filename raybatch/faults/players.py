"""Drivers and feeders of a simulated job, made of the real functions of the commit protocol."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.durable import audit as audits
from raybatch.durable import commit, journal, opening, partitioned
from raybatch.durable.parts import PARQUET, Footer, PartFormat
from raybatch.durable.protocols import Store
from raybatch.durable.repeating import Repeating
from raybatch.durable.units import UnitCounts, UnitPlan, row_sum, row_sums
from raybatch.faults.virtual_store import Files, VirtualStore
from raybatch.faults.world import Process, World

__all__ = ["NUM_ROWS", "PLANS", "REAL", "Player", "Steps", "drive", "foreign_part"]

Ints = npt.NDArray[np.int64]

# rows of each unit, in their order, as different planners might cut one input
PLANS = (
    ((0, 1, 2), (3, 4)),
    ((4, 2), (1, 3, 0)),
    ((0,), (1, 2), (3, 4)),
)
NUM_ROWS = 5
_FOREIGN_ROW = 77
_MAX_ROUNDS = 3
_NUM_TRIES = 3

SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("text", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of the protocol; a mutation replaces one of them."""

    open_plan: Callable[[Store, Callable[[], bytes]], bytes] = opening.open_plan
    committed: Callable[[Store, UnitPlan], Any] = commit.committed
    receipt_of: Callable[..., Any] = commit.receipt_of
    commit_unit: Callable[..., Any] = commit.commit_unit
    audit: Callable[..., audits.Audit] = audits.audit
    commit_partitioned: Callable[..., Any] = partitioned.commit_partitioned
    wrap_store: Callable[[Store], Store] = lambda store: store


REAL = Steps()


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """What all processes of one driver know.

    Args:
        world: the scheduler.
        files: of the schedule.
        steps: of the protocol.
        number: of the driver.
        variant: plan that this driver would make.
        has_journal: finished rows are kept before a unit is complete.
        is_partitioned: the output is cut by a column of the input.
        damage: chance that the rows of a unit arrive damaged at its commit.
    """

    world: World
    files: Files
    steps: Steps
    number: int
    variant: int
    has_journal: bool
    is_partitioned: bool
    damage: float

    def store(self, process: Process) -> Store:
        """Return the store as a process sees it."""
        raw = self.steps.wrap_store(VirtualStore(self.files, process))
        return Repeating(raw, num_tries=_NUM_TRIES, sleep=lambda seconds: self.world.yield_turn())


def drive(player: Player, process: Process) -> None:
    """Run a job to its end: open, list, run units in feeders, audit, finish."""
    store, steps = player.store(process), player.steps
    plan_json = steps.open_plan(store, lambda: _make_plan(store, player.variant))
    stored = json.loads(plan_json)
    variant, plan = _read_plan(store.read(stored["shard"]), player.is_partitioned)
    if audits.is_finished(store, plan):
        return
    for number in range(_MAX_ROUNDS):
        todo = np.flatnonzero(~steps.committed(store, plan)).tolist()
        if not todo:
            break
        _feed_in_two(player, process, variant, plan, todo, number)
    found = steps.audit(store, plan, num_threads=1, part_format=FORMAT)
    audits.finish(store, plan, found)
    if player.has_journal:
        for unit in range(plan.num_units):
            journal.drop_fragments(store, unit)


def _feed_in_two(
    player: Player,
    process: Process,
    variant: int,
    plan: UnitPlan,
    todo: list[int],
    number: int,
) -> None:
    """Run units in two feeders, which share one of them as two copies of a slow one do."""
    middle = len(todo) // 2
    shares = [share for share in (todo[: middle + 1], todo[: middle - 1 : -1]) if share]
    for index, share in enumerate(shares if len(todo) > 1 else [todo]):
        attempt = f"d{player.number}r{number}f{index}"

        def run(feeder: Process, share: list[int] = share, attempt: str = attempt) -> None:
            _feed(player, feeder, variant, plan, share, attempt)

        player.world.start(attempt, run, is_faulty=process.is_faulty, parent=process)
    player.world.wait(process)


def _feed(
    player: Player,
    process: Process,
    variant: int,
    plan: UnitPlan,
    numbers: Sequence[int],
    attempt: str,
) -> None:
    """Run some units, one after the other, as one feeder does."""
    store = player.store(process)
    for number in numbers:
        unit = plan.unit(number)
        if _is_committed(player, store, unit, plan.hash):
            continue
        rows = PLANS[variant][number]
        said = dict.fromkeys(range(len(rows)), attempt)
        if player.has_journal:
            said |= _with_journal(store, unit, plan.hash, rows, attempt)
        _commit(player, store, unit, rows, said, plan_hash=plan.hash, attempt=attempt)


def _is_committed(player: Player, store: Store, unit: commit.Unit, plan_hash: str) -> bool:
    if player.is_partitioned:
        return partitioned.partitioned_receipt_of(store, unit, plan_hash) is not None
    return player.steps.receipt_of(store, unit, plan_hash, FORMAT) is not None


def _commit(
    player: Player,
    store: Store,
    unit: commit.Unit,
    rows: Sequence[int],
    said: Mapping[int, str],
    **names: str,
) -> None:
    """Commit what has arrived of a unit."""
    pos = _delivered(player, len(rows))
    row = np.array([rows[one] for one in pos], np.int64)
    table = _table(tuple(row.tolist()), tuple(said[one] for one in pos))
    common = {"pos": np.array(pos, np.int64), "row": row, "part_format": FORMAT, **names}
    if player.is_partitioned:
        half = pa.array(["odd" if one % 2 else "even" for one in row.tolist()])
        player.steps.commit_partitioned(
            store, unit, table.append_column("half", half), by=["half"], count=_count, **common
        )
    else:
        player.steps.commit_unit(store, unit, table, counts=_count(table), **common)


def _count(table: pa.Table) -> UnitCounts:
    return UnitCounts(num_rows=table.num_rows)


def _with_journal(
    store: Store, unit: commit.Unit, plan_hash: str, rows: Sequence[int], attempt: str
) -> dict[int, str]:
    """Return what earlier attempts said; keep the first row that they did not finish."""
    row = np.array(rows, np.int64)
    kept = journal.read_fragments(store, unit, SCHEMA, plan_hash=plan_hash, expected_row=row)
    said = dict(
        zip(kept.column(journal.POS).to_pylist(), kept.column("text").to_pylist(), strict=True)
    )
    open_pos = [pos for pos in range(len(rows)) if pos not in said]
    if open_pos:
        table = _table((rows[open_pos[0]],), (attempt,))
        columns = [*table.columns, pa.array(open_pos[:1]), pa.array(row[open_pos[:1]])]
        finished = pa.table(columns, schema=journal.journal_schema(SCHEMA))
        journal.write_fragment(store, unit, finished, plan_hash=plan_hash, attempt=attempt)
    return said


def _delivered(player: Player, num_rows: int) -> list[int]:
    """Return the positions that reach the commit: all of them, unless the way was bad."""
    rng = player.world.rng
    pos = list(range(num_rows))
    if rng.random() < player.damage:
        player.world.faults["damaged rows"] += 1
        if rng.random() < 0.5:
            del pos[int(rng.random() * num_rows)]
        else:
            pos[int(rng.random() * num_rows)] = int(rng.random() * num_rows)
    elif rng.random() < 0.1:
        rng.shuffle(pos)
    return pos


def _make_plan(store: Store, variant: int) -> bytes:
    shard = f"_raybatch/plan/plan-{variant}/units.json"
    store.create(shard, json.dumps({"variant": variant}).encode())
    return json.dumps({"hash": f"plan-{variant}", "shard": shard}).encode()


@lru_cache(maxsize=64)
def _read_plan(shard: bytes, is_partitioned: bool) -> tuple[int, UnitPlan]:
    variant = json.loads(shard)["variant"]
    units = PLANS[variant]
    unit = np.repeat(np.arange(len(units)), [len(rows) for rows in units])
    rows = np.array([row for one in units for row in one], np.int64)
    plan = UnitPlan(
        hash=f"plan-{variant}",
        unit_rows=np.array([len(one) for one in units], np.int64),
        row_sums=row_sums(unit, rows, len(units)),
        is_partitioned=is_partitioned,
    )
    return variant, plan


@lru_cache(maxsize=65536)
def _table(rows: tuple[int, ...], texts: tuple[str, ...]) -> pa.Table:
    return pa.table({"id": [f"r{row}" for row in rows], "text": list(texts)}, schema=SCHEMA)


# the same few tables are written over and over: each is encoded once, for real
_encode = lru_cache(maxsize=65536)(
    lambda ids, texts, footer: PARQUET.encode(
        pa.table({"id": list(ids), "text": list(texts)}, schema=SCHEMA), footer
    )
)


def _encode_once(table: pa.Table, footer: str) -> bytes:
    ids, texts = (tuple(column.to_pylist()) for column in table.columns)
    return bytes(_encode(ids, texts, footer))


FORMAT = PartFormat(encode=_encode_once, footer_text=lru_cache(maxsize=65536)(PARQUET.footer_text))


def foreign_part(unit: int) -> bytes:
    """Return the part that another job would write under the name of a unit."""
    footer = Footer(
        unit=unit,
        num_rows=1,
        row_sum=row_sum(np.array([_FOREIGN_ROW])),
        plan="plan of another job",
        attempt="another job",
        counts=UnitCounts(num_rows=1),
    )
    return FORMAT.part(_table((_FOREIGN_ROW,), ("foreign",)), footer)
