"""A job whose answers become a column of structs by their JSON schema."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch import LLMStage, Sampling
from raybatch.outputs.verify import verify
from tests.jobs import local_job

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.usefixtures("locally")


def test_answers_are_structs_in_the_output(tmp_path):
    pq.write_table(pa.table({"text": [f"pet {i}" for i in range(4)]}), tmp_path / "in.parquet")
    sampling = Sampling(temperature=0.0, max_tokens=300, structured_outputs={"json": SCHEMA})
    stage = LLMStage("demo", prompt="{text}", sampling=sampling, parse=True)
    local_job(tmp_path / "in.parquet", tmp_path / "out", stage).run()
    table = pq.read_table(tmp_path / "out")
    assert (
        pa.struct([("kind", pa.string()), ("old", pa.bool_())]) == table.schema.field("parsed").type
    )
    rows = table.to_pylist()
    assert 4 == len(rows)
    assert all(json.loads(row["generated_text"]) == row["parsed"] for row in rows)
    assert all(row["parsed_error"] is None for row in rows)
    assert verify(str(tmp_path / "out"), deep=True).is_clean
