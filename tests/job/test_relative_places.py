"""Jobs whose paths are those of a driver that works in another folder than the hosts of Ray."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raybatch.job.job import Job
from raybatch.stages.feeder import LLMStage
from tests.tiers import some


@pytest.mark.ray
@pytest.mark.usefixtures("cluster_where_marked")
@pytest.mark.parametrize("mode", some(["auto", "off"]))
def test_a_folder_is_where_the_driver_says(tmp_path, monkeypatch, mode):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a", "b"]}), "in.parquet")
    stage = LLMStage("demo", prompt="{text}", sampling={"max_tokens": 2})
    job = Job("in.parquet", "out", stage, plan={"mode": mode}, executor="ray")
    assert job.run().rows_out == 2
    assert (tmp_path / "out" / "_SUCCESS").exists()
