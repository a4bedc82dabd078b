"""Whole executions of Ray Data with two stages on one pool of fake engines."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import ray

from raybatch.stages.feeder import own_cpus
from tests.actors.pools import wait_until
from tests.clusters import local_ray
from tests.stages.support import fake_stage

pytestmark = pytest.mark.ray

NUM_ROWS = 300


class Runs(NamedTuple):
    """What two executions of the same stages left behind."""

    argument_free: pa.Table
    applied: pa.Table
    pids: tuple[tuple[int, ...], tuple[int, ...]]
    stats: Any


def shout(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "text": row["text"].upper()}


@pytest.fixture(scope="module")
def runs(model) -> Iterator[Runs]:
    first = fake_stage(model, prompt="{text}", id_column="id")
    second = fake_stage(model, prompt="{generated_text}", id_column="id", output_prefix="b_")
    lists = pa.array([[i, None] for i in range(NUM_ROWS)], pa.list_(pa.int16()))
    table = pa.table(
        {"id": range(NUM_ROWS), "text": [f"t{i}" for i in range(NUM_ROWS)], "lists": lists}
    )
    blocks = [table.slice(start, 75) for start in range(0, NUM_ROWS, 75)]
    with local_ray():
        dataset = ray.data.from_arrow(blocks)
        free = dataset.map(shout).map_batches(first).map(lambda row: {**row, "seen": True})
        free_table = pa.concat_tables(ray.get(free.to_arrow_refs()))
        # one engine may have answered all rows before the other one was ready
        wait_until(lambda: len(first.pool.state().pids) == 2)
        pids = first.pool.state().pids
        applied = second.apply(first.apply(dataset))
        applied_table = pa.concat_tables(ray.get(applied.to_arrow_refs()))
        yield Runs(free_table, applied_table, (pids, second.pool.state().pids), first.stats())


def test_argument_free_form_works_between_user_maps(runs):
    out = runs.argument_free.sort_by("id")
    assert out.column("id").to_pylist() == list(range(NUM_ROWS))
    assert out.column("num_input_tokens").to_pylist() == [len(f"T{i}") for i in range(NUM_ROWS)]
    assert set(out.column("__inference_error__").to_pylist()) == {""}
    assert set(out.column("seen").to_pylist()) == {True}


def test_two_stages_over_the_same_rows_keep_apart(runs):
    out = runs.applied.sort_by("id")
    assert out.num_rows == NUM_ROWS
    assert out.column("row_id").to_pylist() == out.column("b_row_id").to_pylist()
    assert out.schema.field("lists").type == pa.list_(pa.int16())


def test_stages_share_one_pool_that_stays_warm(runs):
    before, after = runs.pids
    assert len(before) == 2
    assert before == after


def test_pool_counts_the_rows_of_each_stage_apart(runs):
    assert (runs.stats.rows_received, runs.stats.rows_done) == (2 * NUM_ROWS, 2 * NUM_ROWS)


def test_an_actor_knows_the_cpus_that_ray_holds_for_it(runs):
    class Holder:
        def cpus(self) -> float:
            return own_cpus()

    holders = [ray.remote(Holder).options(num_cpus=n).remote() for n in (1, 0.1)]
    assert [ray.get(holder.cpus.remote()) for holder in holders] == [1.0, 0.1]
    assert own_cpus() == 0.0
