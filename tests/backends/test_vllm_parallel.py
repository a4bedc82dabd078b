"""An engine of vLLM with two ranks, which are processes on one host."""

import json
import os
import subprocess
import sys
import time
from contextlib import closing

import numpy as np
import pytest

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.records.types import Request, Sampling
from tests.backends.vllm_engines import PROMPT, save_text_model

pytest.importorskip("vllm", reason="vLLM is not installed here")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINE = {"dtype": "float32", "kv_cache_bytes": 4 << 20, "max_num_seqs": 4}

# ends as a process that is killed does: nothing is closed
_SCRIPT = """
import json, os, sys
import psutil
from raybatch.config import BackendConfig, EngineConfig
from raybatch.backends.registry import create_backend
from tests.backends.test_vllm_parallel import ENGINE, answers_of

if __name__ == "__main__":
    options = {"engine_kwargs": {"tensor_parallel_size": 2}}
    config = BackendConfig(kind="vllm", options=options)
    backend = create_backend(sys.argv[1], config, EngineConfig(**ENGINE))
    tokens = answers_of(backend)
    ranks = [p.pid for p in psutil.Process().children(recursive=True) if "Worker" in p.name()]
    print(json.dumps({"tokens": tokens, "ranks": ranks}), flush=True)
    os._exit(1)
"""


def answers_of(backend):
    """Greedy tokens of a few prompts."""
    backend.submit(
        [
            Request(
                request_id=i,
                row_id=str(i),
                prompt_token_ids=np.array([*PROMPT, i], np.int32),
                sampling=Sampling(max_tokens=12, ignore_eos=True),
            )
            for i in range(3)
        ]
    )
    done = {}
    while backend.num_unfinished():
        done |= {c.request_id: c.token_ids.tolist() for c in backend.poll()}
    return [done[i] for i in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def reported(folder, tmp_path_factory):
    script = tmp_path_factory.mktemp("script") / "two_ranks.py"
    script.write_text(_SCRIPT)
    output = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return json.loads(output.splitlines()[-1])


def test_two_ranks_give_the_tokens_of_the_native_engine(folder, reported):
    engine = EngineConfig(**ENGINE, device="cpu")
    with closing(create_backend(str(folder), BackendConfig(kind="native"), engine)) as native:
        assert reported["tokens"] == answers_of(native)


def test_ranks_end_with_the_process_of_their_engine(reported):
    assert len(reported["ranks"]) == 2
    deadline = time.monotonic() + 60
    while any(os.path.exists(f"/proc/{pid}") for pid in reported["ranks"]):
        assert time.monotonic() < deadline, "the ranks go on"
        time.sleep(0.2)
