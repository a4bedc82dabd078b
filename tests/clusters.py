"""The small Ray cluster that all tests of a process share, and clusters for one test alone.

A cluster takes seconds to start and to end, so tests share one, and each module ends its pools.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raybatch.actors.pool import release_pools
from tests.warm_ray import WarmWorkers

_warm = WarmWorkers()


def make_data_context() -> None:
    """Make Ray Data's context, which warns about its own defaults when it is first made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.data.DataContext.get_current().enable_progress_bars = False


def share_ray() -> None:
    """Start the cluster that all tests of this process share, where a test has ended it."""
    if not ray.is_initialized():
        with _warm.of_cluster():
            _start(num_cpus=4)


@contextmanager
def local_ray() -> Iterator[None]:
    """Use the cluster that all tests of this process share; pools end with the context."""
    share_ray()
    try:
        yield
    finally:
        # a test that failed leaves nothing to those after it
        release_pools()


@contextmanager
def own_ray(**options: Any) -> Iterator[None]:
    """Start a cluster for the context alone: of another size, or with the environment of now."""
    end_ray()
    _start(**{"num_cpus": 4, **options})
    try:
        yield
    finally:
        end_ray()


def end_ray() -> None:
    """End the pools and the cluster of this process; the next test that needs one starts it."""
    try:
        release_pools()
    finally:
        try:
            ray.shutdown()
        finally:
            _warm.end()


def _start(**options: Any) -> None:
    make_data_context()
    ray.init(
        # another cluster on this machine is none of ours
        address="local",
        include_dashboard=False,
        object_store_memory=200 << 20,
        log_to_driver=False,
        **options,
    )
