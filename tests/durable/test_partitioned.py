"""A unit in many files is complete when its record is there, and not before."""

import uuid
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from raybatch.durable.audit import audit, finish
from raybatch.durable.commit import commit_unit, committed, partition_folder, receipt_of
from raybatch.durable.storage import open_store
from raybatch.durable.units import UnitCounts
from raybatch.errors import CommitError
from tests.durable.support import make_plan

UNITS = [[4, 0, 2], [1, 3]]
PLAN = make_plan(UNITS, is_partitioned=True)
LANGS = ["en", "de", "en", None, "de/.."]


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def table_of(rows, answer="x"):
    columns = {"id": [f"r{row}" for row in rows], "lang": [LANGS[row] for row in rows]}
    return pa.table({**columns, "text": [answer] * len(rows)})


def commit(store, number=0, *, answer="x", **changes):
    rows = UNITS[number]
    options = {
        "by": ["lang"],
        "pos": np.arange(len(rows)),
        "row": np.array(rows, np.int64),
        "count": lambda table: UnitCounts(
            num_rows=table.num_rows, statuses={table["text"][0].as_py(): table.num_rows}
        ),
        "plan_hash": PLAN.hash,
        "attempt": answer,
    }
    table = table_of(rows, answer)
    return commit_unit(store, PLAN.unit(number), **{"table": table, **options, **changes})


def test_rows_lie_in_the_folder_of_their_value(store):
    commit(store, 0)
    assert [
        "data/lang=de%2F../part-000000.parquet",
        "data/lang=en/part-000000.parquet",
    ] == store.names("data")
    part = pq.read_table(pa.BufferReader(store.read("data/lang=en/part-000000.parquet")))
    assert {"id": ["r0", "r2"], "text": ["x", "x"]} == part.to_pydict()


def test_an_output_is_read_back_as_a_hive_dataset(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(2):
        commit(store, number)
    table = pyarrow.dataset.dataset(str(tmp_path / "data"), partitioning="hive").to_table()
    found = dict(zip(table["id"].to_pylist(), table["lang"].to_pylist(), strict=True))
    assert {f"r{row}": lang for row, lang in enumerate(LANGS)} == found


def test_a_unit_is_committed_by_its_record(store):
    commit(store, 1)
    assert [False, True] == committed(store, PLAN).tolist()
    store.remove("_raybatch/done/000001.json")
    assert [False, False] == committed(store, PLAN).tolist()


@pytest.mark.parametrize(
    "name", ["data/notes.txt", "data/part-000000.parquet", "data/lang=en/part-000009.parquet"]
)
def test_a_file_of_no_unit_is_refused_where_units_are_listed(store, name):
    commit(store, 0)
    store.create(name, b"")
    with pytest.raises(CommitError, match=f"{name} is not a part of plan"):
        committed(store, PLAN)


@pytest.mark.parametrize(
    "name", ["data/notes.txt", "data/part-000000.parquet", "data/lang=en/part-000009.parquet"]
)
def test_a_file_of_no_unit_is_told_once(store, name):
    commit(store, 0)
    commit(store, 1)
    store.create(name, b"")
    found = audit(store, PLAN)
    assert (1, 0) == (found.num_foreign, found.lost_rows)
    assert f"{name} is not a part of" in found.foreign[0]


class CountingStore:
    """Counts what is read of a store."""

    def __init__(self, store):
        self.store, self.num_read = store, Counter()

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read(self, name):
        self.num_read[name] += 1
        return self.store.read(name)


def test_an_audit_reads_each_record_once(store):
    commit(store, 0)
    commit(store, 1)
    counting = CountingStore(store)
    assert audit(counting, PLAN).is_clean
    assert {"_raybatch/done/000000.json": 1, "_raybatch/done/000001.json": 1} == counting.num_read


def test_files_of_units_without_a_record_are_fine_where_units_are_listed(store):
    commit(store, 0)
    store.remove("_raybatch/done/000000.json")
    assert [False, False] == committed(store, PLAN).tolist()


def test_a_second_attempt_completes_what_the_first_began(store):
    first = commit(store, 0, answer="first")
    store.remove("_raybatch/done/000000.json")
    before = store.read("data/lang=en/part-000000.parquet")
    store.remove("data/lang=de%2F../part-000000.parquet")
    second = commit(store, 0, answer="second")
    assert (True, {"first": 3}) == (first.won, first.counts.statuses)
    assert before == store.read("data/lang=en/part-000000.parquet")
    assert {"first": 2, "second": 1} == second.counts.statuses


def test_a_complete_unit_has_a_receipt(store):
    assert receipt_of(store, PLAN.unit(0), PLAN.hash, is_partitioned=True) is None
    made = commit(store, 0)
    assert made.counts == receipt_of(store, PLAN.unit(0), PLAN.hash, is_partitioned=True).counts


def test_rows_that_are_not_the_units_are_refused(store):
    with pytest.raises(CommitError, match="no row has position 2 of 3"):
        commit(store, 0, pos=np.array([0, 1, 1]))
    assert [] == store.names("data")


def test_a_unit_that_was_cut_in_another_way_is_refused(store):
    commit(store, 0)
    store.remove("_raybatch/done/000000.json")
    other = table_of(UNITS[0]).set_column(1, "lang", pa.array(["en", "en", "en"]))
    with pytest.raises(CommitError, match="does not have the planned rows of its unit"):
        commit(store, 0, table=other)


def test_a_value_too_long_for_a_file_name_is_refused():
    with pytest.raises(CommitError, match=r"partition url=xxx.* is longer than 200 bytes"):
        partition_folder(["url"], ["x" * 200])


def test_the_text_that_stands_for_null_is_refused():
    with pytest.raises(CommitError, match="in column 'lang' is the folder name for null"):
        partition_folder(["lang"], ["__HIVE_DEFAULT_PARTITION__"])


def test_texts_come_back_as_they_were_with_the_schema_of_the_folders(tmp_path):
    texts = ["007", "7", None, "a/b", ""]
    for number, text in enumerate(texts):
        folder = tmp_path / "data" / partition_folder(["lang"], [text])
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), folder / "part-000000.parquet")
    # as docs/how-to/order-and-layout.md has it
    folders = pyarrow.dataset.partitioning(pa.schema([("lang", pa.string())]), flavor="hive")
    table = pq.read_table(tmp_path, partitioning=folders)
    assert texts == table.sort_by("id")["lang"].to_pylist()


@pytest.mark.parametrize("value", ["..", "a/b", "a\0b", "a\\b", "", "a=b", "\n"])
def test_no_value_leaves_its_folder(store, value):
    store.create(f"data/{partition_folder(['x'], [value])}/a", b"")
    assert 1 == len(store.names("data"))


def test_a_complete_output_is_clean(store):
    commit(store, 0)
    commit(store, 1)
    found = audit(store, PLAN)
    assert (True, {"x": 5}) == (found.is_clean, found.counts.statuses)
    finish(store, PLAN, found)
    assert store.size("_SUCCESS")


def test_a_missing_file_is_told(store):
    commit(store, 0)
    commit(store, 1)
    store.remove("data/lang=en/part-000000.parquet")
    found = audit(store, PLAN)
    assert (3, False) == (found.lost_rows, found.is_clean)
    assert "or remove _raybatch/done/000000.json and run the job again" in found.foreign[0]


def test_a_file_that_no_record_names_is_told(store):
    commit(store, 0)
    commit(store, 1)
    store.create("data/lang=fr/part-000000.parquet", b"")
    found = audit(store, PLAN)
    assert (1, False) == (found.num_foreign, found.is_clean)
    assert "lang=fr" in found.foreign[0]


def test_files_of_a_unit_without_its_record_are_a_missing_unit(store):
    commit(store, 0)
    commit(store, 1)
    store.remove("_raybatch/done/000001.json")
    found = audit(store, PLAN)
    assert ((1,), 0, 2) == (found.missing, found.num_foreign, found.lost_rows)


def test_a_broken_record_is_told(store):
    commit(store, 0)
    store.create("_raybatch/done/000001.json", b"{")
    assert "is not a record of a finished unit" in str(audit(store, PLAN))


def test_a_record_of_another_plan_is_refused_as_a_receipt(store):
    commit(store, 0)
    with pytest.raises(CommitError, match=r"done/000000\.json"):
        receipt_of(store, PLAN.unit(0), "another", is_partitioned=True)
