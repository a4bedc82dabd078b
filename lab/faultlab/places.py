"""Where the job of a round runs: a folder, a small disk, a bucket, or three Ray nodes."""

import json
import os
import random
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import fsspec

from faultlab.disk import SmallDisk, can_mount, small_disk
from faultlab.nodes import Nodes, ray_nodes
from faultlab.rig import Rig
from faultlab.s3_proxy import HttpFault, HttpRequest, s3_proxy
from faultlab.s3_server import has_moto, s3_server, s3_variables

_HTTP_FAULTS = tuple(
    HttpFault(status=status, is_after=is_after, hang_s=4.0 if status is None else 0.0)
    for status in (500, 503, 409, None)
    for is_after in (False, True)
)
# a client that waits a minute for a lost answer makes a slow test of nothing else
_CLIENT = {"config_kwargs": {"read_timeout": 2, "connect_timeout": 5}}


class ErrorBurst:
    """Lets every second request fail while some failures are left."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.num_left = 0
        self.num_given = 0

    def arm(self, num_errors: int) -> None:
        """Let the next `num_errors` requests fail."""
        self.num_left = num_errors

    def __call__(self, request: HttpRequest) -> HttpFault | None:
        if not self.num_left or self._rng.random() < 0.5:
            return None
        fault = self._rng.choice(_HTTP_FAULTS)
        if fault.status == 409 and request.method != "PUT":
            return None
        self.num_left -= 1
        self.num_given += 1
        return fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one round runs; it lacks what its kind of place does not have.

    Args:
        small_disk: below the output.
    """

    rig: Rig
    _small_disk: SmallDisk | None = None
    _errors: ErrorBurst | None = None
    _nodes: Nodes | None = None

    @property
    def small_disk(self) -> SmallDisk:
        """Return the disk."""
        assert self._small_disk is not None, "only rounds on a small disk ask for it"
        return self._small_disk

    @property
    def errors(self) -> ErrorBurst:
        """Return the errors of requests."""
        assert self._errors is not None, "only rounds on S3 ask for them"
        return self._errors

    @property
    def nodes(self) -> Nodes:
        """Return the nodes."""
        assert self._nodes is not None, "only rounds on several nodes ask for them"
        return self._nodes


@dataclass(frozen=True, kw_only=True)
class Places:
    """Makes places.

    Args:
        endpoint: of S3; None where there is none.
    """

    endpoint: str | None
    has_disks: bool
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def found(cls, moto_python: str) -> Iterator[Self]:
        """Yield the places that this host has; an S3 server runs as long."""
        with ExitStack() as stack:
            missing = {}
            endpoint = None
            if has_moto(moto_python):
                endpoint = stack.enter_context(s3_server(moto_python))
                # the checks of this process ask the same endpoint, and no proxy
                stack.enter_context(_environment(s3_variables(endpoint)))
            else:
                missing["s3"] = f"{moto_python} has no moto"
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rbf-")))
            has_disks = can_mount(folder / "disk")
            if not has_disks:
                missing["disk"] = "mounting a small disk needs Linux and root"
            yield cls(endpoint=endpoint, has_disks=has_disks, missing=missing)

    @property
    def names(self) -> list[str]:
        """Return which there are."""
        return [name for name in ("local", "disk", "s3", "nodes") if name not in self.missing]

    @contextmanager
    def open(self, name: str, folder: Path, rng: random.Random) -> Iterator[Place]:
        """Make a place for one round.

        Args:
            name: one of `names`.
            folder: for everything that is not in the place itself.
            rng: chooses the errors of requests.
        """
        with ExitStack() as stack:
            if name == "disk":
                disk = stack.enter_context(small_disk(folder / "disk"))
                rig = Rig(folder=folder, sink=str(folder / "disk" / "out"))
                yield Place(rig=rig, _small_disk=disk)
            elif name == "s3":
                assert self.endpoint is not None, "it is among the names"
                errors = ErrorBurst(rng)
                proxy = stack.enter_context(s3_proxy(self.endpoint, errors))
                yield Place(rig=_bucket_rig(folder, proxy.endpoint), _errors=errors)
            elif name == "nodes":
                nodes = stack.enter_context(ray_nodes(folder / "ray", dict(os.environ)))
                variables = {"RAY_ADDRESS": nodes.address}
                yield Place(rig=Rig(folder=folder, variables=variables), _nodes=nodes)
            else:
                yield Place(rig=Rig(folder=folder))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _bucket_rig(folder: Path, endpoint: str) -> Rig:
    bucket = f"bucket-{uuid.uuid4().hex}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    return Rig(
        folder=folder,
        source=f"s3://{bucket}/in",
        sink=f"s3://{bucket}/out",
        variables={**s3_variables(endpoint), "FSSPEC_S3": json.dumps(_CLIENT)},
    )
