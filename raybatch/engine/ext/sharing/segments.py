"""Memory of one process that others of the host open: tiles of an owner, rows that are received.

Memory of the host is what `raybatch.engine.memory.mapped` makes. Memory of a GPU is one allocation,
which others open by its handle where they see that GPU.
"""

import base64
import pickle
import warnings
from typing import Any, Protocol

import torch

from raybatch.engine.memory.mapped import MappedMemory, map_other
from raybatch.errors import ConfigError, error_text

# of what a host has free, that owned weights leave for all else
_SPARE_FRACTION = 0.05


class Segment(Protocol):
    """Bytes that others map.

    Attributes:
        memory: uint8 [N] on the device.
        handle: a text by which `open_segment` finds it in another process, while this object is
            there.
    """

    memory: torch.Tensor
    handle: str


class HostSegment:
    """A segment in the memory of a host."""

    def __init__(self, num_bytes: int, *, free_bytes: int) -> None:
        """Take the memory from the system now, so that no later write can fail.

        `free_bytes` are those that this process may take.
        Raises ConfigError: the host has not so much free, or is no Linux.
        """
        if num_bytes > (1 - _SPARE_FRACTION) * free_bytes:
            raise ConfigError(
                f"engine.weights='shared': the weights that this replica owns take {num_bytes} "
                f"bytes, and the host has {free_bytes} free for each; take fewer replicas on a host"
            )
        try:
            # kept for those who map it
            self._mapped = MappedMemory("weights", num_bytes)
        except OSError as error:
            raise ConfigError(
                f"engine.weights='shared': {num_bytes} bytes of shared memory: {error_text(error)};"
                " leave engine.weights out"
            ) from error
        self.memory = torch.frombuffer(self._mapped.memory, dtype=torch.uint8)[:num_bytes]
        self.handle = self._mapped.handle


class DeviceSegment:
    """A segment in the memory of a GPU, shared by CUDA's handles of memory (IPC)."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # nothing has no handle
        memory = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=device)
        self.memory = memory[:num_bytes]
        storage: Any = memory.untyped_storage()
        parts = storage._share_cuda_()
        self.handle = base64.b64encode(pickle.dumps((*parts, num_bytes))).decode()


def make_segment(num_bytes: int, device: torch.device, *, free_bytes: int) -> Segment:
    """Return memory on a device; raises ConfigError where the host has not so much free."""
    if device.type == "cuda":
        return DeviceSegment(num_bytes, device)
    return HostSegment(num_bytes, free_bytes=free_bytes)


def open_segment(handle: str, device: torch.device, *, is_written: bool = False) -> torch.Tensor:
    """Return the bytes of another process's segment, uint8, which must not be written by default.

    On a host, there is one byte where the segment has none.

    Raises ConfigError: it cannot be reached from here.
    """
    if device.type == "cuda":
        return _open_on_device(handle, device)
    return _open_on_host(handle, is_written=is_written)


def _open_on_host(handle: str, *, is_written: bool) -> torch.Tensor:
    try:
        memory = map_other(handle, is_written=is_written)
    except OSError as error:
        raise ConfigError(
            f"engine.weights='shared': {error_text(error)}; the replicas of a group run on one "
            "host, as one user, and see each other's processes: leave engine.weights out where "
            "they cannot"
        ) from error
    with warnings.catch_warnings():
        # that it cannot be written is meant
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _open_on_device(handle: str, device: torch.device) -> torch.Tensor:
    # a handle of a replica of this pool, which arrives as its other calls do
    *parts, num_bytes = pickle.loads(base64.b64decode(handle))
    other = torch.device("cuda", parts[0])
    if other != device and not torch.cuda.can_device_access_peer(device, other):
        raise ConfigError(
            f"engine.weights='shared': {device} cannot read the memory of {other}, as there is no "
            "peer access between these GPUs; leave engine.weights out"
        )
    try:
        storage: Any = torch.UntypedStorage._new_shared_cuda(*parts)
    except RuntimeError as error:
        raise ConfigError(
            f"engine.weights='shared': another GPU's weights cannot be opened: {error_text(error)};"
            " the replicas of a group need all GPUs of the group visible: leave engine.weights out "
            "where they are not"
        ) from error
    return torch.empty(0, dtype=torch.uint8, device=other).set_(storage)[:num_bytes]
