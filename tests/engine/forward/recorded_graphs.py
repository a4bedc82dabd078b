"""Graphs of tensor operations on any device, in place of CUDA graphs.

They find the errors of a real graph without a GPU.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NUM_WARM_UPS = 2


class CaptureError(RuntimeError):
    """A function reads values back to the host, or has shapes that depend on them."""


class RecordedGraphs:
    """Graphs as lists of tensor operations, repeated on the very tensors of the recording.

    As on a GPU, Python code of the function does not run again: numbers from the host are
    constants. Functions that a GPU cannot capture raise `CaptureError`.
    """

    def capture(self, function: Callable[[], None]) -> "Recording":
        for _ in range(_NUM_WARM_UPS):
            function()
        recording = Recording()
        with _NoReading(), _Operations(recording):
            function()
        return recording


class Recording:
    """The operations of one function.

    Callers add what is no operation of torch, such as a kernel of Triton's interpreter.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Record a function that uses the same memory in every call."""
        self._steps.append(step)

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self._steps:
            step()


class _Operations(TorchDispatchMode):
    """Records operations with their operands and results."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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
    """Refuses reads of tensor values by Python."""

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
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in self._READS:
            raise CaptureError(f"{func.__name__} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    aten, packet = torch.ops.aten, func.overloadpacket
    if packet in (aten.index, aten.index_put, aten.index_put_):
        # integer indices give a known shape, a mask does not
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if packet is aten.repeat_interleave and "Tensor" in func._overloadname:
        return True
    if torch.Tag.data_dependent_output in func.tags:
        return True
    return torch.Tag.dynamic_output_shape in func.tags


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
