"""How weights get into a slot: by the core that computes, by a thread, or on a GPU's own stream."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from raybatch.policy.ownership import Unit

# source and target of each tensor of a unit, by unit and slot
CopyPairs = Callable[[Unit, int], list[tuple[torch.Tensor, torch.Tensor]]]


class Transfer(NamedTuple):
    """A copy of one unit's weights into a slot."""

    has_begun: Callable[[], bool]
    is_done: Callable[[], bool]
    # lets all that is computed from now on find them; raises where the copy failed
    wait: Callable[[], None]


class HostCopies:
    """Copies within the memory of a CPU, made when a unit is waited for.

    A core that copies does not compute, so nothing is gained by copying ahead, and a layer that has
    just been copied is in the processor's cache. Copies are carried out in the order in which they
    were begun, so that one that nobody has waited for may be followed by another one into the same
    slot.
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
        """Return a mark behind all that was computed so far; here nothing, as that is done."""
        return None

    def start(self, unit: Unit, slot: int, after: object) -> Transfer:
        """Begin to copy, once what lies before the mark `after` (None: nothing) is computed."""
        return Transfer(
            has_begun=lambda: False, is_done=lambda: False, wait=lambda: self.copy(unit, slot)
        )

    def close(self) -> None:
        """End what runs in the background; nothing is copied any more."""


class ThreadCopies(HostCopies):
    """Copies within the memory of a CPU, ahead of their use, by a thread on another core.

    Copies of torch hold no lock of the interpreter.
    """

    def __init__(self, pairs: CopyPairs) -> None:
        super().__init__(pairs)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raybatch-weights")

    def start(self, unit: Unit, slot: int, after: object) -> Transfer:
        begun = threading.Event()

        def copy() -> None:
            begun.set()
            self.copy(unit, slot)

        future: Future[None] = self._thread.submit(copy)
        return Transfer(has_begun=begun.is_set, is_done=future.done, wait=future.result)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


class StreamCopies(HostCopies):
    """Transfers to a GPU, on a stream of their own: from pinned memory, or from another GPU.

    A transfer waits for the kernels that used its slot before, and the kernels of its unit wait
    for the transfer; the host waits for neither.
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
    """Return what makes the copies to a device; `on_host` where that is a CPU."""
    return partial(StreamCopies, device=device) if device.type == "cuda" else on_host
