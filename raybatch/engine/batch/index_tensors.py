"""Moves many small index arrays to the device in one copy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(
    arrays: Sequence[npt.NDArray[np.int64]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return one int64 tensor per array, all views of one buffer on `device`."""
    if not arrays:
        return ()
    packed = torch.from_numpy(np.concatenate(arrays, dtype=np.int64)).to(device)
    return torch.split(packed, [len(array) for array in arrays])
