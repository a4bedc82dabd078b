import pyarrow as pa
import pytest

from raybatch.rows.batches import as_movable

VIEW = pa.string_view()
KINDS = {
    "text": (VIEW, ["a", None, "c"]),
    "bytes": (pa.binary_view(), [b"\xff", None, b""]),
    "struct": (pa.struct([("x", VIEW)]), [{"x": "a"}, None, {"x": None}]),
    "list": (pa.list_(VIEW), [["a"], None, []]),
    "large_list": (pa.large_list(VIEW), [["a"], None, []]),
    "fixed": (pa.list_(VIEW, 1), [["a"], None, ["b"]]),
    "map": (pa.map_(pa.string(), VIEW), [[("k", "v")], None, []]),
    "deep": (pa.list_(pa.struct([("x", VIEW)])), [[{"x": "a"}], None, []]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_views_can_be_picked_and_come_back_as_they_were(kind):
    table = pa.table({"x": pa.array(KINDS[kind][1], KINDS[kind][0]), "y": [1, 2, 3]})
    picked = as_movable(table).take([2, 0, 1]).cast(table.schema)
    assert [KINDS[kind][1][i] for i in (2, 0, 1)] == picked.column("x").to_pylist()


def test_a_table_without_views_is_left_as_it_is():
    table = pa.table({"x": pa.array(["a"]), "y": [[1]]})
    assert as_movable(table) is table
