"""Cost models measured in an actor like a replica."""

import pytest

from raybatch.actors.measure import measure_pool
from raybatch.actors.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.errors import MeasureError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def spec_of(**options):
    return PoolSpec(
        model="none",
        backend=BackendConfig(kind="fake", options=options),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=1),
    )


def test_a_pool_is_measured_once_and_then_read(tmp_path):
    first = measure_pool(spec_of(step_s=0.001), folder=tmp_path)
    assert first.step_s > 0.0005
    assert first == measure_pool(spec_of(step_s=0.001), folder=tmp_path)


def test_an_engine_that_does_not_start_says_why(tmp_path):
    with pytest.raises(MeasureError, match="RuntimeError: the fake backend was told to fail"):
        measure_pool(spec_of(fail_start=True), folder=tmp_path)


def test_an_engine_that_dies_is_an_error(tmp_path):
    with pytest.raises(MeasureError, match="none could not be measured: "):
        measure_pool(spec_of(crashes=True), folder=tmp_path)


def test_an_engine_that_takes_too_long_is_an_error(tmp_path):
    with pytest.raises(MeasureError, match=r"within 0\.1 s"):
        measure_pool(spec_of(start_s=60), folder=tmp_path, timeout_s=0.1)
