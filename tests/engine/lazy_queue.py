"""A device's queue on a CPU, in which nothing is done before it must be."""

import torch

from raybatch.engine.memory.pinned import DeviceQueue


class LazyMark:
    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def synchronize(self):
        self.queue.waits.append(self.number)
        self.queue.run_to(self.number)


class LazyQueue(DeviceQueue):
    """Copies are made when somebody waits for them, so that what comes too early spoils them."""

    def __init__(self, *, runs_at_once=False):
        super().__init__(torch.device("cpu"))
        self.runs_at_once = runs_at_once
        self.pending, self.num_done, self.waits, self.sizes = [], 0, [], []

    def pinned(self, num_bytes):
        self.sizes.append(num_bytes)
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def copy(self, target, source):
        self.pending.append((target, source))
        if self.runs_at_once:
            self.run_to(len(self.pending))

    def mark(self):
        return LazyMark(self, len(self.pending))

    def run_to(self, stop):
        for target, source in self.pending[self.num_done : stop]:
            target.copy_(source)
        self.num_done = max(self.num_done, stop)
