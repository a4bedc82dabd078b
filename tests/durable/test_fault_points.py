"""A process dies at the point that the environment names, and at no other."""

import os
import subprocess
import sys

import pytest

from raybatch.durable.fault_points import EXIT_CODE, reach
from raybatch.errors import ConfigError

PROGRAM = """
from raybatch.durable.fault_points import reach
reach("before_publish", unit=3)
reach("after_publish", unit=2)
reach("after_publish", unit=3)
"""


def exit_code(fault):
    environment = {**os.environ, "RAYBATCH_FAULT": fault}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment).returncode


@pytest.mark.parametrize("fault", ["after_publish", "after_publish:unit=3"])
def test_a_process_dies_at_its_point(fault):
    assert EXIT_CODE == exit_code(fault)


@pytest.mark.parametrize("fault", ["after_publish:unit=4", "after_list", ""])
def test_a_process_lives_that_never_gets_there(fault):
    assert 0 == exit_code(fault)


@pytest.mark.parametrize("fault", ["after_publsh", "after_publish:unit", "after_publish:row=3"])
def test_a_fault_that_cannot_be_meant_is_refused(monkeypatch, fault):
    monkeypatch.setenv("RAYBATCH_FAULT", fault)
    with pytest.raises(ConfigError, match="RAYBATCH_FAULT"):
        reach("after_publish")


def test_without_the_setting_nothing_happens(monkeypatch):
    monkeypatch.delenv("RAYBATCH_FAULT", raising=False)
    reach("after_publish", unit=3)
