"""Tokenizers of stages, and the cluster of tests that run processors of ray.data.llm."""

import pytest

from tests.stages.conftest import _data_context, bos_model, chat_model, model  # noqa: F401


@pytest.fixture(scope="module")
def wide_cluster():
    """Ray with CPUs for all actors of ray.data.llm, each of which reserves its own."""
    # slow to load, and most tests need no Ray
    from tests.clusters import own_ray

    with own_ray(num_cpus=16):
        yield


@pytest.fixture(scope="module", params=[pytest.param("anew", marks=pytest.mark.exhaustive), "kept"])
def kept(request):
    """Has the rows of ray.data.llm; see `tests.compat.both`."""
    # slow to load as well
    from tests.compat.both import KeptRows

    return KeptRows(is_anew=request.param == "anew")
