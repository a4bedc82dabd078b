"""The number of problems that a check reports in words."""

import pytest

from raybatch.durable.storage import open_store
from raybatch.outputs.verify import check_parts
from tests.outputs.support import (
    NUM_UNITS,
    OUTPUT,
    UNIT_ROWS,
    finished_rows,
    forge_unit,
    make_complete,
    make_sink,
    write_unit,
)


@pytest.mark.parametrize(("most", "num_told"), [(2, 2), (3, 3), (10, 3)])
def test_the_first_findings_are_told_and_all_are_counted(tmp_path, most, num_told):
    sink = str(tmp_path / "out")
    plan = make_sink(sink)
    for unit in range(NUM_UNITS):
        rows = range(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)
        write_unit(sink, plan, unit, finished_rows(rows, row_id=[None] * UNIT_ROWS))
    look = check_parts(open_store(sink), plan, OUTPUT, max_problems=most)
    assert (num_told, NUM_UNITS) == (len(look.problems), look.num_problems)
    assert "part-000000.parquet has 4 rows without a row_id" in look.problems[0]


def test_a_column_of_another_type_is_told_once_and_no_value_is_read(tmp_path):
    sink = str(tmp_path / "out")
    plan = make_complete(sink)
    rows = finished_rows(range(UNIT_ROWS, 2 * UNIT_ROWS))
    place = rows.schema.get_field_index("num_generated_tokens")
    other = rows.column(place).cast("string")
    forge_unit(sink, plan, 1, rows.set_column(place, "num_generated_tokens", other), counted=rows)
    look = check_parts(open_store(sink), plan, OUTPUT)
    (problem,) = look.problems
    assert "has another schema than the first part (num_generated_tokens: int32, " in problem
    assert 0 == look.repeated_rows
