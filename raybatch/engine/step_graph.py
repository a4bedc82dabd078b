"""Graphs of a device: a function's launches, recorded once and repeated without its Python code.

`CudaGraphs` records on a GPU. `RecordedGraphs` records the tensor operations of any device and
repeats those, so that whatever a real graph would get wrong is found where there is no GPU.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CaptureError", "CudaGraphs", "Graph", "Graphs", "RecordedGraphs"]

# kernels are compiled and libraries take their memory before a capture, which allows neither
_NUM_WARM_UPS = 2


class CaptureError(RuntimeError):
    """A function reads values back to the host, or has shapes that depend on them."""


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


class RecordedGraphs:
    """Graphs as lists of tensor operations, repeated on the very tensors of the recording.

    As on a GPU, Python code of the function does not run again: a number that it took from the
    host stays what it was. What a capture on a GPU refuses raises `CaptureError` here.
    """

    def capture(self, function: Callable[[], None]) -> Graph:
        for _ in range(_NUM_WARM_UPS):
            function()
        recording = Recording()
        with _NoReading(), _Operations(recording):
            function()
        return recording


class Recording:
    """The operations of one function.

    What is no operation of torch, such as a kernel of Triton's interpreter, is added by whoever
    runs it.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Record something that works on the same memory whenever it is called."""
        self._steps.append(step)

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self._steps:
            step()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations with their operands and results."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if _depends_on_values(func, args):
            raise CaptureError(f"{func} has a result whose shape or value the host must know")
        made = func(*args, **kwargs)

        def repeat() -> None:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and not _is_same_memory(old, new):
                    old.copy_(new)

        self.recording.add(repeat)
        return made


class _NoReading(TorchFunctionMode):
    """Refuses the ways in which Python reads the values of a tensor."""

    _READS: ClassVar[frozenset[Any]] = frozenset(
        {
            torch.Tensor.tolist,
            torch.Tensor.numpy,
            torch.Tensor.item,
            torch.Tensor.cpu,
            torch.Tensor.__bool__,
            torch.Tensor.__int__,
            torch.Tensor.__float__,
            torch.Tensor.__index__,
            torch.Tensor.__array__,
            torch.Tensor.__contains__,
        }
    )

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - a function or method of torch
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func in self._READS:
            raise CaptureError(f"{func.__name__} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:  # noqa: ANN401
    aten, packet = torch.ops.aten, func.overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_):
        # whole numbers give a shape that is known, a mask does not
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave and "Tensor" in func._overloadname:
        return True
    if torch.Tag.data_dependent_output in func.tags:
        return True
    return torch.Tag.dynamic_output_shape in func.tags


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
