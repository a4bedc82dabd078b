"""Decides what the engines of a pool run where nobody said it, by what engines will have."""

import logging
from collections.abc import Callable
from dataclasses import replace

from raybatch.actors.replicas.placement import ClusterView, gpus_asked
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.choice import BackendChoice, VllmBuild, choose_backend
from raybatch.backends.vllm.args import native_options

_logger = logging.getLogger(__name__)


def settled(
    spec: PoolSpec,
    cluster: ClusterView,
    *,
    vllm: Callable[[], VllmBuild | None],
    began_with: str | None = None,
) -> tuple[PoolSpec, BackendChoice | None]:
    """Return a spec whose backend is decided, and why it is that one.

    Args:
        spec: of a pool.
        cluster: in which it runs, or the one host.
        vllm: says what is installed where the engines run.
        began_with: kind of the backend that answered the first rows of the same output.

    Returns:
        The spec, and None for the choice where the user has named a backend.
    """
    if spec.backend.is_decided:
        return spec, None
    num_gpus = gpus_asked(spec, cluster)
    choice = choose_backend(
        num_gpus=num_gpus,
        vllm=vllm,
        native_options=native_options(spec.engine),
        began_with=began_with,
    )
    # on CPUs there is nothing to choose
    level = logging.INFO if num_gpus or not choice.is_usual else logging.DEBUG
    _logger.log(level, "the engines run the backend %s", choice)
    return replace(spec, backend=replace(spec.backend, kind=choice.kind)), choice
