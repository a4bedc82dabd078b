"""Lends the weights of layers to the decoder: all on the device, or some through a ring."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from raybatch.engine.memory.kv_cache import allocate_memory
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.engine.weights.loading import LayerWeights
from raybatch.engine.weights.ring import Transfer, WeightCopier, WeightRing
from raybatch.policy.residence import Residence

# source and target of each tensor of a layer in a buffer
CopyPairs = Callable[[int, int], list[tuple[torch.Tensor, torch.Tensor]]]

# trial copies, of which the quickest counts
_NUM_TRIALS = 3


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


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCounters:
    """What was copied to the device since the start.

    Args:
        num_stalls: layers whose weights had not arrived when they were needed.
    """

    num_copies: int = 0
    num_bytes: int = 0
    num_stalls: int = 0
    num_failures: int = 0


class LayerStore(Protocol):
    """Where the decoder gets the weights of its layers."""

    def use(self, layer: int) -> AbstractContextManager[LayerWeights]:
        """Lend the weights of a layer on the device; they may be gone when the block ends."""

    @property
    def is_streamed(self) -> bool:
        """Whether using a layer may copy it, so that one pass should serve many rows."""

    @property
    def counters(self) -> WeightCounters:
        """What was copied."""


class ResidentLayers:
    """All layers on the device."""

    is_streamed = False
    counters = WeightCounters()

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._uses = tuple(nullcontext(layer) for layer in layers)

    def use(self, layer: int) -> AbstractContextManager[LayerWeights]:
        return self._uses[layer]


class _CountedCopier(WeightCopier, Protocol):
    num_copies: int
    num_bytes: int


class StreamedLayers:
    """Some layers on the device, the others in host memory behind a ring; owned by one thread.

    Args:
        make_copier: of the copies to be made; None takes that of the device.
    """

    is_streamed = True

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        residence: Residence,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], _CountedCopier] | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._residence = residence
        num_bytes = max(packed_bytes(layers[layer]) for layer in residence.streamed)
        self._memory = _buffers((residence.num_buffers, num_bytes), device)
        self._views: dict[tuple[int, int], LayerWeights] = {}
        self._copier = (make_copier or _copier_for(device))(self._pairs)
        self._ring = WeightRing(residence.streamed, residence.num_buffers, self._copier)

    @property
    def counters(self) -> WeightCounters:
        return WeightCounters(
            num_copies=self._copier.num_copies,
            num_bytes=self._copier.num_bytes,
            num_stalls=self._ring.num_stalls,
            num_failures=self._ring.num_failures,
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of the ring, and of the layers that stay."""
        stays = zip(self._layers, self._residence.is_resident, strict=True)
        return self._memory.nbytes + sum(packed_bytes(layer) for layer, kept in stays if kept)

    @contextmanager
    def use(self, layer: int) -> Iterator[LayerWeights]:
        """Lend the weights of a layer on the device.

        Raises:
            RuntimeError: the weights could not be copied; the store goes on.
        """
        if self._residence.is_resident[layer]:
            self._ring.advance(layer)
            yield self._layers[layer]
            return
        with self._ring.use(layer) as buffer:
            yield self._view(layer, buffer)

    def bytes_per_s(self) -> float:
        """Measure copies of a layer, before anything uses the ring; nothing of it is counted."""
        assert not self._copier.num_copies, "the ring holds weights"
        layer = self._residence.streamed[0]
        trial = CountedCopies(self._pairs)
        seconds = []
        for _ in range(1 + _NUM_TRIALS):
            began = time.perf_counter()
            trial.copy(layer, 0)
            if self._memory.device.type == "cuda":
                torch.cuda.synchronize(self._memory.device)
            seconds.append(time.perf_counter() - began)
        # the first one reads the weights from disk, and takes the pages of the ring
        return trial.num_bytes / trial.num_copies / max(min(seconds[1:]), 1e-9)

    def check(self) -> None:
        """Raise RuntimeError if the bookkeeping is inconsistent."""
        self._ring.check()

    def _view(self, layer: int, buffer: int) -> LayerWeights:
        key = layer, buffer
        if key not in self._views:
            self._views[key] = packed_into(self._layers[layer], self._memory[buffer])
        return self._views[key]

    def _pairs(self, layer: int, buffer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        sources, targets = tensors_of(self._layers[layer]), tensors_of(self._view(layer, buffer))
        return list(zip(sources, targets, strict=True))


def _buffers(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return allocate_memory(shape, torch.uint8, device)
    return torch.empty(shape, dtype=torch.uint8, device=device)


def _copier_for(device: torch.device) -> Callable[[CopyPairs], _CountedCopier]:
    if device.type == "cuda":
        return lambda pairs: StreamCopies(pairs, device)
    return HostCopies
