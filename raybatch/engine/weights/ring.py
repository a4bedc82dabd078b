"""A ring of buffers for the weights of layers: which layer is in which; no tensors.

```
layers of a pass   0   1   2   3   4   5     0 and 3 are resident, 1, 2, 4 and 5 pass through
used now               ^                     layer 1
buffers            | 1 | 2 |                 2 is on its way while 1 computes; 4 may come as soon
                                             as layer 2 or a later one is used
```
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from raybatch.errors import error_text

logger = logging.getLogger(__name__)

# what a copy may raise where memory or the device is short of something
_COPY_ERRORS = (RuntimeError, MemoryError, OSError)


class Transfer(Protocol):
    """A copy of one layer's weights into a buffer."""

    def is_done(self) -> bool:
        """Return whether the weights are there already."""

    def wait(self) -> None:
        """Let all that is computed from now on find the weights; raises where the copy failed."""


class WeightCopier(Protocol):
    """Copies weights from host memory into buffers of the device.

    Copies are carried out in the order in which they were begun, so that one that nobody has waited
    for may be followed by another one into the same buffer.
    """

    def mark(self) -> object:
        """Return a mark behind all that was computed so far."""

    def start(self, layer: int, buffer: int, after: object) -> Transfer:
        """Begin to copy, once what lies before the mark `after` (None: nothing) is computed."""


@dataclass(slots=True)
class _Buffer:
    """One layer's place.

    Args:
        layer: whose weights are here or on their way; None while there are none.
        transfer: that nobody has waited for yet.
        num_users: uses that have not ended.
        last_use: mark behind the last one.
    """

    layer: int | None = None
    transfer: Transfer | None = None
    num_users: int = 0
    last_use: object = None


class WeightRing:
    """Hands out buffers by layer; a buffer that is in use is never given to another layer.

    Copies run ahead in the order of the layers, from the last back to the first: at any layer, the
    ring holds or fetches those that come next, itself included.

    Args:
        layers: that pass through, ascending.
    """

    def __init__(self, layers: Sequence[int], num_buffers: int, copier: WeightCopier) -> None:
        self.num_stalls = 0
        self.num_failures = 0
        self._layers = tuple(layers)
        self._buffers = [_Buffer() for _ in range(num_buffers)]
        self._copier = copier

    @contextmanager
    def use(self, layer: int) -> Iterator[int]:
        """Lend the buffer with the weights of a layer, until the block ends.

        Raises:
            RuntimeError: the weights could not be copied, or all buffers are lent; the ring goes on
                as if there had been no call.
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
        """Raise RuntimeError if the bookkeeping is inconsistent."""
        held = [buffer.layer for buffer in self._buffers if buffer.layer is not None]
        if len(set(held)) != len(held) or not set(held) <= set(self._layers):
            raise RuntimeError(f"weight ring: buffers hold layers {held} of {self._layers}")
        for buffer in self._buffers:
            if buffer.num_users < 0 or (buffer.num_users and buffer.layer is None):
                raise RuntimeError(f"weight ring: {buffer.num_users} uses of layer {buffer.layer}")
            if buffer.transfer is not None and buffer.layer is None:
                raise RuntimeError("weight ring: weights of no layer are on their way")

    def _window(self, layer: int) -> tuple[int, ...]:
        """Return the layers that come next, from `layer` on, as many as there are buffers."""
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
        except _COPY_ERRORS as error:
            raise self._failure(layer, error) from error
        buffer.layer, buffer.transfer = layer, transfer

    def _wait(self, buffer: _Buffer, layer: int) -> None:
        if buffer.transfer is None:
            return
        self.num_stalls += not buffer.transfer.is_done()
        try:
            buffer.transfer.wait()
        except _COPY_ERRORS as error:
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
