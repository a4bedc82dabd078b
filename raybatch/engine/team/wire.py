"""Messages from a leader to its followers, in the order of one epoch."""

import numpy as np
import torch

from raybatch.engine.team.group import TeamGroup
from raybatch.engine.team.messages import HEAD_LEN, Head, Kind
from raybatch.errors import TeamError
from raybatch.records.arrays import Ints

# numbers of the buffer that every message has; longer ones have a second
_FIRST_LEN = 4096


class Wire:
    """Sends on rank 0, and receives on the others; every message is one broadcast, or two."""

    def __init__(self, group: TeamGroup, epoch: int) -> None:
        self._group, self._epoch, self._number = group, epoch, 0
        self._first = torch.zeros(_FIRST_LEN, dtype=torch.int64)

    def send(self, kind: Kind, body: Ints) -> None:
        """Send a message; raises TeamError where a follower is gone."""
        self._number += 1
        head = np.array([self._epoch, self._number, kind, len(body)], np.int64)
        message = torch.from_numpy(np.concatenate((head, body)))
        count = min(len(message), _FIRST_LEN)
        self._first[:count] = message[:count]
        self._group.broadcast_(self._first)
        if len(message) > _FIRST_LEN:
            self._group.broadcast_(message[_FIRST_LEN:].contiguous())

    def receive(self) -> tuple[Kind, Ints]:
        """Return the next message, valid until the one after it.

        Raises TeamError: there is none within the timeout, or it is of another epoch or order.
        """
        self._group.broadcast_(self._first)
        numbers = self._first.numpy()
        epoch, number, kind, length = numbers[:HEAD_LEN].tolist()
        self._number += 1
        if (epoch, number) != (self._epoch, self._number):
            raise TeamError(
                f"message {number} of epoch {epoch} came in place of message {self._number} of "
                f"epoch {self._epoch}"
            )
        head = Head(epoch, number, Kind(kind), length)
        body = numbers[HEAD_LEN : HEAD_LEN + length]
        if HEAD_LEN + head.length > _FIRST_LEN:
            rest = torch.zeros(HEAD_LEN + head.length - _FIRST_LEN, dtype=torch.int64)
            self._group.broadcast_(rest)
            body = np.concatenate((body, rest.numpy()))
        return head.kind, body
