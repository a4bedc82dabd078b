"""What a driver that was started for a fault says about it."""

import subprocess
import sys

import pytest

from faultlab.drivers import Driver
from raybatch.durable.fault_points import REACHED


@pytest.fixture
def driver(tmp_path):
    logs = tmp_path / "session_1" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "driver.log").write_text("started\n")
    # a worker whose log got its name of a job after the folder was listed
    (logs / "worker-renamed.err").symlink_to(logs / "gone.err")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        yield Driver(process=process, folder=tmp_path)


def test_a_log_that_was_renamed_hides_nothing(driver):
    assert not driver.has_reached()
    (driver.folder / "session_1" / "logs" / "worker-a.err").write_text(f"{REACHED} after_publish\n")
    assert driver.has_reached()
