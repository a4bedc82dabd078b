"""Pools without Ray, which live in this process."""

import itertools
import logging
import re
import threading
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import cast

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.executors.calls import LocalCall, LocalLoop
from raybatch.actors.executors.local_runtime import LocalRuntime
from raybatch.actors.extensions import extensions_of
from raybatch.actors.replicas.placement import (
    ClusterView,
    Placement,
    check_groups,
    first_of,
    settled,
    usable_cores,
)
from raybatch.actors.replicas.runtime import Errors, T
from raybatch.actors.wire.api import PoolApi
from raybatch.actors.wire.records import PoolSpec, digest_of
from raybatch.backends.choice import BackendChoice, gpus_of_engine, unproven_on_gpus, vllm_build
from raybatch.backends.registry import check_version, type_of
from raybatch.config import environment

logger = logging.getLogger(__name__)

_GPUS = Path("/proc/driver/nvidia/gpus")
_GPU_NAME = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")


class LocalPools:
    """Creates and stops coordinators on an event loop of this process; see `Pools`."""

    # a coordinator dies only with the process
    gone: Errors = ()
    failed: Errors = ()

    def __init__(self) -> None:
        self._loop = LocalLoop("raybatch-pools")
        self._coordinators: dict[str, PoolApi] = {}
        # last used of the pools that differ in the number of engines only
        self._in_use: dict[str, str] = {}
        self._lock = threading.Lock()

    def settle(
        self, spec: PoolSpec, *, began_with: str | None = None, connect: bool = True
    ) -> tuple[PoolSpec, BackendChoice | None]:
        if spec.backend.is_decided:
            # this is the host of the engines
            check_version(spec.backend)
        host = ClusterView(gpus_of_hosts=(float(gpus_of_host()),))
        return settled(spec, host, vllm=vllm_build, began_with=began_with)

    def connect(self, spec: PoolSpec) -> PoolApi:
        name = digest_of(spec)
        with self._lock:
            if name not in self._coordinators:
                self._coordinators[name] = self._loop.begin(_make(spec, self._loop)).result()
            # the number of engines follows from the rows of a job, and the host has memory for
            # one such pool: stop idle engines of the previous one
            family = digest_of(replace(spec, pool=replace(spec.pool, replicas=None)))
            before = self._in_use.get(family)
            self._in_use[family] = name
            if before != name and before in self._coordinators:
                self.result(self._coordinators[before].rest())
            return self._coordinators[name]

    def result(self, call: Awaitable[T]) -> T:
        # calls of this process are `LocalCall`s
        result: T = cast(LocalCall, call).result()
        return result

    def forget(self, spec: PoolSpec, coordinator: PoolApi) -> None:
        with self._lock:
            self._coordinators.pop(digest_of(spec), None)

    def end(self, spec: PoolSpec) -> None:
        with self._lock:
            coordinator = self._coordinators.pop(digest_of(spec), None)
        if coordinator is not None:
            self.result(coordinator.shutdown())

    def end_all(self) -> None:
        with self._lock:
            coordinators, self._coordinators = self._coordinators, {}
        for coordinator in coordinators.values():
            self.result(coordinator.shutdown())


async def _make(spec: PoolSpec, loop: LocalLoop) -> PoolApi:
    for warning in unproven_on_gpus(spec.backend) if _has_gpus(spec) else ():
        logger.warning("%s", warning)
    runtime = LocalRuntime(loop)
    plan = plan_local_placement(spec)
    runtime.owner = Coordinator(spec, plan, runtime, extensions_of(spec, plan))
    return runtime.coordinator()


def gpus_of_host() -> int:
    """Return the number of GPUs for engines on this host, without importing a library."""
    num_gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    visible = environment().get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    # CUDA ignores all names from the first invalid one on
    names = itertools.takewhile(_GPU_NAME.fullmatch, visible.split(","))
    return min(num_gpus, len(list(names)))


def _has_gpus(spec: PoolSpec) -> bool:
    return gpus_of_host() > 0 and gpus_of_engine(spec.backend, spec.engine) > 0


def plan_local_placement(spec: PoolSpec) -> Placement:
    """Return the number of engines of a pool on this host, as configured or by its cores.

    GPUs are not divided: one engine uses them.
    """
    number = spec.pool.most_replicas
    if number is None and (_has_gpus(spec) or type_of(spec.backend).is_endpoint):
        number = 1
    if number is None:
        number = max(1, usable_cores() // spec.engine.num_threads)
    number = max(number, spec.pool.min_replicas or 1)
    check_groups(spec.pool, number)
    return Placement(
        num_replicas=number,
        num_cpus=0,
        num_gpus=0,
        num_engines_on_host=number,
        num_first=first_of(spec.pool),
    )
