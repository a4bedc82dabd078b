"""An S3 endpoint for tests: moto in an interpreter that has it."""

import os
import sys
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from faultlab.s3_server import has_moto, s3_server, s3_variables


def moto_python() -> str | None:
    """Return an interpreter that can serve S3; RAYBATCH_TEST_MOTO names another than this one."""
    named = os.environ.get("RAYBATCH_TEST_MOTO")
    return next((python for python in (sys.executable, named) if python and has_moto(python)), None)


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """Serve S3 on this host, with the environment that s3fs needs to find it."""
    python = moto_python()
    if python is None:
        pytest.skip("moto is not installed: pip install '.[dev]', or set RAYBATCH_TEST_MOTO")
    with s3_server(python) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_variables(endpoint).items():
            patch.setenv(name, value)
        # those of the library would ask the endpoint of an earlier module
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield endpoint


@pytest.fixture
def bucket(s3_endpoint) -> str:
    """Return the name of a new bucket."""
    name = f"bucket-{uuid.uuid4().hex}"
    fs = fsspec.filesystem("s3", endpoint_url=s3_endpoint, skip_instance_cache=True)
    fs.mkdir(name)
    return name
