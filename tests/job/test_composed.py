"""Pipelines of the user's own between exactly-once reading and writing."""

import time

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
from ray.data.checkpoint import CheckpointConfig

import raybatch
from raybatch.durable.run_log import live_runs
from raybatch.durable.sink import prepare_sink
from raybatch.durable.storage import open_store
from raybatch.errors import CommitError, ConfigError
from tests.outputs.support import contents
from tests.stages.support import fake_stage, write_ipc, write_parquet

NUM_ROWS = 70

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def source(tmp_path):
    table = pa.table({"number": range(NUM_ROWS), "text": [f"text {i}" for i in range(NUM_ROWS)]})
    for start in (0, 30):
        write_parquet(tmp_path / "in" / f"{start}.parquet", table.slice(start, 40 if start else 30))
    return tmp_path / "in"


def shout(batch: pa.Table) -> pa.Table:
    texts = [text.upper() for text in batch.column("text").to_pylist()]
    return batch.set_column(batch.column_names.index("text"), "text", pa.array(texts))


def fail_late(batch: pa.Table) -> pa.Table:
    if max(batch.column("number").to_pylist()) > 50:
        raise ValueError("a bug of the user")
    return shout(batch)


def drop_one(batch: pa.Table) -> pa.Table:
    return batch.filter(pc.field("number") != 3)


def read(source, sink, **options):
    return raybatch.read_parquet(source, sink=sink, unit_rows=10, **options)


def mapped(rows, function=shout):
    return rows.map_batches(function, batch_format="pyarrow", batch_size=7)


def test_rows_come_out_once_whatever_the_blocks_between(source, tmp_path):
    sink = tmp_path / "out"
    rows = mapped(read(source, sink)).random_shuffle(seed=1).repartition(5)
    found = raybatch.write_parquet(rows, sink)
    assert (found.expected_rows, found.written_rows, found.is_clean) == (NUM_ROWS, NUM_ROWS, True)
    table = pq.read_table(sink)
    assert sorted(table.column("number").to_pylist()) == list(range(NUM_ROWS))
    assert table.column_names == ["row_id", "number", "text"]
    assert table.column("text").to_pylist() == [f"TEXT {i}" for i in table["number"].to_pylist()]


def test_second_run_reads_only_rows_of_units_that_are_missing(source, tmp_path):
    sink = tmp_path / "out"
    with pytest.raises(ValueError, match="a bug of the user"):
        raybatch.write_parquet(mapped(read(source, sink), fail_late), sink)
    written = {path.name: path.read_bytes() for path in sink.glob("data/*")}
    left = read(source, sink)
    done = sum(pq.read_metadata(path).num_rows for path in sink.glob("data/*"))
    assert left.count() == NUM_ROWS - done
    assert raybatch.write_parquet(mapped(left), sink).is_clean
    after = {path.name: path.read_bytes() for path in sink.glob("data/*")}
    assert {name: after[name] for name in written} == written
    assert read(source, sink).count() == 0


def test_a_stage_between_keeps_ids_and_places(source, tmp_path, model):
    sink = tmp_path / "out"
    stage = fake_stage(model, prompt="{text}")
    assert raybatch.write_parquet(stage.apply(read(source, sink)), sink).is_clean
    table = pq.read_table(sink)
    ids = {f"{'0' if i < 30 else '30'}.parquet:{i if i < 30 else i - 30}" for i in range(NUM_ROWS)}
    assert set(table.column("row_id").to_pylist()) == ids
    assert table.column("generated_text").null_count == 0


def test_rows_that_a_stage_failed_are_counted_as_such(tmp_path, model):
    write_parquet(tmp_path / "in" / "a.parquet", pa.table({"text": ["one", None, "three"]}))
    sink = tmp_path / "out"
    stage = fake_stage(model, prompt="{text}")
    raybatch.write_parquet(stage.apply(read(tmp_path / "in", sink)), sink)
    found = raybatch.verify(sink, deep=True)
    assert found.is_complete
    assert found.statuses == {"truncated": 2, "invalid": 1}


def test_a_sink_that_nothing_was_read_for_is_told(source, tmp_path):
    with pytest.raises(ConfigError, match=r"start the pipeline with raybatch\.read_parquet"):
        raybatch.write_parquet(read(source, tmp_path / "out"), tmp_path / "other")


def test_dropped_rows_are_told(source, tmp_path):
    sink = tmp_path / "out"
    rows = mapped(read(source, sink), drop_one)
    with pytest.raises(CommitError, match=r"lost 10.*instead of dropping them"):
        raybatch.write_parquet(rows, sink)
    assert not (sink / "_SUCCESS").exists()


def test_lost_places_are_told(source, tmp_path):
    sink = tmp_path / "out"
    rows = read(source, sink).drop_columns(["__rb_pos"])
    with pytest.raises(ConfigError, match="lack __rb_pos"):
        raybatch.write_parquet(rows, sink)


def test_views_of_text_are_read_and_written(tmp_path):
    table = pa.table({"text": pa.array([f"text {i}" for i in range(NUM_ROWS)], pa.string_view())})
    (tmp_path / "in").mkdir()
    write_ipc(tmp_path / "in" / "a.arrow", table)
    sink = tmp_path / "out"
    assert raybatch.write_parquet(read(tmp_path / "in", sink), sink).is_clean
    texts = pq.read_table(sink).column("text").to_pylist()
    assert sorted(texts) == sorted(table.column("text").to_pylist())


def write_empty_source(folder):
    write_parquet(folder / "a.parquet", pa.table({"text": pa.array([], pa.string())}))
    return folder


@pytest.mark.parametrize("function", [None, shout], ids=["plain", "mapped"])
def test_a_source_without_rows_is_an_output_with_its_columns(tmp_path, function):
    sink = tmp_path / "out"
    rows = read(write_empty_source(tmp_path / "in"), sink)
    rows = rows if function is None else mapped(rows, function)
    assert raybatch.write_parquet(rows, sink).is_clean
    assert pq.read_table(sink).schema.names == ["row_id", "text"]
    assert raybatch.verify(sink).is_complete


def test_a_source_without_rows_is_an_output_with_the_columns_that_are_given(tmp_path):
    sink = tmp_path / "out"
    schema = pa.schema([("answer", pa.int32())])
    rows = read(write_empty_source(tmp_path / "in"), sink)
    assert raybatch.write_parquet(rows, sink, schema=schema).is_clean
    assert pq.read_table(sink).schema.equals(schema)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (pa.field("number", pa.int32()), "column 0 .*'number: int32'.*'row_id: string'"),
        (pa.field("row_id", pa.string()), "column 1 .*none.*'number: int64'"),
    ],
)
def test_another_schema_than_that_of_the_output_is_refused(source, tmp_path, field, message):
    sink = tmp_path / "out"
    with pytest.raises(CommitError):
        raybatch.write_parquet(mapped(read(source, sink), drop_one), sink)
    before = contents(sink)
    rows = mapped(read(source, sink))
    with pytest.raises(ConfigError, match=f"schema: {message}"):
        raybatch.write_parquet(rows, sink, schema=pa.schema([field]))
    assert before == contents(sink)


def test_a_schema_that_was_given_holds_for_who_gives_none(source, tmp_path):
    sink = tmp_path / "out"
    schema = pa.schema([("number", pa.int64()), ("text", pa.large_string())])
    rows = mapped(read(source, sink), fail_late)
    with pytest.raises(ValueError, match="a bug of the user"):
        raybatch.write_parquet(rows, sink, schema=schema)
    assert raybatch.write_parquet(mapped(read(source, sink)), sink).is_clean
    assert {str(schema)} == {str(pq.read_schema(path)) for path in sink.glob("data/*")}


def test_overwrite_is_refused_while_a_pipeline_writes(source, tmp_path):
    sink = tmp_path / "out"

    def overwrite(batch):
        with pytest.raises(ConfigError, match="is in use: run"):
            prepare_sink(str(sink), is_overwrite=True)
        return batch

    assert raybatch.write_parquet(mapped(read(source, sink), overwrite), sink).is_clean
    assert live_runs(open_store(str(sink)), time.time()) == []


def test_a_complete_pipeline_leaves_no_journal(source, tmp_path):
    sink = tmp_path / "out"
    rows = mapped(read(source, sink)).random_shuffle(seed=1).repartition(5)
    raybatch.write_parquet(rows, sink)
    assert not list(sink.glob("_raybatch/frag/*/*"))


def test_a_part_that_cannot_be_read_is_not_told_as_rows_that_do_not_fit(source, tmp_path):
    sink = tmp_path / "out"
    rows = read(source, sink)
    (sink / "data" / "part-000003.parquet").mkdir(parents=True)
    with pytest.raises(CommitError, match=r"part-000003\.parquet is a folder"):
        raybatch.write_parquet(rows, sink)


def test_rows_of_other_types_are_told(source, tmp_path):
    sink = tmp_path / "out"
    schema = pa.schema([("number", pa.int64()), ("answer", pa.string())])
    with pytest.raises(ConfigError, match="the rows do not fit the columns of the output"):
        raybatch.write_parquet(read(source, sink), sink, schema=schema)


def test_another_version_is_refused(source, tmp_path):
    sink = tmp_path / "out"
    raybatch.write_parquet(read(source, sink, version="1"), sink)
    with pytest.raises(ConfigError, match=r"version is \"2\" and was \"1\"(?!.*extend)"):
        read(source, sink, version="2")


def test_an_output_without_answers_holds_nobody_to_its_version(source, tmp_path, caplog):
    sink = tmp_path / "out"
    before = read(source, sink, version="1")
    rows = mapped(read(source, sink, version="2"))
    assert "of another job" in caplog.text
    with pytest.raises(ConfigError, match=r"overwritten.*after these rows were read"):
        raybatch.write_parquet(before, sink)
    assert raybatch.write_parquet(rows, sink).is_clean


@pytest.fixture
def ray_checkpoint(tmp_path):
    """Ray Data's own checkpoint, switched on as a user does for datasets of his own."""
    context = ray.data.DataContext.get_current()
    config = CheckpointConfig(id_column="number", checkpoint_path=str(tmp_path / "checkpoint"))
    context.checkpoint_config = config
    yield config
    context.checkpoint_config = None


def test_rows_come_out_once_where_ray_keeps_a_checkpoint_of_its_own(
    source, tmp_path, ray_checkpoint
):
    sink = tmp_path / "out"
    with pytest.raises(ValueError, match="a bug of the user"):
        raybatch.write_parquet(mapped(read(source, sink), fail_late), sink)
    raybatch.write_parquet(mapped(read(source, sink)), sink)
    numbers = pq.read_table(sink, columns=["number"])["number"].to_pylist()
    assert sorted(numbers) == list(range(NUM_ROWS))
    assert ray.data.DataContext.get_current().checkpoint_config is ray_checkpoint
