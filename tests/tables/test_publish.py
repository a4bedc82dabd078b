"""Rows of outputs in tables: all of them, once, also after a process was killed."""

import json

import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from typer.testing import CliRunner

import raybatch
from raybatch.cli.app import app
from raybatch.errors import ConfigError
from raybatch.planning.store import read_plans
from raybatch_tables import publish
from raybatch_tables.address import Address
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
    assert (found.problems, found.notes) == ((), (f"{address} has every row once",))


def test_a_table_has_all_rows_and_values_and_is_not_added_to_again(output, table, read):
    first = publish(str(output), table)
    assert (first.is_new, first.num_rows) == (True, NUM_ROWS)
    check_whole(table, output, read)
    again = publish(str(output), table)
    assert (again.is_new, again.versions) == (False, first.versions)
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
    assert publish(str(others), table).is_new
    assert read(table).num_rows == 2 * NUM_ROWS
    for one in (output, others):
        assert not raybatch.verify(one, deep=True).problems


def test_another_run_of_the_same_job_adds_nothing(model, source, output, tmp_path, table, read):
    publish(str(output), table)
    again, copy = tmp_path / "again", tmp_path / "copy"
    make_job(model, source, again).run(progress=lambda *_: None)
    CliRunner().invoke(app, ["compact", str(output), str(copy)])
    for one in (again, copy):
        assert not publish(str(one), table).is_new
    assert read(table).num_rows == NUM_ROWS


def test_only_rows_that_came_later_are_added_later(model, source, output, tmp_path, table, read):
    publish(str(output), table)
    write_source(tmp_path / "more", source_table(20, first=NUM_ROWS), num_files=1)
    (tmp_path / "more" / "in" / "0000.parquet").rename(source / "later.parquet")
    make_job(model, source, output, extend=True).run(progress=lambda *_: None)
    assert publish(str(output), table).num_rows == NUM_ROWS + 20
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
    narrow = make_job(model, source, tmp_path / "narrow", columns=["text"], publish=table)
    with pytest.raises(ConfigError, match="has lang, count, tags, about as well"):
        narrow.run(progress=lambda *_: None)
    assert not (tmp_path / "narrow" / "data").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("parquet:x", "is no table; write one as delta:"),
        ("delta:", "names no table; write it as delta:"),
        ("iceberg:local.answers", "names no table; write it as iceberg:catalog"),
        ("hub:answers", "names no table; write it as hub:"),
        ("delta:x?version=3", "names a version, but rows are added to the newest"),
    ],
)
def test_what_is_no_table_is_refused(output, address, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        publish(str(output), address)


def test_an_output_that_is_not_finished_is_refused(output, table):
    next((output / "data").glob("*.parquet")).unlink()
    (output / "_SUCCESS").unlink()
    with pytest.raises(ConfigError, match="is not finished; run the job again"):
        publish(str(output), table)


def test_a_catalog_that_is_not_configured_is_an_error_with_the_table(output):
    with pytest.raises(ConfigError, match=r"iceberg:nowhere\.ns\.t: "):
        publish(str(output), "iceberg:nowhere.ns.t")


def test_verify_tells_rows_that_a_table_lacks_or_has_twice(output, table, tmp_path, monkeypatch):
    publish(str(output), table)
    (record,) = (output / "_raybatch" / "published").iterdir()
    other = address_of(table.partition(":")[0], tmp_path, "other")
    record.write_text(json.dumps({**json.loads(record.read_text()), "table": other}))
    found = raybatch.verify(output, deep=True)
    assert f"{other}: {NUM_ROWS} rows of this output were not added" in found.problems[0]
    assert found.exit_code() == 1
    assert raybatch.verify(output).exit_code() == 0


def test_a_second_append_that_lance_let_pass_is_taken_back(output, tmp_path, read):
    import lance

    table = address_of("lance", tmp_path)
    publish(str(output), table)
    (plan,) = read_plans(str(output))
    rows = lance.dataset(str(tmp_path / "answers")).to_table()
    for added, key in ((rows, addition_id(plan)), (rows.slice(0, 5), "another")):
        lance.write_dataset(
            added,
            str(tmp_path / "answers"),
            mode="append",
            transaction_properties={"raybatch.addition": key},
        )
    assert "more than once" in raybatch.verify(output, deep=True).problems[0]
    target = Address.parse(table).table()
    assert [one.num_rows for one in target.commits(addition_id(plan))] == [NUM_ROWS, NUM_ROWS]
    assert not publish(str(output), table).is_new
    assert lance.dataset(str(tmp_path / "answers")).count_rows() == NUM_ROWS + 5
    assert not raybatch.verify(output, deep=True).problems


def test_numbers_that_a_table_cannot_hold_are_an_error(model, tmp_path):
    values = pa.array([0, 2**63], pa.uint64())
    source = write_source(tmp_path, pa.table({"text": ["a", "b"], "n": values}), num_files=1)
    make_job(model, source, tmp_path / "out").run(progress=lambda *_: None)
    with pytest.raises(ConfigError, match=r"delta:.*answers: "):
        publish(str(tmp_path / "out"), address_of("delta", tmp_path))
