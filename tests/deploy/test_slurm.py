"""The Slurm recipe on this host: a separate cluster, an orderly stop, and a resumed run."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raybatch.outputs.verify import verify
from tests.jobs import Hold

ROOT = Path(__file__).parents[2]
NUM_ROWS = 40
# what Slurm has, of one host
FAKES = {
    "scontrol": "echo 127.0.0.1",
    "srun": 'while [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=0 SLURM_NTASKS=1 exec "$@"',
}


def free_job_id():
    """Return the number of a job whose ten ports are free."""
    for job_id in range(700, 900):
        try:
            for port in range(20000 + job_id * 10, 20009 + job_id * 10):
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", port))
        except OSError:
            continue
        return job_id
    pytest.skip("no ten free ports in a row")


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the script; what it started ends with the test."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, body in FAKES.items():
        (tools / name).write_text(f"#!/bin/bash\n{body}\n")
        (tools / name).chmod(0o755)
    started = []
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAYBATCH_VENV": sys.prefix,
        "SLURM_JOB_ID": str(free_job_id()),
        "SLURM_JOB_NODELIST": "host1",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }

    def begin(log):
        with open(log, "w") as file:
            command = ["bash", ROOT / "deploy/slurm.sbatch", "job.yaml"]
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=100)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_job_that_is_stopped_goes_on_with_the_same_line(tmp_path, start):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(NUM_ROWS)]}), tmp_path / "in/a.pq")
    hold = Hold(tmp_path, 5)
    job = {
        "source": str(tmp_path / "in"),
        "sink": str(tmp_path / "out"),
        "stage": {
            "model": "demo",
            "prompt": "{text}",
            "backend": {"kind": "fake", "options": {"max_num_seqs": 1, **hold.options}},
            "sampling": {"max_tokens": 2},
            "pool": {"replicas": 1},
        },
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    log = tmp_path / "first.log"
    first = start(log)
    while "planned 40 rows" not in log.read_text():
        assert first.poll() is None, log.read_text()
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 1, log.read_text()
    # one signal came, so that the finished rows were kept
    assert "run the same command to resume" in log.read_text()
    assert not verify(str(tmp_path / "out")).is_complete
    hold.release()
    second = start(tmp_path / "second.log")
    assert second.wait() == 0, (tmp_path / "second.log").read_text()
    assert verify(str(tmp_path / "out")).is_complete
