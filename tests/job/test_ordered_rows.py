"""Rows of a large plan, kept in its order for the next run of the job."""

import numpy as np
import pyarrow as pa
import pytest

import raybatch
from raybatch.durable.layout import PLANS, ordered_units
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.planning import dataset
from raybatch.planning.dataset import OrderedRows
from raybatch.rows.plan_columns import RANK, rank_of
from tests.job.test_job_plan import NUM_ROWS, SMALL, document_table, output, write_documents
from tests.jobs import LARGE, local_job
from tests.stages.support import fake_stage
from tests.tiers import some

UNIT_ROWS = np.array([2, 3, 1])
NO_UNIT = np.zeros(3, bool)

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def rows_of(units):
    """Rows of whole units, by rank."""
    rank = [
        rank + pos
        for u in units
        for rank in [int(rank_of(np.array(u)))]
        for pos in range(UNIT_ROWS[u])
    ]
    return pa.table({RANK: rank, "text": [f"row {one}" for one in rank]})


def kept_in(folder) -> OrderedRows:
    return OrderedRows(store=open_store(str(folder)), plan_hash="abc", unit_rows=UNIT_ROWS)


def todo_of(*units):
    todo = NO_UNIT.copy()
    todo[list(units)] = True
    return todo


def test_units_are_read_from_the_files_that_have_them(tmp_path):
    kept = kept_in(tmp_path)
    kept.write(rows_of([0, 1]))
    kept.write(rows_of([2]))
    assert [(units, wanted.tolist()) for units, wanted in kept.files_of(todo_of(1, 2))] == [
        (range(2), [1]),
        (range(2, 3), [2]),
    ]
    assert kept.read(range(2), np.array([1])).equals(rows_of([1]))
    assert kept.files_of(NO_UNIT) == []


@pytest.mark.parametrize("change", ["cut", "flip", "remove"])
def test_a_damaged_file_is_not_read(tmp_path, caplog, change):
    kept = kept_in(tmp_path)
    kept.write(rows_of([0, 1]))
    (path,) = (tmp_path / PLANS / "abc").iterdir()
    data = bytearray(path.read_bytes())
    path.unlink()
    if change != "remove":
        data[len(data) // 2] ^= 1
        path.write_bytes(data[:-20] if change == "cut" else data)
    assert kept.read(range(2), np.array([0])) is None
    assert "reading rows of the source again" in caplog.text


def test_only_whole_units_are_written(tmp_path, caplog):
    kept = kept_in(tmp_path)
    kept.write(rows_of([0, 1]).slice(0, 4))
    kept.write(rows_of([]))
    assert kept.files_of(todo_of(0, 1, 2)) == []
    # a unit that the file lacks is read from the source
    kept.write(pa.concat_tables([rows_of([0]), rows_of([2])]))
    assert kept.read(range(3), np.array([1])) is None


def test_a_file_that_cannot_be_written_costs_no_row(tmp_path, caplog):
    (tmp_path / "_raybatch").write_text("in the way of the folder")
    kept_in(tmp_path).write(rows_of([0]))
    assert "the next run of the job sorts these rows again" in caplog.text


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("source"))


def make_job(source, sink, model, **options):
    # slow enough for a limit to end the run before the last rows
    fake = {"step_s": 0.02, "max_num_seqs": 4}
    engine = {"block_size_tokens": 8}
    stage = fake_stage(model, prompt="{text}", engine=engine, replicas=1, fake=fake)
    plan = {**SMALL, **LARGE, "shards": options.pop("shards", "auto")}
    return local_job(source, sink, stage, plan=plan, executor="ray", **options)


def run(job):
    return job.run(progress=lambda *_: None)


def files_below(folder):
    store = open_store(str(folder))
    return [name for name in store.names(PLANS) if ordered_units(name) is not None]


def no_sort(*_):
    raise AssertionError("the rows are sorted again")


@pytest.mark.ray
@pytest.mark.parametrize("damage", some(["one damaged", "none", "one lost"]))
def test_the_next_run_reads_the_rows_in_their_order(
    source, model, tmp_path, monkeypatch, cluster, damage
):
    monkeypatch.setattr(dataset, "_ROWS_PER_BLOCK", 64)
    monkeypatch.setattr(dataset, "_MIN_BYTES", 1)
    sink = tmp_path / "out"
    report = run(make_job(source, sink, model, limits={"max_tokens": 4000}))
    assert 0 < report.rows_out < NUM_ROWS
    files = files_below(sink)
    assert len(files) > 1
    last = sink / files[-1]
    if damage == "one damaged":
        last.write_bytes(last.read_bytes()[:-1])
    elif damage == "one lost":
        last.unlink()
    if damage != "one lost":
        monkeypatch.setattr(dataset, "_sorted_rows", no_sort)
    run(make_job(source, sink, model))
    assert raybatch.verify(sink, deep=True).is_complete
    assert files_below(sink) == []
    texts = sorted(output(sink).column("text").to_pylist(), key=str)
    assert texts == sorted(document_table().column("text").to_pylist(), key=str)


@pytest.mark.ray
@pytest.mark.slow
def test_rows_are_kept_where_the_job_says(source, model, tmp_path, cluster):
    place, limits = tmp_path / "place", {"max_tokens": 4000}
    run(make_job(source, tmp_path / "out", model, shards=str(place), limits=limits))
    assert (bool(files_below(place)), files_below(tmp_path / "out")) == (True, [])
    run(make_job(source, tmp_path / "out", model, shards=str(place)))
    assert files_below(place) == []
    run(make_job(source, tmp_path / "small", model, limits=limits))
    assert files_below(tmp_path / "small") == []


def test_a_place_that_only_one_process_has_is_refused(source, tmp_path, model):
    with pytest.raises(ConfigError, match=r"plan\.shards"):
        make_job(source, tmp_path / "out", model, shards="memory://x")
