"""Graphs of a device: a function's launches, recorded once and repeated without its Python code."""

from collections.abc import Callable
from typing import Protocol

import torch

# kernels are compiled and libraries take their memory before a capture, which allows neither
_NUM_WARM_UPS = 2


class Graph(Protocol):
    """A recorded function."""

    def replay(self) -> None:
        """Run what was recorded again, on the same memory."""


class Graphs(Protocol):
    """Records functions; those of one instance never run at the same time and share memory."""

    def capture(self, function: Callable[[], None]) -> Graph:
        """Run a function several times and return it as a graph.

        Args:
            function: reads and writes tensors that live as long as the graph; whatever else it
                makes is its own. The largest one comes first, so that others fit its memory.

        Raises:
            RuntimeError: it cannot be recorded.
        """


class CudaGraphs:
    """Graphs of CUDA, which share one pool of memory.

    Args:
        device: of the graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._device)
        # libraries keep their working memory by stream, so that warm-up and capture share one
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate meanwhile
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()
        return graph
