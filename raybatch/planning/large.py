"""Plans a large source with Ray tasks, and runs its rows in the order of the plan."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import chain
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

from raybatch.actors.ray_errors import own_cause
from raybatch.config import PlanConfig
from raybatch.durable.fault_points import reach
from raybatch.inputs.source import Source
from raybatch.planning import tasks
from raybatch.planning.dataset import ordered_dataset, pieces_of, with_places, without_groups
from raybatch.planning.layout_lint import can_change_layout
from raybatch.planning.planned import ArrangeJob, LargePlan, PieceSummary, ProbedRows, RunSpec
from raybatch.planning.probe import generated_lengths
from raybatch.planning.shards import even_stretch, even_units, stretches
from raybatch.planning.store import StoredPlan, log_plan, write_plan, write_shard
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.forecast import NUM_WINDOWS, CacheSize, OrderForecast, merge_forecasts
from raybatch.prefix.order import EngineCapacity
from raybatch.prefix.plan import choose_parts, cut_values
from raybatch.records.arrays import Ints
from raybatch.rows.options import StageConfig

# maximum rows and keys of a part; planning one needs 1 to 2 GB
ROWS_PER_PART = 1 << 21
KEYS_PER_PART = 1 << 26
# consecutive rows of one part in the order of the plan
ROWS_PER_STRETCH = 1 << 16
_MAX_STRETCHES = 64
_SAMPLE_ROWS = 1 << 16
# rows and bytes of a task that describes rows, about; a source of fewer pieces than these has few
_ROWS_PER_TASK, _BYTES_PER_TASK, _FEW_PIECES = 16 << 10, 64 << 20, 64
# pieces that are read at once for other tasks, and tables read ahead of each
_READ_AT_ONCE, _READ_AHEAD = 8, 4
# seconds between two checks whether the plan is still wanted
_POLL_S = 0.5
# arrays that one task sums
_FAN_IN = 16

_Ref = Any  # Ray has no types


def run_large(
    job: RunSpec, stored: StoredPlan | None, large: LargePlan | None = None
) -> LargePlan | None:
    """Plan a source with Ray tasks unless it is planned, and generate its rows.

    Its plan may be `stored`, or `large`, which is stored first. Returns a plan that was not stored.
    """
    if stored is None:
        began, probe_s, probed = time.monotonic(), 0.0, None
        large = large or plan_large(job)
        if any(len(part.probe) for part in large.parts):
            probe_began = time.monotonic()
            large, probed = _after_probe(job, large)
            probe_s = time.monotonic() - probe_began
        stored = store_large_plan(job, large)
        seconds = large.seconds + time.monotonic() - began - probe_s
        log_plan(stored, seconds, can_change_layout=can_change_layout(job.config))
        # free the plan index, which would fill the object store together with rows and prompts
        large = replace(large, tables=(), rows=(), arranged=())
        if probed is not None:
            job.runner.keep(stored, *with_places(job.sink, stored, probed))
    run_stored(job, stored, large)
    return None if large is None else replace(large, prompts={})


def run_stored(job: RunSpec, stored: StoredPlan, planned: LargePlan | None = None) -> None:
    """Generate the rows of the units of a stored plan that are not written yet.

    `planned` is the plan if this run made it.
    """
    job.on_stored(stored)
    todo = job.runner.todo(stored, planned)
    if todo.any():
        prompts = {} if planned is None else planned.prompts
        job.runner.run(stored, ordered_dataset(job, stored, todo, prompts))


def plan_large(job: RunSpec, *, raise_if_over: Callable[[], None] = lambda: None) -> LargePlan:
    """Make the plan of a source with Ray tasks: describe its rows, then arrange them.

    `raise_if_over` is called about twice a second while rows are described; an error that it raises
    ends the plan.
    """
    began, started = time.monotonic(), list[_Ref]()
    try:
        described = _described(job, started, raise_if_over)
        of_pieces, keys, prompts = map(list, zip(*described, strict=True))
        left, found = of_pieces, dict[_Ref, PieceSummary]()
        while left:
            done, left = ray.wait(left, num_returns=len(left), timeout=_POLL_S)
            found |= zip(done, get_results(done), strict=True)
            raise_if_over()
    except BaseException:
        for ref in started:
            ray.cancel(ref)
        raise
    summaries = [found[ref] for ref in of_pieces]
    large = plan_pieces(summaries, keys, job.config, job.plan)
    known = dict(zip(large.piece_rows.tolist(), prompts, strict=False))
    has_prompts = all(piece.has_prompts for piece in summaries)
    seconds = time.monotonic() - began
    return replace(large, prompts=known if has_prompts else {}, seconds=seconds)


def _described(
    job: RunSpec, started: list[_Ref], raise_if_over: Callable[[], None]
) -> list[tuple[_Ref, _Ref, _Ref]]:
    """Start tasks that describe the rows, noted in `started`; return references to their results.

    Where pieces of the source are few, or one is large, such as a JSONL file, one task reads it and
    others describe its rows, since tokenizing takes much longer than reading.
    """
    options, source = cloudpickle.dumps((job.config, job.plan)), ray.put(job.source)
    every, is_run = -(-job.source.num_rows // _SAMPLE_ROWS), job.units is not None
    describe, describe_rows = map(ray.remote(num_returns=3), (tasks.describe, tasks.describe_rows))
    streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": _READ_AHEAD}
    # no CPU: a reader keeps it while it waits for other tasks, which might have no other
    read = ray.remote(**streaming, num_cpus=0, scheduling_strategy="SPREAD")(tasks.read_rows)
    num_cpus, pieces = int(ray.cluster_resources().get("CPU", 1)), pieces_of(job.source)
    most_waiting = max(2, 2 * num_cpus // _READ_AT_ONCE)
    is_over = Event()
    is_few = len(pieces) < max(_FEW_PIECES, 4 * num_cpus)

    def read_and_describe(slices: range, first_row: int, size: int) -> list[tuple[_Ref, ...]]:
        of_slices, waiting = list[tuple[_Ref, ...]](), list[_Ref]()
        for rows in read.remote(source, slices, job.row_id_column, size):
            if is_over.is_set():
                break
            of_slices.append(describe_rows.remote(options, rows, first_row, every, is_run))
            first_row += size
            started.append(of_slices[-1][0])
            waiting.append(of_slices[-1][0])
            if len(waiting) > most_waiting:  # their rows fill the object store
                done, waiting = ray.wait(waiting, num_returns=len(waiting) // 2)
                get_results(done)
        return of_slices

    threads, described = ThreadPoolExecutor(_READ_AT_ONCE), []
    try:
        for slices, first_row in pieces:
            if size := _rows_per_task(job.source, slices, is_few=is_few):
                described.append(threads.submit(read_and_describe, slices, first_row, size))
            else:
                what = (options, source, slices, first_row, every, job.row_id_column, is_run)
                refs = describe.remote(*what)
                started.append(refs[0])
                described.append(refs)
        reading = {one for one in described if isinstance(one, Future)}
        while reading:
            done, reading = wait(reading, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
            raise_if_over()
        found = (one.result() if isinstance(one, Future) else [one] for one in described)
        return list(chain.from_iterable(found))
    finally:
        is_over.set()
        threads.shutdown(wait=False, cancel_futures=True)


def _rows_per_task(source: Source, slices: range, *, is_few: bool) -> int:
    """Return the rows per task if many tasks describe these slices, 0 if one task does."""
    parts = source.slices[slices.start : slices.stop]
    num_rows, num_bytes = (sum(getattr(p, n) for p in parts) for n in ("num_rows", "num_bytes"))
    size = max(1, min(_ROWS_PER_TASK, _BYTES_PER_TASK * num_rows // max(1, num_bytes)))
    return size if num_rows > (2 if is_few else 8) * size else 0


def plan_pieces(
    summaries: Sequence[PieceSummary], tables: Sequence[_Ref], config: StageConfig, plan: PlanConfig
) -> LargePlan:
    """Make a plan with Ray tasks: arrange rows that `tasks.describe` has described.

    `summaries` are those of all pieces; `tables` are references to the tables that it returned,
    each for one or more pieces.
    """
    num_rows = sum(piece.num_rows for piece in summaries)
    num_keys = sum(piece.num_keys for piece in summaries)
    num_parts = max(-(-num_rows // ROWS_PER_PART), -(-num_keys // KEYS_PER_PART))
    by_part: list[Sequence[_Ref]] = [tables]
    if num_parts > 1:
        sample = BlockKeys.concat([piece.sample for piece in summaries])
        rule = ray.put(choose_parts(sample, num_parts))
        split = ray.remote(num_returns=num_parts)(tasks.split)
        by_part = list(zip(*(split.remote(table, rule) for table in tables), strict=True))
    return LargePlan(
        pieces=summaries,
        tables=tables,
        rows=by_part,
        probed=ProbedRows(row=np.zeros(0, np.int64), lengths=np.zeros(0)),
        **_arrange(_arrange_job(config, plan, num_rows, num_parts), by_part, probed=None),
    )


def _arrange(
    what: ArrangeJob, by_part: Sequence[Sequence[_Ref]], probed: ProbedRows | None
) -> dict[str, Any]:
    arrange = ray.remote(num_returns=2)(tasks.arrange)
    arranged = [arrange.remote(what, probed, *rows) for rows in by_part]
    return {
        "parts": get_results([summary for summary, _ in arranged]),
        "arranged": [part for _, part in arranged],
    }


def _arrange_job(
    config: StageConfig, plan: PlanConfig, num_rows: int, num_parts: int
) -> ArrangeJob:
    return ArrangeJob(
        plan=plan,
        dedup=config.dedup,
        num_rows=num_rows,
        num_parts=num_parts,
        capacity=EngineCapacity.of(config.engine, config.pool.replicas or 1),
    )


def forecast_large(
    job: RunSpec, large: LargePlan, size: CacheSize, *, max_rows: int
) -> tuple[OrderForecast, ...]:
    """Return forecasts of the computed prompt tokens for several orders of the rows.

    That of the input order is computed from samples of the input, the others in each part of the
    plan, with at most about `max_rows` rows each.
    """
    forecast, hits = ray.remote(tasks.forecast), ray.remote(tasks.input_hits)
    what = _arrange_job(job.config, job.plan, large.num_rows, len(large.parts))
    is_reordered = large.is_reordered(job.plan)
    share = max(max_rows // len(large.parts), NUM_WINDOWS)
    by_part = [forecast.remote(what, is_reordered, size, share, *rows) for rows in large.rows]
    if is_whole := large.num_rows <= max_rows:
        windows = [hits.remote(size, max_rows, True, *large.tables)]
    else:
        num_windows = min(NUM_WINDOWS, len(large.tables))
        chosen = np.linspace(0, len(large.tables) - 1, num_windows).astype(np.int64).tolist()
        each = max_rows // num_windows
        windows = [hits.remote(size, each, False, large.tables[i]) for i in chosen]
    return merge_forecasts(get_results(by_part), get_results(windows), is_whole=is_whole)


def _after_probe(job: RunSpec, large: LargePlan) -> tuple[LargePlan, pa.Table]:
    """Generate the rows of a probe, and arrange the others with estimated lengths."""
    rows = np.sort(np.concatenate([part.probe for part in large.parts]))
    source, wanted, chosen = ray.put(job.source), ray.put(rows), ray.remote(tasks.chosen_rows)
    tables = [
        chosen.remote(source, slices, first_row, wanted, job.row_id_column)
        for slices, first_row in pieces_of(job.source)
    ]
    table, size = pa.concat_tables(get_results(tables)).combine_chunks(), job.plan.unit_rows
    starts = range(0, table.num_rows, size)
    finished = job.runner.collect([without_groups(table.slice(i, size)) for i in starts])
    lengths = generated_lengths(rows, finished, job.config.output)
    probed = ProbedRows(row=rows, lengths=lengths)
    what = _arrange_job(job.config, job.plan, large.num_rows, len(large.parts))
    return replace(large, probed=probed, **_arrange(what, large.rows, probed)), finished


def store_large_plan(job: RunSpec, large: LargePlan) -> StoredPlan:
    """Decide the order of all rows, write the plan below the sink, and return it as stored."""
    plan, profile, is_reordered = job.plan, large.profile, large.is_reordered(job.plan)
    shards: list[tuple[_Ref, _Ref]] = []
    if is_reordered:
        shards, unit_rows = rank_parts(large, plan)
    else:
        unit_rows = even_units([piece.num_rows for piece in large.pieces], plan)
    digests = get_results([digest for digest, _ in shards])
    name = job.subject.hash_of(digests, [piece.contents for piece in large.pieces])
    firsts, tables = large.piece_rows[:-1].tolist(), [table for _, table in shards]
    units = stretches(name, unit_rows)
    if shards:
        sums_of, added = ray.remote(tasks.sums_of), ray.remote(tasks.added)
        sums = [sums_of.remote(*at, len(unit_rows)) for at in zip(tables, firsts, strict=True)]
        # in tasks, so that the driver sees one array
        while len(sums) > 1:
            sums = [added.remote(*sums[i : i + _FAN_IN]) for i in range(0, len(sums), _FAN_IN)]
        units = replace(units, row_sums=np.array(get_results(sums)[0]))
    write = ray.remote(write_shard)
    reach("before_shards")
    written = get_results(
        [write.remote(job.sink, name, *at) for at in zip(firsts, tables, strict=False)]
    )
    stored = job.subject.stored(
        hash=name,
        num_rows=large.num_rows,
        num_units=len(unit_rows),
        num_groups=profile.num_groups if is_reordered else 0,
        is_reordered=is_reordered,
        logical_tokens=profile.tree.logical_tokens,
        computed_tokens=profile.computed_tokens,
        block_size=large.block_size,
        shards=tuple(zip(written, firsts, strict=False)),
    )
    return write_plan(job.sink, stored, units)


def rank_parts(large: LargePlan, plan: PlanConfig) -> tuple[list[tuple[_Ref, _Ref]], Ints]:
    """Return references to (digest, shard) of each piece, and the number of rows of each unit.

    A shard is the part of the plan for the rows of one piece.
    """
    head = even_stretch(len(large.probed.row), plan)
    # values at which stretches begin: parts alternate, one stretch at a time
    values = np.concatenate([part.values for part in large.parts])
    weights = np.concatenate([part.weights for part in large.parts])
    num_stretches = int(weights.sum()) // (len(large.parts) * ROWS_PER_STRETCH)
    cuts = cut_values(values, weights, max(1, min(num_stretches, _MAX_STRETCHES)))
    unit_sizes = ray.remote(tasks.unit_sizes)
    sizes = get_results([unit_sizes.remote(part, cuts, plan) for part in large.arranged])
    # by stretch, then by part
    counts = np.array([[len(stretch) for stretch in part] for part in sizes])
    by_stretch = counts.T.reshape(-1)
    before = (np.cumsum(by_stretch) - by_stretch).reshape(counts.T.shape).T
    first_units = before + len(head)
    middle = [part[stretch] for stretch in range(counts.shape[1]) for part in sizes]
    unit_rows = np.concatenate([head, *middle])
    first_groups = np.cumsum([0, *(part.profile.num_groups for part in large.parts)]).tolist()
    piece_rows, num_pieces = ray.put(large.piece_rows), len(large.pieces)
    rank = ray.remote(num_returns=num_pieces)(tasks.rank)
    ranked = [
        rank.remote(part, cuts, plan, units.tolist(), first_group, piece_rows)
        for part, units, first_group in zip(large.arranged, first_units, first_groups, strict=False)
    ]
    by_part = [[part] if num_pieces == 1 else part for part in ranked]
    shard, probe = ray.remote(num_returns=2)(tasks.shard), ray.put(large.probed.row)
    num_skipped, shards = 0, []
    for i, piece in enumerate(large.pieces):
        where = (int(large.piece_rows[i]), piece.num_rows, num_skipped, len(unit_rows))
        of_piece = [part[i] for part in by_part]
        shards.append(shard.remote(*where, plan.unit_rows, probe, *of_piece))
        num_skipped += piece.skipped.total()
    return shards, np.concatenate([unit_rows, even_stretch(num_skipped, plan)])


def get_results(refs: Sequence[_Ref]) -> list[Any]:
    """Return the results of Ray tasks; an error of this library is raised without RayTaskError."""
    try:
        results: list[Any] = ray.get(list(refs))
    except RayTaskError as error:
        raise own_cause(error) or error from None
    return results
