"""`verify` proves what is true of an output, and names what is not."""

import json
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raybatch
from raybatch.durable.audit import audit, finish
from raybatch.durable.layout import part_name
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.outputs.verify import verify
from raybatch.planning.shards import rows_in_stretches
from raybatch.planning.store import write_shard
from tests.outputs.support import (
    contents,
    finished_rows,
    forge_unit,
    make_complete,
    make_sink,
    write_input,
    write_unit,
)


@pytest.fixture
def sink(tmp_path):
    return str(tmp_path / "out")


@pytest.mark.parametrize("deep", [False, True])
def test_a_complete_output_is_clean(sink, deep):
    make_complete(sink)
    found = verify(sink, deep=deep)
    assert (True, True, 0) == (found.is_clean, found.is_complete, found.exit_code())
    assert {"ok": 10, "crashed": 1, "invalid": 1} == found.statuses


def test_an_output_in_an_object_store_is_verified():
    sink = f"memory://{uuid.uuid4().hex}/out"
    make_complete(sink)
    assert verify(sink, deep=True).is_complete


def test_nothing_is_changed(sink, tmp_path):
    make_complete(sink)
    before = contents(tmp_path)
    verify(sink, deep=True)
    assert before == contents(tmp_path)


def test_a_run_that_died_is_clean_and_has_rows_to_do(sink):
    write_unit(sink, make_sink(sink), 1)
    found = verify(sink, deep=True)
    assert (True, False, 1) == (found.is_clean, found.is_complete, found.exit_code())
    assert (4, 0, 8) == (found.written_rows, found.lost_rows, found.rows_to_do)
    assert "run the job again to resume" in str(found)


def test_a_run_that_died_before_its_plan_says_so(sink):
    make_sink(sink)
    open_store(sink).remove("_raybatch/plan.json")
    found = verify(sink)
    assert (1, "before it wrote its plan" in found.notes[0]) == (found.exit_code(), True)


def test_parts_whose_plan_is_gone_are_a_problem(sink):
    make_complete(sink)
    open_store(sink).remove("_raybatch/plan.json")
    found = verify(sink)
    (problem,) = found.problems
    assert (False, True) == (found.is_clean, "there are 3 files" in problem)
    assert problem.endswith("restore it from a copy, or choose another folder")


def test_a_plan_whose_rows_are_whole_is_clean(sink):
    make_sink(sink, has_shards=True)
    assert verify(sink, deep=True).is_clean


SHARD = "_raybatch/plan/plan-a/rows-000000000005.arrow"


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 100])
def test_rows_of_a_plan_that_were_cut_are_a_problem(sink, deep, num_bytes):
    make_sink(sink, has_shards=True)
    store = open_store(sink)
    store.replace(SHARD, store.read(SHARD)[:num_bytes])
    (problem,) = verify(sink, deep=deep).problems
    assert (True, True) == (SHARD in problem, "restore it from a copy" in problem)


@pytest.mark.parametrize("deep", [False, True])
def test_rows_of_a_plan_that_are_gone_are_a_problem(sink, deep):
    make_sink(sink, has_shards=True)
    open_store(sink).remove(SHARD)
    (problem,) = verify(sink, deep=deep).problems
    assert (True, True) == (SHARD in problem, "restore it from a copy" in problem)


def test_rows_of_a_plan_that_are_in_other_units_are_a_problem(sink):
    plan = make_sink(sink, has_shards=True)
    open_store(sink).remove(SHARD)
    write_shard(sink, plan.hash, 5, rows_in_stretches(plan.unit_rows, np.arange(4, 11)))
    assert "has other rows in unit 1 than planned" in verify(sink, deep=True).problems[0]


def test_rows_of_a_plan_that_are_gone_are_a_note_on_a_complete_output(sink):
    plan = make_sink(sink, has_shards=True)
    for number in range(3):
        write_unit(sink, plan, number)
    finish(open_store(sink), plan, audit(open_store(sink), plan))
    open_store(sink).remove(SHARD)
    found = verify(sink)
    assert (True, 1) == (found.is_complete, len(found.notes))


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not the output of a raybatch job"):
        verify(tmp_path)


def test_all_parts_without_success_are_not_complete(sink):
    make_complete(sink)
    open_store(sink).remove("_SUCCESS")
    found = verify(sink)
    assert (True, False, 12) == (found.is_clean, found.is_complete, found.written_rows)


def test_a_part_that_is_gone_after_success_is_lost_and_named(sink):
    make_complete(sink)
    open_store(sink).remove(part_name(1))
    found = verify(sink)
    assert (4, 0, 1) == (found.lost_rows, found.rows_to_do, found.exit_code())
    assert any(
        "1 parts of a complete output are missing" in record and "units 1;" in record
        for record in found.problems
    )


@pytest.mark.parametrize(("name", "value"), [("plan", "b"), ("units", 9), ("rows", 1)])
def test_a_success_that_is_not_true_is_a_problem(sink, name, value):
    make_complete(sink)
    store = open_store(sink)
    record = {**json.loads(store.read("_SUCCESS")), name: value}
    store.replace("_SUCCESS", json.dumps(record).encode())
    (problem,) = verify(sink).problems
    assert f"_SUCCESS: {name} is {value!r}" in problem


@pytest.mark.parametrize("record", [b"", b"{torn", b"[1]", b"{}"])
def test_a_success_that_cannot_be_read_is_a_problem_with_a_way_out(sink, record):
    make_complete(sink)
    open_store(sink).replace("_SUCCESS", record)
    (problem,) = verify(sink).problems
    assert problem.endswith("remove it and run the job again, which recounts the parts")


def test_a_success_of_other_counts_is_a_problem(sink):
    make_complete(sink)
    store = open_store(sink)
    record = json.loads(store.read("_SUCCESS"))
    record["counts"]["statuses"] = {"ok": 12}
    store.replace("_SUCCESS", json.dumps(record).encode())
    assert "statuses are {'ok': 12}" in verify(sink).problems[0]


def test_a_foreign_file_is_named(sink):
    make_complete(sink)
    open_store(sink).create("data/copy of part-000001.parquet", b"")
    assert "copy of part-000001.parquet" in verify(sink).problems[0]


def test_an_input_that_has_changed_is_a_problem_of_an_unfinished_output(sink, tmp_path):
    source = write_input(tmp_path / "in")
    make_sink(sink, source)
    assert verify(sink).problems == ()
    write_input(source, num_rows=5)
    assert "1 input files have changed" in verify(sink).problems[0]


def test_an_input_that_has_changed_since_is_a_note_on_a_complete_output(sink, tmp_path):
    source = write_input(tmp_path / "in")
    make_complete(sink, source)
    write_input(source, num_rows=5)
    found = verify(sink)
    assert (True, 1) == (found.is_complete, len(found.notes))


def test_an_input_that_is_gone_is_a_note(sink, tmp_path):
    source = write_input(tmp_path / "in")
    make_sink(sink, source)
    (source / "a.parquet").unlink()
    found = verify(sink)
    assert ((), True) == (found.problems, "1 of 1 input files cannot be read" in found.notes[0])


def test_an_output_of_other_columns_is_read_without_counting_its_rows(sink):
    store, plan = open_store(sink), make_complete(sink)
    record = json.loads(store.read("_raybatch/plan.json"))
    store.replace("_raybatch/plan.json", json.dumps({**record, "fingerprint": {}}).encode())
    rows = finished_rows(range(4, 8))
    other = finished_rows(range(4, 8), generated_text=["a", "b", "c", "d"])
    forge_unit(sink, plan, 1, other, counted=rows)
    assert verify(sink, deep=True).is_complete


def check_deep_alone(sink, *words):
    """The names and footers are in order, the values are not; return the account of both."""
    assert verify(sink).is_complete
    found = verify(sink, deep=True)
    assert found.exit_code() == 1
    assert all(word in found.problems[0] for word in words)
    return found


def test_statuses_that_the_rows_do_not_have_are_found(sink):
    plan = make_complete(sink)
    rows = finished_rows(range(4, 8))
    worse = finished_rows(range(4, 8), __inference_error__=["", "", "", "RenderError: x"])
    forge_unit(sink, plan, 1, worse, counted=rows)
    check_deep_alone(sink, "part-000001.parquet", "'invalid': 1", "differ from its footer")


@pytest.mark.parametrize(("rows", "units"), [(["a.parquet:0"], "0, 1"), (["x", "x"], "1")])
def test_a_row_id_that_occurs_twice_is_found_with_its_units(sink, rows, units):
    plan = make_complete(sink)
    ids = [*rows, "p", "q", "r"][:4]
    table = finished_rows(range(4, 8), row_id=ids)
    forge_unit(sink, plan, 1, table, counted=table)
    # the errors that _SUCCESS counts are by class, the ids are of the parts
    found = check_deep_alone(sink, rows[0], f"in units {units})")
    assert found.duplicated_rows == 1


def test_rows_of_a_part_without_its_metadata_are_compared_all_the_same(sink, tmp_path):
    make_complete(sink)
    path = tmp_path / "out" / part_name(1)
    table = pq.read_table(path)
    footer = {b"raybatch": pq.read_metadata(path).metadata[b"raybatch"]}
    rows = pa.concat_tables([table.slice(0, 1), table.slice(0, 3)]).replace_schema_metadata(footer)
    pq.write_table(rows, path)
    assert verify(sink).is_clean
    found = verify(sink, deep=True)
    assert (1, 1, 2) == (found.lost_rows, found.duplicated_rows, len(found.problems))
    assert "a.parquet:4 in units 1" in found.problems[1]


def test_a_part_of_another_schema_is_found(sink):
    plan = make_complete(sink)
    rows = finished_rows(range(4, 8))
    forge_unit(sink, plan, 1, rows.append_column("more", pa.array([1] * 4)), counted=rows)
    check_deep_alone(sink, "part-000001.parquet", "another schema", "more: int64")


def test_a_row_without_an_id_is_found(sink):
    plan = make_complete(sink)
    rows = finished_rows(range(4, 8))
    forge_unit(
        sink, plan, 1, finished_rows(range(4, 8), row_id=[None, "b", "c", "d"]), counted=rows
    )
    check_deep_alone(sink, "part-000001.parquet", "1 rows without a row_id")


def test_a_part_with_broken_pages_is_found(sink, tmp_path):
    make_complete(sink)
    path = tmp_path / "out" / part_name(1)
    first = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[first : first + 40] = b"\xff" * 40
    path.write_bytes(data)
    check_deep_alone(sink, "part-000001.parquet", "cannot be read in full")


def test_json_holds_the_verdict(sink):
    make_complete(sink)
    record = json.loads(raybatch.verify(sink).to_json())
    assert (True, 12) == (record["is_complete"], record["written_rows"])


def test_text_of_the_user_that_is_no_utf8_is_fine(sink):
    plan = make_complete(sink)
    broken = pa.array([b"\xff\xfe", b"t5", b"t6", b"t7"]).view(pa.string())
    rows = finished_rows(range(4, 8))
    rows = rows.set_column(0, rows.schema.field(0), broken)
    forge_unit(sink, plan, 1, rows, counted=rows)
    assert verify(sink, deep=True).is_complete
