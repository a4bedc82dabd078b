"""Drivers and feeders of a simulated job, made of the real functions of the commit protocol."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from faultlab import joins
from faultlab.plans import Opened, joined, make_plan, read_shard
from faultlab.virtual_store import Files, VirtualStore
from faultlab.world import Process, World
from raybatch.durable import audit as audits
from raybatch.durable import commit, journal, parts
from raybatch.durable.joins import join_parts
from raybatch.durable.layout import UNITS, fragment_folder, plan_name
from raybatch.durable.parts import Footer, encode_part
from raybatch.durable.storage import Repeating, Store
from raybatch.durable.units import CommitUnit, UnitCounts, UnitPlan, row_sum
from raybatch.errors import CommitError

_FOREIGN_ROW = 77
_MAX_ROUNDS = 3
_NUM_TRIES = 3

SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("text", pa.string())])


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of the protocol; a mutation replaces one of them."""

    open_plan: Callable[..., bytes] = commit.open_plan
    is_finished: Callable[[Store, UnitPlan], bool] = audits.is_finished
    committed: Callable[[Store, UnitPlan], Any] = commit.committed
    receipt_of: Callable[..., Any] = commit.receipt_of
    commit_unit: Callable[..., Any] = commit.commit_unit
    audit: Callable[..., audits.Audit] = audits.audit
    commit_partitioned: Callable[..., Any] = commit.commit_unit
    join: Callable[..., None] = join_parts
    wrap_store: Callable[[Store], Store] = lambda store: store


REAL = Steps()


@dataclass(frozen=True, kw_only=True, slots=True)
class Player:
    """What all processes of one driver know.

    Args:
        has_journal: finished rows are kept before a unit is complete.
        is_partitioned: the output is cut by a column of the input; if parts are joined, only they.
        damage: chance that the rows of a unit arrive damaged at its commit.
        may_grow: rows are added to the input at some time.
        has_grown: they had come when this driver listed its input.
        is_joined: parts of units are joined into larger ones of another output.
    """

    world: World
    files: Files
    steps: Steps
    number: int
    variant: int
    has_journal: bool
    is_partitioned: bool
    damage: float
    may_grow: bool = False
    has_grown: bool = False
    is_joined: bool = False

    @property
    def cuts_units(self) -> bool:
        """Return whether the rows of each unit are cut by the column."""
        return self.is_partitioned and not self.is_joined

    def store(self, process: Process, *, of_units: bool = False) -> Store:
        """Return the store as a process sees it: the sink, or the output of units below it."""
        raw = self.steps.wrap_store(VirtualStore(self.files, process, UNITS if of_units else ""))
        return Repeating(raw, num_tries=_NUM_TRIES, sleep=lambda seconds: self.world.yield_turn())


def drive(player: Player, process: Process) -> None:
    """Run a job to its end: open, list, run units in feeders, audit, finish.

    Where the input has grown, a further plan follows the first.
    """
    if not player.is_joined:
        _complete_units(player, process)
        return
    joins.reopen(player, process)

    def follow(joiner: Process) -> None:
        joins.follow(player, joiner)

    player.world.start(f"{process.name}j", follow, is_faulty=process.is_faulty)
    _complete_units(player, process)
    joins.finish(player, process, 1 + player.has_grown)


def _complete_units(player: Player, process: Process) -> None:
    """Run all units of a job, and mark their output as complete."""
    store, steps = player.store(process, of_units=player.is_joined), player.steps
    plans = [_open_plan(player, store, []), *_later(player, store)]
    num_inputs = 1 + player.has_grown
    if len(plans) > num_inputs:
        raise CommitError("an input file is gone")  # what another driver has seen
    if len(plans) == num_inputs and steps.is_finished(store, joined(plans)):
        return
    for number in range(num_inputs):
        if number == len(plans):
            plans.append(_open_plan(player, store, plans))
        if not _run_plan(player, process, plans, number):
            break
    plans = [plans[0], *_later(player, store)]
    whole = joined(plans)
    sink = player.store(process)
    result = steps.audit(store, whole, num_threads=1, joined_in=sink)
    audits.finish(store, whole, result)
    if player.has_journal:
        for unit in range(whole.num_units):
            for name in store.names(fragment_folder(unit)):
                store.remove(name)


def _run_plan(player: Player, process: Process, plans: Sequence[Opened], number: int) -> bool:
    """Run the rest of one plan; return whether all of it is in the output."""
    store, plan = player.store(process, of_units=player.is_joined), plans[number].plan
    for attempt in range(_MAX_ROUNDS):
        now = [plans[0], *_later(player, store)]
        is_done = player.steps.committed(store, joined(now))
        todo = np.flatnonzero(~is_done[plan.first_unit :][: plan.num_units]).tolist()
        if not todo:
            return True
        name = f"d{player.number}p{number}r{attempt}"
        _feed_in_two(player, process, plans[number], todo, name)
    return False


def _feed_in_two(
    player: Player, process: Process, opened: Opened, todo: list[int], name: str
) -> None:
    """Run units in two feeders, which share one of them as two copies of a slow one do."""
    middle = len(todo) // 2
    shares = [share for share in (todo[: middle + 1], todo[: middle - 1 : -1]) if share]
    for index, share in enumerate(shares if len(todo) > 1 else [todo]):
        attempt = f"{name}f{index}"

        def run(feeder: Process, share: list[int] = share, attempt: str = attempt) -> None:
            _feed(player, feeder, opened, share, attempt)

        player.world.start(attempt, run, is_faulty=process.is_faulty, parent=process)
    player.world.wait(process)


def _feed(
    player: Player, process: Process, opened: Opened, numbers: Sequence[int], attempt: str
) -> None:
    """Run some units, one after the other, as one feeder does."""
    store, plan = player.store(process, of_units=player.is_joined), opened.plan
    for number in numbers:
        unit = plan.unit(number)
        if _is_committed(player, store, unit, plan.hash):
            continue
        rows = opened.rows[number]
        answers = dict.fromkeys(range(len(rows)), attempt)
        if player.has_journal:
            answers |= _with_journal(store, unit, plan.hash, rows, attempt)
        _commit(player, store, unit, rows, answers, plan_hash=plan.hash, attempt=attempt)


def _is_committed(player: Player, store: Store, unit: CommitUnit, plan_hash: str) -> bool:
    if player.cuts_units:
        return commit.receipt_of(store, unit, plan_hash, is_partitioned=True) is not None
    return player.steps.receipt_of(store, unit, plan_hash) is not None


def _commit(
    player: Player,
    store: Store,
    unit: CommitUnit,
    rows: Sequence[int],
    answers: Mapping[int, str],
    **names: str,
) -> None:
    """Commit the rows of a unit that have arrived."""
    pos = _delivered(player, len(rows))
    row = np.array([rows[one] for one in pos], np.int64)
    table = _table(tuple(row.tolist()), tuple(answers[one] for one in pos))
    common = {"pos": np.array(pos, np.int64), "row": row, "encode": encode_once, **names}
    if player.is_partitioned:
        half = pa.array(["odd" if one % 2 else "even" for one in row.tolist()])
        by = {"by" if player.cuts_units else "joined_by": joins.BY}
        player.steps.commit_partitioned(
            store, unit, table.append_column(*joins.BY, half), count=_count, **by, **common
        )
    else:
        player.steps.commit_unit(store, unit, table, count=_count, **common)


def _count(table: pa.Table) -> UnitCounts:
    return UnitCounts(num_rows=table.num_rows)


def _with_journal(
    store: Store, unit: CommitUnit, plan_hash: str, rows: Sequence[int], attempt: str
) -> dict[int, str]:
    """Return rows of earlier attempts; keep the first row that they did not finish."""
    row = np.array(rows, np.int64)
    kept = journal.read_fragments(store, unit, SCHEMA, plan_hash=plan_hash)
    journaled = dict(
        zip(kept.column(journal.POS).to_pylist(), kept.column("text").to_pylist(), strict=True)
    )
    open_pos = [pos for pos in range(len(rows)) if pos not in journaled]
    if open_pos:
        table = _table((rows[open_pos[0]],), (attempt,))
        columns = [*table.columns, pa.array(open_pos[:1]), pa.array(row[open_pos[:1]])]
        finished = pa.table(columns, schema=journal.journal_schema(SCHEMA))
        journal.write_fragment(store, unit, finished, plan_hash=plan_hash, attempt=attempt)
    return journaled


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


def _open_plan(player: Player, store: Store, before: Sequence[Opened]) -> Opened:
    """Open the plan that follows others, making it where there is none."""

    def make() -> bytes:
        return make_plan(store, player.variant, before)

    name = plan_name(len(before) + 1)
    stored = player.steps.open_plan(store, make, name=name)
    return read_shard(store.read(json.loads(stored)["shard"]), player.cuts_units)


def _later(player: Player, store: Store) -> list[Opened]:
    """Return the plan of rows that came later, where it exists."""
    name = plan_name(2)
    if not player.may_grow or store.size(name) is None:
        return []
    shard = json.loads(store.read(name))["shard"]
    return [read_shard(store.read(shard), player.cuts_units)]


@lru_cache(maxsize=65536)
def _table(rows: tuple[int, ...], texts: tuple[str, ...]) -> pa.Table:
    return pa.table({"id": [f"r{row}" for row in rows], "text": list(texts)}, schema=SCHEMA)


# the same few tables are written over and over: each is encoded once, for real
_encode = lru_cache(maxsize=65536)(
    lambda names, columns, footer: encode_part(
        pa.table(list(map(list, columns)), names=list(names)), footer
    )
)


def encode_once(table: pa.Table, footer: str) -> bytes:
    columns = tuple(tuple(column.to_pylist()) for column in table.columns)
    return bytes(_encode(tuple(table.column_names), columns, footer))


# and each footer is parsed once
parts.footer_text = lru_cache(maxsize=65536)(parts.footer_text)


def foreign_part(unit: int) -> bytes:
    """Return the part that another job would write under the name of a unit."""
    footer = Footer(
        unit=CommitUnit(number=unit, num_rows=1, row_sum=row_sum(np.array([_FOREIGN_ROW]))),
        plan="plan of another job",
        attempt="another job",
        counts=UnitCounts(num_rows=1),
    )
    return encode_once(_table((_FOREIGN_ROW,), ("foreign",)), footer.to_text())
