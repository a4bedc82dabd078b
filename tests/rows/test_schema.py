import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.rows.schema import OutputSchema, describe_error, row_status


@pytest.mark.parametrize(
    ("finish_reason", "error", "status"),
    [
        ("stop", "", "ok"),
        ("length", "", "truncated"),
        ("filtered", "", "filtered"),
        ("error", "PromptTooLong: 9 tokens", "too_long"),
        ("error", "InvalidPrompt: null", "invalid"),
        ("error", "RenderError: x", "invalid"),
        ("error", "TokenizeError: x", "invalid"),
        ("capacity", "CapacityError: x", "too_long"),
        ("capacity", "", "too_long"),
        ("error", "ReplicaCrash: worker died 3 times", "crashed"),
        ("error", "ValueError: x", "error"),
    ],
)
def test_status_follows_from_reason_and_error(finish_reason, error, status):
    assert row_status(finish_reason, error) == status


def test_error_text_is_one_line():
    assert describe_error("RenderError", ValueError("a\nb")) == "RenderError: a b"


def test_error_text_can_be_written_whatever_the_message_holds():
    text = describe_error("RenderError", ValueError("a\ud800"))
    assert pa.array([text]).to_pylist() == ["RenderError: a\\ud800"]


def test_id_column_may_be_named_row_id():
    user = pa.schema([("row_id", pa.string())])
    OutputSchema().check_collisions(user, id_column="row_id")


def test_row_id_of_another_type_is_refused():
    user = pa.schema([("row_id", pa.int64())])
    with pytest.raises(ConfigError, match="'row_id' is int64"):
        OutputSchema().check_collisions(user, id_column="row_id")


def test_row_id_that_is_not_the_id_column_is_refused():
    with pytest.raises(ConfigError, match="already has a column 'row_id'"):
        OutputSchema().check_collisions(pa.schema([("row_id", pa.string())]), id_column=None)
