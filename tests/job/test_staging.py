"""Jobs over datasets that are no folders of files: their rows are read once, and stay the same."""

import json
import logging

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.durable.layout import SOURCE, SOURCE_RECORD
from raybatch.errors import ConfigError
from raybatch.job import staging
from raybatch.job.job import Job
from raybatch.outputs.cleaning import clean
from tests.jobs import local_job
from tests.stages.support import fake_stage

NUM_ROWS = 50
PLAN = {"unit_rows": 10, "max_unit_rows": 10}

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def texts(num_rows: int = NUM_ROWS) -> pa.Table:
    return pa.table({"id": range(num_rows), "text": [f"t{i}" for i in range(num_rows)]})


@pytest.fixture
def stage(model):
    return fake_stage(model, prompt="{text}", id_column="id")


@pytest.fixture
def sink(tmp_path):
    return tmp_path / "out"


def answered(sink) -> dict[int, str]:
    table = pq.read_table(sink)
    assert table.num_rows == len(set(table.column("id").to_pylist()))
    return dict(zip(*(table.column(c).to_pylist() for c in ("id", "generated_text")), strict=True))


def from_hub_like(table: pa.Table):
    return pytest.importorskip("datasets").Dataset(table)


def as_stream(table: pa.Table):
    return from_hub_like(table).to_iterable_dataset()


def as_ray(table: pa.Table):
    import ray

    return ray.data.from_arrow([table.slice(0, 20), table.slice(20)])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda table: table, id="pyarrow"),
        pytest.param(pa.Table.to_pandas, id="pandas"),
        pytest.param(pa.Table.to_reader, id="reader"),
        pytest.param(from_hub_like, id="datasets"),
        pytest.param(as_stream, id="datasets stream"),
        pytest.param(as_ray, id="ray", marks=pytest.mark.ray),
    ],
)
def test_rows_of_a_dataset_are_answered_as_those_of_a_file(stage, tmp_path, sink, make):
    (tmp_path / "in").mkdir()
    pq.write_table(texts(), tmp_path / "in" / "a.parquet")
    local_job(tmp_path / "in", tmp_path / "of-files", stage).run()
    report = local_job(make(texts()), sink, stage, plan=PLAN).run()
    assert report.rows_out == NUM_ROWS
    assert answered(tmp_path / "of-files") == answered(sink)


def test_files_are_of_a_size_and_rows_keep_their_order(stage, sink, monkeypatch):
    monkeypatch.setattr(staging, "_FILE_BYTES", 1)
    monkeypatch.setattr(staging, "_BATCH_ROWS", 10)
    local_job(texts(), sink, stage).run()
    record = json.loads((sink / SOURCE_RECORD).read_text())
    assert (NUM_ROWS, 5) == (record["num_rows"], record["num_files"])
    files = sorted((sink / SOURCE / record["token"]).glob("*.parquet"))
    assert texts() == pa.concat_tables(pq.read_table(file) for file in files)


def test_a_job_is_resumed_with_the_rows_that_were_read(stage, sink, caplog):
    local_job(texts(), sink, stage).preview(2)
    with caplog.at_level(logging.INFO):
        report = local_job(texts(), sink, stage).run()
    assert report.rows_out == NUM_ROWS
    assert f"using the {NUM_ROWS} rows" in caplog.text
    assert local_job(texts(), sink, stage).run().rows_out == NUM_ROWS


def test_other_rows_are_refused_until_overwrite_is_set(stage, sink):
    local_job(texts(), sink, stage).run()
    with pytest.raises(ConfigError, match="overwrite=True"):
        local_job(texts(20), sink, stage).run()
    with pytest.raises(ConfigError, match="overwrite=True"):
        local_job(texts(20), sink, stage, overwrite=True).preview(1)
    assert NUM_ROWS == len(answered(sink))
    assert 20 == local_job(texts(20), sink, stage, overwrite=True).run().rows_out
    assert 20 == len(answered(sink))


def test_a_driver_that_died_while_it_read_leaves_nothing_that_is_taken(stage, sink, monkeypatch):
    monkeypatch.setattr(staging, "_FILE_BYTES", 1)
    monkeypatch.setattr(staging, "_BATCH_ROWS", 10)
    write, num_files = staging.write_file, 0

    def dying(*args):
        nonlocal num_files
        num_files += 1
        if num_files == 3:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(staging, "write_file", dying)
    with pytest.raises(KeyboardInterrupt):
        local_job(texts(), sink, stage).run()
    assert NUM_ROWS == local_job(texts(), sink, stage).run().rows_out
    assert NUM_ROWS == len(answered(sink))
    record = json.loads((sink / SOURCE_RECORD).read_text())
    assert 2 == len(list(sink.glob("_source/*/000000.*")))
    assert clean(sink, older_than_s=0).names
    assert [record["token"]] == [path.parent.name for path in sink.glob("_source/*/000000.*")]
    assert NUM_ROWS == local_job(texts(), sink, stage).run().rows_out


def test_a_table_in_one_piece_is_cut_into_files_and_row_groups(stage, sink, monkeypatch):
    monkeypatch.setattr(staging, "_BATCH_ROWS", 5)
    monkeypatch.setattr(staging, "_ROW_GROUP_ROWS", 8)
    monkeypatch.setattr(staging, "_FILE_BYTES", 20 * texts().nbytes // NUM_ROWS)
    local_job(texts().combine_chunks(), sink, stage).preview(1)
    files = [pq.ParquetFile(path) for path in sorted(sink.glob("_source/*/*.parquet"))]
    assert len(files) > 1
    assert all(file.metadata.row_group(0).num_rows <= 8 for file in files)
    assert texts() == pa.concat_tables(file.read() for file in files)


def test_of_two_drivers_the_first_decides(stage, sink, monkeypatch):
    def write_beside_another(dataset, store, token):
        made = write(dataset, store, token)
        monkeypatch.setattr(staging, "_write", write)
        local_job(texts(20), sink, stage).preview(1)
        return made

    write = staging._write
    monkeypatch.setattr(staging, "_write", write_beside_another)
    assert 20 == local_job(texts(), sink, stage).run().rows_out


@pytest.mark.parametrize("order", ["plan", "input"])
def test_overwrite_answers_again_in_either_order(stage, sink, order):
    local_job(texts(), sink, stage, output_order="input").run()
    local_job(texts(20), sink, stage, output_order=order, overwrite=True).run()
    assert 20 == len(answered(sink))


def test_a_job_that_is_refused_overwrites_nothing(stage, sink, model):
    local_job(texts(), sink, stage).run()
    before = answered(sink)
    with pytest.raises(ConfigError, match="nope"):
        local_job(texts(), sink, fake_stage(model, prompt="{nope}"), overwrite=True).run()
    assert before == answered(sink)


def test_files_that_are_gone_are_no_rows_less(stage, sink):
    local_job(texts(), sink, stage).preview(1)
    next(sink.glob("_source/*/000000.parquet")).unlink()
    with pytest.raises(ConfigError, match="has lost files"):
        local_job(texts(), sink, stage).run()


def test_equal_rows_in_other_chunks_and_with_other_metadata_are_the_same(stage, sink):
    num_rows = 2 * staging._BATCH_ROWS + 7
    table = texts(num_rows)
    local_job(table, sink, stage).preview(1)
    parts = pa.concat_tables([table.slice(0, 1500), table.slice(1500)])
    again = parts.replace_schema_metadata({"pandas": "another version"})
    assert num_rows == local_job(again, sink, stage).run().rows_out


def test_a_table_without_rows_is_refused(stage, sink):
    with pytest.raises(ConfigError, match="no rows"):
        local_job(texts(0), sink, stage).run()
    assert 20 == local_job(texts(20), sink, stage).run().rows_out


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ([{"text": "a"}], r"builtins\.list"),
        (None, "NoneType"),
        (7, r"builtins\.int"),
        (b"in/", r"builtins\.bytes"),
    ],
)
def test_what_is_no_dataset_is_refused(stage, sink, source, match):
    with pytest.raises(ConfigError, match=f"path, a dataset of Ray Data.*{match}"):
        Job(source, sink, stage)


def test_a_dict_of_splits_is_refused_by_the_name_of_one(stage, sink):
    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"test": datasets.Dataset(texts())})
    with pytest.raises(ConfigError, match=r"source\['test'\]"):
        Job(splits, sink, stage)


def test_columns_that_parquet_cannot_hold_are_named(stage, sink):
    table = texts(2).append_column("odd", pa.array([{}, {}], pa.struct([])))
    with pytest.raises(ConfigError, match="odd"):
        local_job(table, sink, stage).run()


@pytest.mark.ray
def test_a_dataset_of_ray_without_rows_is_refused(stage, sink):
    import ray

    with pytest.raises(ConfigError, match="no rows"):
        local_job(ray.data.from_items([{"id": 1, "text": "a"}]).limit(0), sink, stage).run()


@pytest.mark.ray
def test_blocks_of_ray_with_nulls_alone_get_the_type_of_the_others(stage, sink):
    import ray

    one, other = (
        pd.DataFrame({"id": ["1"], "text": ["a"], "x": [None]}),
        pd.DataFrame({"id": ["2"], "text": ["b"], "x": ["y"]}),
    )
    dataset = ray.data.from_pandas([one, other])
    local_job(dataset, sink, stage).run()
    assert {"a": None, "b": "y"} == {
        row["text"]: row["x"] for row in pq.read_table(sink).to_pylist()
    }


def test_errors_are_retried_from_the_output(stage, sink, tmp_path):
    table = texts().set_column(1, "text", pa.array([None] + [f"t{i}" for i in range(1, NUM_ROWS)]))
    job = local_job(table, sink, stage)
    assert 1 == job.run().rows_failed
    assert 1 == job.retry_errors(tmp_path / "again").rows_out


@pytest.mark.ray
def test_what_parquet_cannot_hold_in_a_block_of_ray_is_an_error_of_the_job(stage, sink):
    import ray

    odd = texts(2).append_column("odd", pa.array([{}, {}], pa.struct([])))
    with pytest.raises(ConfigError, match="odd") as raised:
        local_job(ray.data.from_arrow(odd), sink, stage).run()
    assert type(raised.value) is ConfigError


@pytest.mark.ray
def test_an_object_of_ray_that_is_no_dataset_is_refused(stage, sink):
    import ray

    with pytest.raises(ConfigError, match="source must be a path"):
        Job(ray.put(1), sink, stage)
