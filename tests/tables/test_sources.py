"""Tables as sources: their rows, one version of them, read once."""

import datetime
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from pyiceberg.catalog import load_catalog
from typer.testing import CliRunner

from raybatch.cli.app import app
from raybatch.errors import ConfigError, MissingDependency
from raybatch.inputs import tables as door
from raybatch_tables.address import Address
from raybatch_tables.base import Addition
from tests.tables.support import KINDS, NUM_ROWS, address_of, make_job, source_table

pytestmark = pytest.mark.usefixtures("locally")

ROWS = source_table().drop_columns(["count", "tags"])  # types that all kinds have


def add(address: str, rows: pa.Table, name: str) -> str:
    """Add rows to a table, which is created if it is missing; return the version."""
    target = Address.parse(address).table()
    if target.schema() is None:
        target.create(rows.schema)
    reader = pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches())
    target.append(Addition(id=name, checksum="1", schema=rows.schema, rows=reader, about={}))
    (commit,) = target.commits(name)
    return commit.version


@pytest.fixture(params=KINDS)
def table(request, tmp_path):
    address = address_of(request.param, tmp_path, "questions")
    add(address, ROWS, "first")
    return address


def run(model, source, sink, **options):
    report = make_job(model, source, sink, **options).run(progress=lambda *_: None)
    assert report.exit_code() == 0
    return pads.dataset(sink / "data").to_table().sort_by("text")


def texts(rows: pa.Table) -> list[str]:
    return sorted(rows.column("text").to_pylist())


def test_rows_of_a_table_are_the_rows_of_a_job(model, table, tmp_path):
    out = run(model, table, tmp_path / "out")
    assert out.select(ROWS.column_names).to_pylist() == ROWS.sort_by("text").to_pylist()


def test_a_job_keeps_the_version_that_it_read(model, table, tmp_path):
    before = run(model, table, tmp_path / "out")
    add(table, ROWS.slice(0, 3), "second")
    assert run(model, table, tmp_path / "out").equals(before)
    assert run(model, table, tmp_path / "new").num_rows == NUM_ROWS + 3


def test_a_version_is_read_and_another_one_is_refused(model, table, tmp_path):
    version = Address.parse(table).table().open(None)[0]
    newer = add(table, ROWS.slice(0, 3), "second")
    assert run(model, f"{table}?version={version}", tmp_path / "out").num_rows == NUM_ROWS
    run(model, f"{table}?version={version}", tmp_path / "out")
    with pytest.raises(ConfigError, match="holds the rows of another dataset"):
        run(model, f"{table}?version={newer}", tmp_path / "out")


def test_a_renamed_column_has_its_new_name(model, tmp_path):
    table = address_of("iceberg", tmp_path, "questions")
    add(table, ROWS.rename_columns(["old", *ROWS.column_names[1:]]), "first")
    with load_catalog("local").load_table("ns.questions").update_schema() as update:
        update.rename_column("old", "text")
    assert texts(run(model, table, tmp_path / "out")) == texts(ROWS)


def test_a_table_cannot_be_extended(model, table, tmp_path):
    run(model, table, tmp_path / "out")
    with pytest.raises(ConfigError, match="a table is read once"):
        run(model, table, tmp_path / "out", extend=True)


def test_another_table_is_refused(model, table, tmp_path):
    run(model, table, tmp_path / "out")
    other = address_of(table.partition(":")[0], tmp_path, "others")
    add(other, ROWS, "first")
    with pytest.raises(ConfigError, match="holds the rows of another dataset"):
        run(model, other, tmp_path / "out")


def test_rows_that_were_deleted_are_not_read(model, table, tmp_path):
    kind, _, place = table.partition(":")
    delete_from(kind, place, "text = 'question 7'")
    expected = set(texts(ROWS)) - {"question 7"}
    assert texts(run(model, table, tmp_path / "out")) == sorted(expected)


def delete_from(kind: str, place: str, which: str) -> None:
    if kind == "delta":
        from deltalake import DeltaTable

        DeltaTable(place).delete(which)
    elif kind == "lance":
        import lance

        lance.dataset(place).delete(which)
    else:
        from pyiceberg.catalog import load_catalog

        load_catalog("local").load_table(place.removeprefix("local.")).delete(which)


def test_an_addition_is_known_when_its_version_has_expired(table):
    kind, _, place = table.partition(":")
    add(table, ROWS.slice(0, 3), "second")
    if kind == "lance":
        import lance

        lance.dataset(place).cleanup_old_versions(datetime.timedelta(0))
    elif kind == "delta":
        from deltalake import DeltaTable

        DeltaTable(place).create_checkpoint()
        for log in Path(place).glob("_delta_log/*.json"):
            log.unlink()
    else:
        from pyiceberg.catalog import load_catalog

        found = load_catalog("local").load_table(place.removeprefix("local."))
        first = found.metadata.snapshots[0].snapshot_id
        found.maintenance.expire_snapshots().by_id(first).commit()
    target = Address.parse(table).table()
    (commit,) = target.commits("first")
    assert commit.version is None
    reader = pa.RecordBatchReader.from_batches(ROWS.schema, ROWS.to_batches())
    target.append(Addition(id="first", checksum="1", schema=ROWS.schema, rows=reader, about={}))
    assert target.open(None)[1].read_all().num_rows == NUM_ROWS + 3


def test_a_table_that_is_not_there_is_an_error(model, table, tmp_path):
    missing = address_of(table.partition(":")[0], tmp_path, "missing")
    with pytest.raises(ConfigError, match="missing"):
        run(model, missing, tmp_path / "out")


def test_a_dataset_of_the_hub_is_no_source(model, tmp_path):
    with pytest.raises(ConfigError, match=r"write source: hf://datasets/org/name/data"):
        run(model, "hub:org/name", tmp_path / "out")


def test_commands_that_write_no_answers_need_a_folder_for_a_table(table, tmp_path):
    flags = ["--input", table, "--prompt", "{text}", "--no-measure"]
    result = CliRunner().invoke(app, ["explain", *flags])
    assert "set --output" in str(result.exception)
    result = CliRunner().invoke(app, ["explain", *flags, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.exception
    assert any(x.split()[:2] == ["rows", str(NUM_ROWS)] for x in result.stdout.splitlines())


def test_without_raybatch_tables_a_job_says_what_to_install(model, tmp_path, monkeypatch):
    monkeypatch.setattr(door, "table_library", lambda: None)
    expected = r"delta:x needs raybatch-tables, .*pip install -e './raybatch-tables\[all\]'"
    with pytest.raises(MissingDependency, match=expected):
        run(model, "delta:x", tmp_path / "out")


def test_without_its_library_a_table_says_which_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "raybatch_tables.lance", None)
    with pytest.raises(MissingDependency, match=r"raybatch-tables\[lance\]"):
        Address.parse(f"lance:{tmp_path}").table()
