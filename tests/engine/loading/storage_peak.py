"""Peak bytes of storages, on a device without data."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoragePeak(TorchDispatchMode):
    """Counts storages of a device from their creation until they are freed."""

    def __init__(self, device=None):
        super().__init__()
        self.device = device or torch.device("meta")
        self.live, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        # storages from before the step do not count
        known = {id(t.untyped_storage()) for t in tensors_of((args, kwargs), self.device)}
        for tensor in tensors_of(made, self.device):
            storage = tensor.untyped_storage()
            key = id(storage)
            if key in self.live or key in known:
                continue
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.peak = max(self.peak, sum(self.live.values()))
        return made


def tensors_of(tree, device):
    leaves = tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.device == device]


def measure(run):
    counted = StoragePeak()
    with counted:
        run()
    return counted.peak
