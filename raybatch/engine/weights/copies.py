"""How weights get into a buffer of the ring: by copies on a CPU, on a stream of a GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raybatch.engine.weights.ring import Transfer

# source and target of each tensor of a layer in a buffer
CopyPairs = Callable[[int, int], list[tuple[torch.Tensor, torch.Tensor]]]


class CountedCopies:
    """Copies that are counted where they are made.

    Args:
        pairs: source and target of each tensor, by layer and buffer.
    """

    def __init__(self, pairs: CopyPairs) -> None:
        self.num_copies = 0
        self.num_bytes = 0
        self._pairs = pairs

    def copy(self, layer: int, buffer: int) -> None:
        """Copy the weights of a layer into a buffer."""
        pairs = self._pairs(layer, buffer)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        self.num_copies += 1
        self.num_bytes += sum(source.nbytes for source, _ in pairs)


class HostCopies(CountedCopies):
    """Copies within the memory of a CPU, made when a layer is waited for.

    A core that copies does not compute, so nothing is gained by copying ahead, and a layer that has
    just been copied is in the processor's cache.
    """

    def mark(self) -> object:
        """Return nothing: what was computed before is done."""
        return None

    def start(self, layer: int, buffer: int, after: object) -> Transfer:
        """Note what is to be copied."""
        return _Later(self, layer, buffer)


@dataclass(slots=True)
class _Later:
    copies: HostCopies
    layer: int
    buffer: int

    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self.copies.copy(self.layer, self.buffer)


class StreamCopies(CountedCopies):
    """Transfers from pinned memory to a GPU, on a stream of their own.

    A transfer waits for the kernels that used its buffer before, and the kernels of its layer wait
    for the transfer; the host waits for neither.

    Args:
        pairs: source and target of each tensor, by layer and buffer.
        device: a GPU.
    """

    def __init__(self, pairs: CopyPairs, device: torch.device) -> None:
        super().__init__(pairs)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """Return an event behind the kernels that were queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self, layer: int, buffer: int, after: object) -> Transfer:
        """Queue a transfer."""
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            self.copy(layer, buffer)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _Queued(done, self._device)


@dataclass(slots=True)
class _Queued:
    done: torch.cuda.Event
    device: torch.device

    def is_done(self) -> bool:
        return bool(self.done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.done)
