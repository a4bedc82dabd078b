"""Rows of outputs in tables: all of them, once, also after a process was killed."""

import datetime
import json
import re
from functools import partial

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import IdentityTransform
from typer.testing import CliRunner

import raybatch
from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch.planning.store import read_plans
from raybatch_tables import delta, iceberg, publish
from raybatch_tables.address import Address
from raybatch_tables.base import Addition
from raybatch_tables.columns import sql_type
from raybatch_tables.output import addition_id
from tests.tables.support import (
    KINDS,
    NUM_ROWS,
    address_of,
    end_of,
    is_killed_at,
    make_job,
    publish_in_a_process,
    source_table,
    write_source,
)

pytestmark = pytest.mark.usefixtures("locally")


@pytest.fixture(params=KINDS)
def table(request, tmp_path):
    """The address of a table that does not exist yet."""
    return address_of(request.param, tmp_path)


def rows_of(output) -> list[dict]:
    found = pads.dataset(output / "data", partitioning=None).to_table()
    return found.sort_by("row_id").to_pylist()


def check_whole(address, output, read):
    assert read(address).to_pylist() == rows_of(output)
    found = raybatch.verify(output, deep=True)
    assert (found.problems, found.notes) == ((), (f"the rows were added to {address} once",))


def test_a_table_has_all_rows_and_values_and_is_not_added_to_again(output, table, read):
    first = publish(str(output), table)
    assert (first.num_added, first.num_rows) == (NUM_ROWS, NUM_ROWS)
    check_whole(table, output, read)
    again = publish(str(output), table)
    assert (again.num_added, again.versions) == (0, first.versions)
    assert "nothing was added" in str(again)
    check_whole(table, output, read)


def test_a_job_adds_its_rows_once(model, source, tmp_path, table, read):
    job = make_job(model, source, tmp_path / "out", publish=table)
    for _ in range(2):
        assert job.run(progress=lambda *_: None).exit_code() == 0
        check_whole(table, tmp_path / "out", read)


def test_a_command_adds_rows(output, table, read):
    result = CliRunner().invoke(app, ["publish", str(output), table])
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith(f"added {NUM_ROWS} rows to {table} (version ")
    check_whole(table, output, read)


@pytest.mark.parametrize("point", ["before_table", "in_table", "after_table"])
def test_a_publication_that_was_killed_is_completed(output, table, read, point):
    is_killed_at(point, output, table)
    publish(str(output), table)
    check_whole(table, output, read)


def test_publications_at_once_add_rows_once(output, table, read):
    running = [publish_in_a_process(output, table) for _ in range(3)]
    texts = [end_of(process) for process in running]
    assert any(text.startswith("added") for text in texts)
    check_whole(table, output, read)


def test_rows_are_added_beside_those_of_another_job(model, source, output, tmp_path, table, read):
    publish(str(output), table)
    others = tmp_path / "others"
    make_job(model, source, others, "Why {text}?").run(progress=lambda *_: None)
    assert publish(str(others), table).num_added == NUM_ROWS
    assert read(table).num_rows == 2 * NUM_ROWS
    for one in (output, others):
        assert not raybatch.verify(one, deep=True).problems


def test_another_run_of_the_same_job_adds_nothing(model, source, output, tmp_path, table, read):
    publish(str(output), table)
    again, copy = tmp_path / "again", tmp_path / "copy"
    make_job(model, source, again).run(progress=lambda *_: None)
    CliRunner().invoke(app, ["compact", str(output), str(copy)])
    for one in (again, copy):
        assert not publish(str(one), table).num_added
    assert read(table).num_rows == NUM_ROWS


def test_only_rows_that_came_later_are_added_later(model, source, output, tmp_path, table, read):
    publish(str(output), table)
    write_source(tmp_path / "more", source_table(20, first=NUM_ROWS), num_files=1)
    (tmp_path / "more" / "in" / "0000.parquet").rename(source / "later.parquet")
    make_job(model, source, output, extend=True).run(progress=lambda *_: None)
    found = raybatch.verify(output, deep=True)
    assert "20 rows of this output were not added" in found.problems[0]
    assert publish(str(output), table).num_added == 20
    check_whole(table, output, read)


def test_columns_that_are_folders_are_columns_of_the_table(model, source, tmp_path, table, read):
    sink = tmp_path / "out"
    job = make_job(model, source, sink, partition_by=["lang"], publish=table)
    assert job.run(progress=lambda *_: None).exit_code() == 0
    rows = {row["text"]: row["lang"] for row in read(table).to_pylist()}
    expected = source_table()
    assert rows == dict(
        zip(expected["text"].to_pylist(), expected["lang"].to_pylist(), strict=True)
    )


def test_a_table_with_other_columns_is_refused_before_a_row_runs(
    model, source, output, tmp_path, table
):
    publish(str(output), table)
    wide = source_table().append_column("more", pa.array(range(NUM_ROWS)))
    source = write_source(tmp_path / "wide", wide)
    job = make_job(model, source, tmp_path / "other", publish=table)
    with pytest.raises(ConfigError, match=r"do not fit .*it lacks the columns more"):
        job.run(progress=lambda *_: None)
    assert not (tmp_path / "other" / "data").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("parquet:x", "is no table; write one as delta:"),
        ("delta:", "names no table; write it as delta:"),
        ("iceberg:local.answers", "names no table; write it as iceberg:catalog"),
        ("hub:answers", "names no table; write it as hub:"),
        ("delta:x?vers=3", "'?vers=3' is no version; write ?version=3"),
        ("delta:x?version=3", "names a version, but rows are added to the newest"),
    ],
)
def test_what_is_no_table_is_refused(output, address, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        publish(str(output), address)


def test_an_output_that_is_not_finished_is_refused(output, table):
    next((output / "data").glob("*.parquet")).unlink()
    (output / "_SUCCESS").unlink()
    with pytest.raises(ConfigError, match="is not finished; run the job again"):
        publish(str(output), table)


def test_a_catalog_that_is_not_configured_is_an_error_with_the_table(output):
    with pytest.raises(ConfigError, match=r"iceberg:nowhere\.ns\.t: "):
        publish(str(output), "iceberg:nowhere.ns.t")


def test_verify_tells_rows_that_a_table_lacks(output, table, tmp_path):
    publish(str(output), table)
    (record,) = (output / "_raybatch" / "published").iterdir()
    other = address_of(table.partition(":")[0], tmp_path, "other")
    record.write_text(json.dumps({**json.loads(record.read_text()), "table": other}))
    found = raybatch.verify(output, deep=True)
    assert f"{other}: {NUM_ROWS} rows of this output were not added" in found.problems[0]
    assert found.exit_code() == 1
    assert raybatch.verify(output).exit_code() == 0


def test_a_second_append_that_lance_let_pass_is_taken_back(output, tmp_path):
    import lance

    place, table = tmp_path / "answers", address_of("lance", tmp_path)
    publish(str(output), table)
    (plan,) = read_plans(str(output))
    rows = lance.dataset(str(place)).to_table()
    for added, key in ((rows, addition_id(plan)), (rows.slice(0, 5), "another")):
        properties = {"raybatch.addition": key}
        lance.write_dataset(added, place, mode="append", transaction_properties=properties)
    assert "more than once" in raybatch.verify(output, deep=True).problems[0]
    target = Address.parse(table).table()
    assert [one.num_rows for one in target.commits(addition_id(plan))] == [NUM_ROWS, NUM_ROWS]
    assert not publish(str(output), table).num_added
    assert lance.dataset(str(place)).count_rows() == NUM_ROWS + 5
    assert not raybatch.verify(output, deep=True).problems


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_commit_to_an_older_version_fails_if_a_newer_one_has_its_rows(tmp_path, kind):
    address, rows = address_of(kind, tmp_path), source_table().select(["text"])

    def addition(name):
        reader = pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches())
        return Addition(id=name, checksum="1", schema=rows.schema, rows=reader, about={})

    target = Address.parse(address).table()
    target.create(rows.schema)
    if kind == "delta":
        append, error = delta.append_to, CommitFailedError
        load = partial(DeltaTable, str(tmp_path / "answers"))
    else:
        append, error = iceberg.append_to, RuntimeError
        load = partial(load_catalog("local").load_table, "ns.answers")
    older, newer = load(), load()
    append(newer, addition("a"))
    append(load(), addition("b"))
    with pytest.raises(error):
        append(older, addition("a"))
    assert len(target.commits("a")) == 1
    assert target.open(None)[1].read_all().num_rows == 2 * NUM_ROWS


def test_rows_that_have_changed_since_are_an_error(model, source, output, table, read):
    publish(str(output), table)
    make_job(model, source, output, overwrite=True).run(progress=lambda *_: None)
    assert not publish(str(output), table).num_added
    (record,) = (output / "_raybatch" / "published").iterdir()
    record.unlink()  # it has the checksum of the rows
    change_a_text(output / "data" / "part-000000.parquet")
    with pytest.raises(ConfigError, match="has other rows of this job"):
        publish(str(output), table)
    assert read(table).num_rows == NUM_ROWS


def change_a_text(part) -> None:
    """Give a row another answer, under the footer that the part has."""
    file = pq.ParquetFile(part)
    rows, place = file.read(), file.schema_arrow.get_field_index("generated_text")
    texts = rows.column(place).to_pylist()
    rows = rows.set_column(place, rows.field(place), pa.array([f"{texts[0]}!", *texts[1:]]))
    with pq.ParquetWriter(part, rows.schema) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"raybatch": file.metadata.metadata[b"raybatch"]})


def test_an_output_that_has_lost_a_part_is_refused(output, table):
    next((output / "data").glob("*.parquet")).unlink()
    with pytest.raises(ConfigError, match=r"has \d+ of 60 rows of a plan"):
        publish(str(output), table)
    assert Address.parse(table).table().open(None)[1].read_all().num_rows == 0


def test_rows_get_the_types_and_the_order_of_the_columns_of_a_table(output, table, read):
    new = pads.dataset(output / "data").schema
    wide = {"num_input_tokens": pa.int64(), "text": pa.large_string(), "count": pa.int64()}
    fields = [pa.field(f.name, wide.get(f.name, sql_type(f.type))) for f in new][::-1]
    Address.parse(table).table().create(pa.schema([*fields, pa.field("more", pa.string())]))
    publish(str(output), table)
    found = read(table)
    assert found.column("more").null_count == NUM_ROWS
    assert [{**row, "more": None} for row in rows_of(output)] == found.to_pylist()


@pytest.mark.parametrize("wrong", [pa.string(), pa.float64(), pa.list_(pa.int32())], ids=str)
def test_a_table_whose_types_do_not_hold_the_values_is_refused_before_a_row_runs(
    model, source, output, tmp_path, table, wrong
):
    new = pads.dataset(output / "data").schema
    kinds = {"num_input_tokens": wrong}
    fields = [pa.field(f.name, kinds.get(f.name, sql_type(f.type))) for f in new]
    Address.parse(table).table().create(pa.schema(fields))
    job = make_job(model, source, tmp_path / "other", publish=table)
    with pytest.raises(ConfigError, match=r"it has other types of num_input_tokens \(int32, and"):
        job.run(progress=lambda *_: None)
    assert not (tmp_path / "other" / "data").exists()


def test_rows_go_into_the_partitions_of_an_iceberg_table(output, tmp_path, read):
    table = address_of("iceberg", tmp_path)
    schema = pads.dataset(output / "data").schema
    Address.parse(table).table().create(pa.schema([f.with_type(sql_type(f.type)) for f in schema]))
    with load_catalog("local").load_table("ns.answers").update_spec() as update:
        update.add_field("lang", IdentityTransform(), "lang")
    publish(str(output), table)
    check_whole(table, output, read)
    folders = {path.parent.name for path in (tmp_path / "warehouse").rglob("*.parquet")}
    assert folders == {"lang=en", "lang=de", "lang=null"}


def test_a_relative_address_is_that_of_every_folder(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(str(output), "delta:answers")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert not raybatch.verify(output, deep=True).problems
    assert not publish(str(output), f"delta:{tmp_path}/answers").num_added


def test_rows_of_a_retry_are_added_with_a_warning(model, source, tmp_path, table, read, caplog):
    job = make_job(model, source, tmp_path / "out", "{text}{lang}", publish=table)
    assert job.run(progress=lambda *_: None).exit_code() == 2  # prompts of some rows are null
    job.retry_errors(tmp_path / "again", statuses=["invalid"], progress=lambda *_: None)
    assert read(table).num_rows == NUM_ROWS
    assert "the rows of a retry" not in caplog.text
    assert publish(str(tmp_path / "again"), table).num_added == NUM_ROWS // 3
    assert "has the rows of a retry" in caplog.text


@pytest.mark.parametrize("place", ["out", "out/table", "in", "."])
def test_a_table_inside_a_folder_of_the_job_or_around_it_is_refused(model, source, tmp_path, place):
    job = make_job(model, source, tmp_path / "out", publish=f"lance:{tmp_path}/{place}")
    with pytest.raises(ConfigError, match="are one inside the other"):
        job.run(progress=lambda *_: None)
    assert sorted(path.name for path in source.iterdir()) == [f"00{i}0.parquet" for i in (0, 2, 4)]


def test_a_job_whose_rows_could_not_be_added_says_what_to_do(model, source, tmp_path, monkeypatch):
    monkeypatch.setattr(delta, "append_to", lambda *_: 1 / 0)
    job = make_job(model, source, tmp_path / "out", publish=address_of("delta", tmp_path))
    with pytest.raises(
        ConfigError, match=r"is complete; to try again, run `raybatch publish \S+ d"
    ):
        job.run(progress=lambda *_: None)
    assert raybatch.verify(tmp_path / "out").is_complete


def test_rows_are_written_again_where_other_writers_were_faster(
    output, tmp_path, monkeypatch, read
):
    append, calls = delta.append_to, []

    def append_at_last(*args):
        calls.append(args)
        if len(calls) < 3:
            args[1].rows.read_all()
            raise CommitFailedError("others were faster")
        append(*args)

    monkeypatch.setattr(delta, "append_to", append_at_last)
    assert publish(str(output), address_of("delta", tmp_path)).num_added == NUM_ROWS
    check_whole(address_of("delta", tmp_path), output, read)


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_times_are_those_of_tables_of_sql(model, tmp_path, read, kind):
    us = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    rows = pa.table(
        {
            "text": ["a", "b"],
            "ns": pa.array([us, None], pa.timestamp("ns")),
            "zone": pa.array([us, None], pa.timestamp("us", "Europe/Berlin")),
        }
    )
    source = write_source(tmp_path, rows, num_files=1)
    table = address_of(kind, tmp_path)
    make_job(model, source, tmp_path / "out", publish=table).run(progress=lambda *_: None)
    found = read(table).select(["ns", "zone"]).to_pylist()
    assert found[0] == {"ns": us, "zone": us.replace(tzinfo=datetime.UTC)}


def test_an_address_with_a_secret_is_refused(output):
    with pytest.raises(ConfigError, match=r"has a secret; set it in the environment"):
        publish(str(output), "delta:s3://key:password@bucket/table")
    with pytest.raises(ConfigError) as error:
        publish(str(output), "delta:x?password=hunter22")
    assert "hunter22" not in str(error.value)


def test_numbers_that_a_table_cannot_hold_are_an_error(model, tmp_path):
    values = pa.array([0, 2**63], pa.uint64())
    source = write_source(tmp_path, pa.table({"text": ["a", "b"], "n": values}), num_files=1)
    make_job(model, source, tmp_path / "out").run(progress=lambda *_: None)
    with pytest.raises(ConfigError, match=r"delta:.*answers: "):
        publish(str(tmp_path / "out"), address_of("delta", tmp_path))
