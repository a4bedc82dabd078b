"""A catalog of Iceberg on disk, and a finished output."""

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

from raybatch_tables.address import Address
from tests.tables.support import make_job, source_table, write_source


@pytest.fixture(autouse=True)
def catalog(tmp_path, monkeypatch):
    """The catalog `local` of pyiceberg, configured by its variables."""
    (tmp_path / "warehouse").mkdir()
    for name, value in {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalog.db",
        "WAREHOUSE": f"file://{tmp_path}/warehouse",
    }.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LOCAL__{name}", value)
    # pyiceberg reads them when it is imported
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    load_catalog("local")  # two processes that create a catalog at once fail


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path, source_table())


@pytest.fixture
def output(model, source, tmp_path):
    """A finished output of several units."""
    sink = tmp_path / "out"
    assert make_job(model, source, sink).run(progress=lambda *_: None).exit_code() == 0
    return sink


@pytest.fixture
def read():
    """Return a function that reads a table by its address, sorted by row id."""

    def read_table(address: str) -> pa.Table:
        parsed = Address.parse(address)
        _, rows = parsed.table().open(parsed.version)
        return rows.read_all().sort_by("row_id")

    return read_table
