"""Memory that other processes of the host can open: owned shards, and inboxes for received rows.

Host memory comes from `raybatch_extensions.ranks.mapped`. GPU memory is one allocation that
processes which see that GPU open by its IPC handle.
"""

import base64
import pickle
import warnings
from typing import Any, Protocol

import torch

from raybatch.errors import ConfigError, error_text
from raybatch_extensions.ranks.mapped import MappedMemory, map_other

# share of free host memory that owned weights must leave
_SPARE_FRACTION = 0.05


class Segment(Protocol):
    """Memory that other processes map.

    Attributes:
        memory: uint8 [N] on the device.
        handle: text for `open_segment` in another process; valid while this object lives.
    """

    memory: torch.Tensor
    handle: str


class HostSegment:
    """A segment in host memory."""

    def __init__(self, num_bytes: int, *, free_bytes: int) -> None:
        """Allocate the memory eagerly, so that no later write can fail.

        `free_bytes` is the limit of this process. Raises ConfigError: the host has less free
        memory, or does not run Linux.
        """
        if num_bytes > (1 - _SPARE_FRACTION) * free_bytes:
            raise ConfigError(
                f"engine.weights='shared': this replica owns {num_bytes} bytes of weights, and the "
                f"host has {free_bytes} bytes free per replica; run fewer replicas on a host"
            )
        try:
            # kept alive for the processes that map it
            self._mapped = MappedMemory("weights", num_bytes)
        except OSError as error:
            raise ConfigError(
                f"engine.weights='shared': cannot allocate {num_bytes} bytes of shared memory: "
                f"{error_text(error)}; leave engine.weights out"
            ) from error
        self.memory = torch.frombuffer(self._mapped.memory, dtype=torch.uint8)[:num_bytes]
        self.handle = self._mapped.handle


class DeviceSegment:
    """A segment in GPU memory, shared by CUDA IPC handles."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # empty memory has no handle
        memory = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=device)
        self.memory = memory[:num_bytes]
        storage: Any = memory.untyped_storage()
        parts = storage._share_cuda_()
        self.handle = base64.b64encode(pickle.dumps((*parts, num_bytes))).decode()


def make_segment(num_bytes: int, device: torch.device, *, free_bytes: int) -> Segment:
    """Allocate a segment on a device; raises ConfigError if the host has too little memory."""
    if device.type == "cuda":
        return DeviceSegment(num_bytes, device)
    return HostSegment(num_bytes, free_bytes=free_bytes)


def open_segment(handle: str, device: torch.device, *, is_written: bool = False) -> torch.Tensor:
    """Map the segment of another process as uint8; read only unless `is_written`.

    An empty host segment maps as one byte.

    Raises ConfigError: it cannot be opened here.
    """
    if device.type == "cuda":
        return _open_on_device(handle, device)
    return _open_on_host(handle, is_written=is_written)


def _open_on_host(handle: str, *, is_written: bool) -> torch.Tensor:
    try:
        memory = map_other(handle, is_written=is_written)
    except OSError as error:
        raise ConfigError(
            f"engine.weights='shared': {error_text(error)}; the replicas of a group must run on "
            "one host, as one user, and see each other's processes; otherwise leave "
            "engine.weights out"
        ) from error
    with warnings.catch_warnings():
        # the mapping is read only on purpose
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _open_on_device(handle: str, device: torch.device) -> torch.Tensor:
    # trusted: the handle comes from a replica of this pool, over its actor calls
    *parts, num_bytes = pickle.loads(base64.b64decode(handle))
    other = torch.device("cuda", parts[0])
    if other != device and not torch.cuda.can_device_access_peer(device, other):
        raise ConfigError(
            f"engine.weights='shared': {device} has no peer access to {other}; leave "
            "engine.weights out"
        )
    try:
        storage: Any = torch.UntypedStorage._new_shared_cuda(*parts)
    except RuntimeError as error:
        raise ConfigError(
            f"engine.weights='shared': cannot open the weights of another GPU: {error_text(error)};"
            " every replica must see all GPUs of its group; otherwise leave engine.weights out"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=other).set_(storage)[:num_bytes]
