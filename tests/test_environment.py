import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import settle_environment


def test_what_a_shell_says_of_clusters_models_and_terminals_is_forgotten():
    dropped = {
        "RAY_ADDRESS": "local",
        "RAYBATCH_LOG_LEVEL": "DEBUG",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "40",
        "TERM": "dumb",
        "no_proxy": "intranet",
        "RAY_worker_niceness": "15",
    }
    kept = {
        "PATH": "/bin",
        "PYTHONPATH": "src",
        "RAY_TMPDIR": "/fast",
        "RAYBATCH_TEST_MOTO": "python",
    }
    environment = dropped | kept
    settle_environment(environment)
    here = "127.0.0.1,localhost,::1"
    assert environment == kept | {
        "RAY_worker_niceness": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "no_proxy": f"intranet,{here}",
        "NO_PROXY": here,
    }


@pytest.mark.slow
def test_the_suite_heeds_none_of_it(tmp_path):
    test = "tests/submit/test_job_server.py::test_missing_token_is_one_line"
    values = {"RAY_ADDRESS": "local", "COLUMNS": "40", "XDG_CACHE_HOME": "/proc/none", "LANG": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=Path(__file__).parents[1],
        env={**os.environ, **values},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
