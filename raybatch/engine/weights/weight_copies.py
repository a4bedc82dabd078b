"""Copies weights into slots: by the computing core, or on a separate GPU stream."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from raybatch.records.share import Unit

# source and target of each tensor of a unit, by unit and slot
CopyPairs = Callable[[Unit, int], list[tuple[torch.Tensor, torch.Tensor]]]


class Transfer(NamedTuple):
    """A copy of one unit's weights into a slot."""

    has_begun: Callable[[], bool]
    is_done: Callable[[], bool]
    # orders later computation after the copy; raises if the copy failed
    wait: Callable[[], None]


class HostCopies:
    """Copies units of weights to slots within CPU memory, synchronously when a unit is needed.

    The core that copies cannot compute, so copying ahead gains nothing, and a layer that was just
    copied is in the CPU cache. Copies run in the order of `start`, so that a copy for
    which nothing waits may be followed by another one into the same slot.
    """

    def __init__(self, pairs: CopyPairs) -> None:
        self.num_copies = 0
        self.num_bytes = 0
        self._pairs = pairs

    def copy(self, unit: Unit, slot: int) -> None:
        pairs = self._pairs(unit, slot)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        self.num_copies += 1
        self.num_bytes += sum(source.nbytes for source, _ in pairs)

    def mark(self) -> object:
        """Return an event that passes once all computation so far is done; None here: it is."""
        return None

    def start(self, unit: Unit, slot: int, after: object) -> Transfer:
        """Start a copy of `unit` to `slot` once the event `after` has passed; None: at once."""
        return Transfer(
            has_begun=lambda: False, is_done=lambda: False, wait=lambda: self.copy(unit, slot)
        )

    def close(self) -> None:
        """Stop background work; no copies are allowed afterwards."""


class StreamCopies(HostCopies):
    """Transfers to a GPU on a separate stream, from pinned memory or from another GPU.

    A transfer waits for the kernels that used its slot before, and the kernels of its unit wait
    for the transfer; the host never blocks.
    """

    def __init__(self, pairs: CopyPairs, device: torch.device) -> None:
        super().__init__(pairs)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def start(self, unit: Unit, slot: int, after: object) -> Transfer:
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            self.copy(unit, slot)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Transfer(
            has_begun=lambda: True,
            is_done=done.query,
            wait=lambda: torch.cuda.current_stream(self._device).wait_event(done),
        )


def copies_to(
    device: torch.device, *, on_host: type[HostCopies]
) -> Callable[[CopyPairs], HostCopies]:
    """Return the class or function that makes copiers to `device`; `on_host` if that is a CPU."""
    return partial(StreamCopies, device=device) if device.type == "cuda" else on_host
