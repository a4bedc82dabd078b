"""Large plans of files that one task reads and many describe."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import ray

from raybatch.errors import ConfigError
from raybatch.inputs.file_slices import Size
from raybatch.planning import large
from raybatch.planning.tasks import read_rows
from tests.jobs import LARGE, local_job
from tests.planning.test_plan import PLAN, document_rows, run_spec
from tests.stages.support import fake_stage, write_parquet

NUM_ROWS = 300

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def rows() -> pa.Table:
    table = document_rows(100, 4)
    assert table.num_rows >= NUM_ROWS
    return table.slice(0, NUM_ROWS)


def write_json(folder, name):
    opened = gzip.open if name.endswith(".gz") else open
    (folder / "in").mkdir()
    with opened(folder / "in" / name, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows().to_pylist())


@pytest.fixture(params=["a.parquet", "a.jsonl", "a.jsonl.gz"])
def job(request, tmp_path, model):
    """A job over one file, which is one slice."""
    if request.param == "a.parquet":
        write_parquet(tmp_path / "in" / "a.parquet", rows())
    else:
        write_json(tmp_path, request.param)
    whole = run_spec(tmp_path, model, rows().slice(0, 0))
    assert [NUM_ROWS] == [part.num_rows for part in whole.source.slices]
    # prompts are kept where the job runs
    return replace(whole, units=object())


@pytest.mark.parametrize(("num_files", "is_split"), [(2, True), (70, False)])
def test_files_are_split_where_they_are_few(tmp_path, model, monkeypatch, num_files, is_split):
    for number in range(num_files):
        write_parquet(tmp_path / "in" / f"{number:02d}.parquet", rows().slice(4 * number, 7))
    job = run_spec(tmp_path, model, rows().slice(0, 0))
    pieces = [range(number, number + 1) for number in range(num_files)]
    monkeypatch.setattr(type(job.source), "tasks", lambda _: pieces)
    monkeypatch.setattr(large, "_ROWS_PER_TASK", 3)
    known, sizes = large._rows_per_task, []

    def rows_per_task(*args, **options):
        sizes.append(known(*args, **options))
        return sizes[-1]

    monkeypatch.setattr(large, "_rows_per_task", rows_per_task)
    made = large.plan_large(job)
    assert sum(piece.num_rows for piece in made.pieces) == 7 * num_files
    assert [3 if is_split else 0] * num_files == sizes


def planned(job, monkeypatch, rows_per_task):
    monkeypatch.setattr(large, "_ROWS_PER_TASK", rows_per_task)
    made = large.plan_large(job)
    shards, unit_rows = large.rank_parts(made, PLAN)
    shards = pa.concat_tables(large.get_results([shard for _, shard in shards]))
    prompts = [made.prompts[first] for first in sorted(made.prompts)]
    return made, shards, unit_rows, pa.concat_tables(large.get_results(prompts))


def test_many_tasks_plan_a_file_as_one_does(job, monkeypatch):
    one, *expected = planned(job, monkeypatch, NUM_ROWS)
    many, *found = planned(job, monkeypatch, 16)
    assert [1, 19] == [len(made.pieces) for made in (one, many)]
    assert expected[0].equals(found[0])
    assert np.array_equal(expected[1], found[1])
    assert expected[2].equals(found[2])
    assert one.profile == many.profile


@pytest.mark.timeout(90)
def test_as_many_large_files_as_cpus_are_planned(tmp_path, model, monkeypatch):
    """Tasks that wait for others to take what they have read keep no CPU from those."""
    num_files = 2 * int(ray.cluster_resources()["CPU"])
    for number in range(num_files):
        write_parquet(tmp_path / "in" / f"{number}.parquet", rows())
    job = run_spec(tmp_path, model, rows().slice(0, 0))
    monkeypatch.setattr("raybatch.inputs.source._TASK_LIMIT", Size(NUM_ROWS, 1 << 20, 1))
    monkeypatch.setattr(large, "_ROWS_PER_TASK", 10)
    made = large.plan_large(job)
    assert num_files * NUM_ROWS == sum(piece.num_rows for piece in made.pieces)
    assert num_files * 30 == len(made.pieces)


def test_rows_are_read_in_tables_of_one_size(job):
    tables = list(read_rows(job.source, range(1), None, 64))
    assert [64, 64, 64, 64, 44] == [table.num_rows for table in tables]
    assert rows().column("id").to_pylist() == pa.concat_tables(tables).column("id").to_pylist()


def test_a_file_that_changes_while_tasks_read_it_is_an_error(job, monkeypatch):
    changed = tuple(replace(part, num_rows=part.num_rows + 7) for part in job.source.slices)
    job = replace(job, source=replace(job.source, slices=changed, num_rows=NUM_ROWS + 7))
    monkeypatch.setattr(large, "_ROWS_PER_TASK", 16)
    with pytest.raises(ConfigError, match="changed while it was read: it has 300 rows and had 307"):
        large.plan_large(job)


def test_rows_of_one_file_are_answered_once(tmp_path, model, monkeypatch):
    monkeypatch.setattr(large, "_ROWS_PER_TASK", 16)
    write_json(tmp_path, "a.jsonl.gz")
    stage = fake_stage(model, prompt="{text}", id_column="id", replicas=1)
    plan = {**LARGE, "unit_rows": 8, "max_unit_rows": 16}
    report = local_job(tmp_path / "in", tmp_path / "out", stage, plan=plan).run(
        progress=lambda *_: None
    )
    assert (NUM_ROWS, 0, 0) == (report.rows_out, report.rows_lost, report.rows_duplicated)
