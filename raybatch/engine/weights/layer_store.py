"""Lends the weights of layers to the decoder: all on the device, or some through a ring.

```
layers of a pass   0   1   2   3   4   5     0 and 3 are resident, 1, 2, 4 and 5 pass through
used now               ^                     layer 1
buffers            | 1 | 2 |                 2 is on its way while 1 computes; 4 may come as soon
                                             as layer 2 or a later one is used
```
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from raybatch.engine.memory.block_copies import COPY_ERRORS
from raybatch.engine.memory.kv_cache import trial_copy_s
from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.engine.weights.loading import LayerWeights
from raybatch.errors import error_text
from raybatch.policy.residence import Residence

# source and target of each tensor of a layer, by layer and buffer
CopyPairs = Callable[[int, int], list[tuple[torch.Tensor, torch.Tensor]]]

logger = logging.getLogger(__name__)


class Transfer(NamedTuple):
    """A copy of one layer's weights into a buffer."""

    is_done: Callable[[], bool]
    # lets all that is computed from now on find them; raises where the copy failed
    wait: Callable[[], None]


class HostCopies:
    """Copies within the memory of a CPU, made when a layer is waited for.

    A core that copies does not compute, so nothing is gained by copying ahead, and a layer that has
    just been copied is in the processor's cache. Copies are carried out in the order in which they
    were begun, so that one that nobody has waited for may be followed by another one into the same
    buffer.
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

    def mark(self) -> object:
        """Return a mark behind all that was computed so far; here nothing, as that is done."""
        return None

    def start(self, layer: int, buffer: int, after: object) -> Transfer:
        """Begin to copy, once what lies before the mark `after` (None: nothing) is computed."""
        return Transfer(is_done=lambda: False, wait=lambda: self.copy(layer, buffer))


class StreamCopies(HostCopies):
    """Transfers from pinned memory to a GPU, on a stream of their own.

    A transfer waits for the kernels that used its buffer before, and the kernels of its layer wait
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

    def start(self, layer: int, buffer: int, after: object) -> Transfer:
        with torch.cuda.stream(self._stream):
            if isinstance(after, torch.cuda.Event):
                self._stream.wait_event(after)
            self.copy(layer, buffer)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return Transfer(
            is_done=done.query,
            wait=lambda: torch.cuda.current_stream(self._device).wait_event(done),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCounters:
    """What was copied to the device since the start."""

    num_copies: int = 0
    num_bytes: int = 0
    # layers whose weights had not arrived when they were needed
    num_stalls: int = 0
    num_failures: int = 0


class ResidentLayers:
    """All layers on the device: the decoder borrows them with `use`, as of `StreamedLayers`."""

    is_streamed = False
    counters = WeightCounters()

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._uses = tuple(nullcontext(layer) for layer in layers)

    def use(self, layer: int) -> nullcontext[LayerWeights]:
        return self._uses[layer]


class StreamedLayers:
    """Some layers on the device, the others in host memory behind a ring; owned by one thread."""

    is_streamed = True

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        residence: Residence,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], HostCopies] | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._residence = residence
        num_bytes = max(packed_bytes(layers[layer]) for layer in residence.streamed)
        shape = (residence.num_buffers, num_bytes)
        if device.type == "cuda":
            self._memory = torch.empty(shape, dtype=torch.uint8, device=device)
            make_copier = make_copier or partial(StreamCopies, device=device)
        else:
            self._memory = allocate_memory(shape, torch.uint8, device)
        self._views: dict[tuple[int, int], LayerWeights] = {}
        self._copier = (make_copier or HostCopies)(self._pairs)
        self._ring = WeightRing(residence.streamed, residence.num_buffers, self._copier)

    @property
    def counters(self) -> WeightCounters:
        return WeightCounters(
            num_copies=self._copier.num_copies,
            num_bytes=self._copier.num_bytes,
            num_stalls=self._ring.num_stalls,
            num_failures=self._ring.num_failures,
        )

    @contextmanager
    def use(self, layer: int) -> Iterator[LayerWeights]:
        """Lend the weights of a layer on the device; they may be gone when the block ends.

        Raises RuntimeError: the weights could not be copied; the store goes on.
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
        trial = HostCopies(self._pairs)
        copy = partial(trial.copy, self._residence.streamed[0], 0)
        seconds = trial_copy_s(copy, self._memory.device)
        return trial.num_bytes / trial.num_copies / seconds

    def check(self) -> None:
        self._ring.check()

    def _view(self, layer: int, buffer: int) -> LayerWeights:
        key = layer, buffer
        if key not in self._views:
            self._views[key] = packed_into(self._layers[layer], self._memory[buffer])
        return self._views[key]

    def _pairs(self, layer: int, buffer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        sources, targets = tensors_of(self._layers[layer]), tensors_of(self._view(layer, buffer))
        return list(zip(sources, targets, strict=True))


@dataclass(slots=True)
class _Buffer:
    # whose weights are here or on their way
    layer: int | None = None
    # that nobody has waited for yet
    transfer: Transfer | None = None
    # uses that have not ended, and the mark behind the last one that has
    num_users: int = 0
    last_use: object = None


# where the decoder gets the weights of its layers; using a streamed one may copy it
LayerStore = ResidentLayers | StreamedLayers


class WeightRing:
    """Hands out buffers by layer; a buffer that is in use is never given to another layer.

    Copies run ahead in the order of the layers, from the last back to the first: at any layer, the
    ring holds or fetches those that come next, itself included. The layers that pass through are
    given in ascending order.
    """

    def __init__(self, layers: Sequence[int], num_buffers: int, copier: HostCopies) -> None:
        self.num_stalls = 0
        self.num_failures = 0
        self._layers = tuple(layers)
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._copier = copier

    @contextmanager
    def use(self, layer: int) -> Iterator[int]:
        """Lend the buffer with the weights of a layer, until the block ends.

        Raises RuntimeError: the weights could not be copied, or all buffers are lent; the ring goes
        on as if there had been no call.
        """
        window = self._window(layer)
        idx = self._find(layer)
        if idx is None:
            idx = self._claim(window)
            self._begin(idx, layer)
        buffer = self._buffers[idx]
        self._wait(buffer, layer)
        buffer.num_users += 1
        try:
            self._prefetch(window)
            yield idx
        finally:
            buffer.num_users -= 1
            buffer.last_use = self._copier.mark()

    def advance(self, layer: int) -> None:
        """Note that a pass is at a layer that does not pass through, and fetch what comes next."""
        self._prefetch(self._window(layer))

    def check(self) -> None:
        held = [buffer.layer for buffer in self._buffers if buffer.layer is not None]
        if len(set(held)) != len(held) or not set(held) <= set(self._layers):
            raise RuntimeError(f"weight ring: buffers hold layers {held} of {self._layers}")
        for buffer in self._buffers:
            if buffer.num_users < 0 or (buffer.num_users and buffer.layer is None):
                raise RuntimeError(f"weight ring: {buffer.num_users} uses of layer {buffer.layer}")
            if buffer.transfer is not None and buffer.layer is None:
                raise RuntimeError("weight ring: weights of no layer are on their way")

    def _window(self, layer: int) -> tuple[int, ...]:
        # the layers that come next, from `layer` on, as many as there are buffers
        first, count = bisect_left(self._layers, layer), len(self._layers)
        return tuple(
            self._layers[(first + i) % count] for i in range(min(count, len(self._buffers)))
        )

    def _find(self, layer: int) -> int | None:
        held = (i for i, buffer in enumerate(self._buffers) if buffer.layer == layer)
        return next(held, None)

    def _claim(self, window: tuple[int, ...]) -> int:
        """Return a buffer that nobody uses, of the layer that is wanted last."""
        free = [i for i, buffer in enumerate(self._buffers) if not buffer.num_users]
        if not free:
            raise RuntimeError("weight ring: every buffer is in use")
        held = {i: self._buffers[i].layer for i in free}
        return max(free, key=lambda i: window.index(held[i]) if held[i] in window else len(window))

    def _begin(self, idx: int, layer: int) -> None:
        buffer = self._buffers[idx]
        # the old weights may be overwritten from here on, also if the copy fails
        buffer.layer, buffer.transfer = None, None
        try:
            transfer = self._copier.start(layer, idx, buffer.last_use)
        except COPY_ERRORS as error:
            raise self._failure(layer, error) from error
        buffer.layer, buffer.transfer = layer, transfer

    def _wait(self, buffer: _Buffer, layer: int) -> None:
        if buffer.transfer is None:
            return
        self.num_stalls += not buffer.transfer.is_done()
        try:
            buffer.transfer.wait()
        except COPY_ERRORS as error:
            buffer.layer, buffer.transfer = None, None
            raise self._failure(layer, error) from error
        buffer.transfer = None

    def _prefetch(self, window: tuple[int, ...]) -> None:
        for layer in window:
            if self._find(layer) is not None:
                continue
            free = (
                i
                for i, buffer in enumerate(self._buffers)
                if not buffer.num_users and buffer.layer not in window
            )
            idx = next(free, None)
            if idx is None:
                return
            try:
                self._begin(idx, layer)
            except RuntimeError as error:
                # it is tried again when its layer runs, and ends the step only then
                logger.warning("%s; it is tried again", error)
                return

    def _failure(self, layer: int, error: Exception) -> RuntimeError:
        self.num_failures += 1
        return RuntimeError(
            f"the weights of layer {layer} could not be copied to the device: {error_text(error)}"
        )
