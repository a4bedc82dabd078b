"""Assigns slots to weights that are fetched ahead of use; torch-free.

```
fetches   2 3 0 | 6 7 4 | ..      in a separate order, ahead of use while there are free slots
uses      0 2 3 | 4 6 7 | ..      a slot is free once its unit was used
slot      free -> reserved -> filling -> ready -> in use -> free
```
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

from raybatch.engine.memory.swap import COPY_ERRORS
from raybatch.engine.weights.weight_copies import HostCopies, Transfer
from raybatch.errors import error_text
from raybatch.records.share import Unit

logger = logging.getLogger(__name__)


class SlotState(Enum):
    FREE = auto()
    RESERVED = auto()
    """For a unit whose copy has not started."""
    FILLING = auto()
    READY = auto()
    IN_USE = auto()


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    # unit whose weights are in the slot or in flight; for a free slot the previous ones
    unit: Unit | None = None
    is_free: bool = True
    # copy that no use has waited for yet
    transfer: Transfer | None = None
    # open uses, and the event after the last closed one
    num_users: int = 0
    last_use: object = None

    @property
    def state(self) -> SlotState:
        if self.is_free:
            return SlotState.FREE
        if self.num_users:
            return SlotState.IN_USE
        if self.transfer is None or self.transfer.is_done():
            return SlotState.READY
        return SlotState.FILLING if self.transfer.has_begun() else SlotState.RESERVED


@dataclass(kw_only=True, slots=True)
class WeightCounters:
    """Counters of weight copies to the device, since the start.

    Args:
        num_stalls: uses that had to wait for their weights.
        wait_s: seconds that the host waited in these uses.
        num_restarts: uses out of the expected order, after which fetches were queued again.
    """

    num_copies: int = 0
    num_bytes: int = 0
    num_stalls: int = 0
    wait_s: float = 0.0
    num_failures: int = 0
    num_restarts: int = 0


class WeightBufferPool:
    """Fetches units of weights into slots ahead of use, and lends the slots.

    A slot that is in use, or will be used next, is never reassigned.

    Args:
        fetches: streamed units, in the fetch order of a forward pass.
        uses: all units, in the order of use in a forward pass; those not in `fetches` are skipped.
        num_slots: number of slots; if a pass, which takes units in the order of `fetches` and
            frees them in that of `uses`, needs more, some units are fetched repeatedly.
    """

    def __init__(
        self, fetches: Sequence[Unit], uses: Sequence[Unit], num_slots: int, copier: HostCopies
    ) -> None:
        self.counters = WeightCounters()
        self._fetches = tuple(fetches)
        self._place = {unit: place for place, unit in enumerate(uses)}
        self._copier = copier
        self._slots = [_Slot(index) for index in range(num_slots)]
        # least recently freed first
        self._free = deque(self._slots)
        self._held: dict[Unit, _Slot] = {}
        # next fetches; refilled for the next pass when empty
        self._ahead = deque(self._fetches)

    @property
    def states(self) -> list[SlotState]:
        return [slot.state for slot in self._slots]

    @contextmanager
    def use(self, unit: Unit) -> Iterator[int]:
        """Yield the index of the slot with the weights of a unit, which stay there in the context.

        Raises RuntimeError: the weights could not be copied, or all slots are in use; the pool
        stays usable.
        """
        slot = self._slot_of(unit)
        self._wait(slot, unit)
        slot.num_users += 1
        try:
            self._fetch_ahead()
            yield slot.index
        finally:
            slot.num_users -= 1
            slot.last_use = self._copier.mark()
            if not slot.num_users:
                self._release(slot)
                self._fetch_ahead()

    def check(self) -> None:
        """Raise RuntimeError if an invariant is broken."""
        held = [slot.unit for slot in self._slots if slot.unit is not None]
        if len(set(held)) != len(held) or not set(held) <= set(self._fetches):
            raise RuntimeError(
                f"weight buffer pool: the slots hold {held}, with repeats or units that are not in "
                f"{self._fetches}"
            )
        if {unit: slot.index for unit, slot in self._held.items()} != {
            slot.unit: slot.index for slot in self._slots if slot.unit is not None
        }:
            raise RuntimeError(
                f"weight buffer pool: the recorded slots of {held} differ from the actual ones"
            )
        free = sorted(slot.index for slot in self._free)
        if free != [slot.index for slot in self._slots if slot.is_free]:
            raise RuntimeError(
                f"weight buffer pool: the free list {free} differs from the slots that are free"
            )
        for slot in self._slots:
            if slot.num_users < 0 or (slot.num_users and (slot.unit is None or slot.is_free)):
                raise RuntimeError(
                    f"weight buffer pool: {slot.unit} has {slot.num_users} users, "
                    "which is impossible"
                )
            if slot.transfer is not None and slot.unit is None:
                raise RuntimeError(
                    "weight buffer pool: a slot with a copy in flight belongs to no unit"
                )

    def _slot_of(self, unit: Unit) -> _Slot:
        """Return the slot of a unit; starts its fetch if needed."""
        slot = self._held.get(unit)
        if slot is not None and not slot.is_free:
            return slot
        if unit not in self._ahead or self._num_before(unit) >= len(self._free):
            self._restart(unit)
        # stop at that unit, as later fetches may fail
        for _ in range(self._num_before(unit) + 1):
            if not self._free:
                raise RuntimeError("weight buffer pool: every slot is in use")
            self._fetch_next()
        return self._held[unit]

    def _num_before(self, unit: Unit) -> int:
        """Return the number of fetches before that of a unit."""
        return self._ahead.index(unit)

    def _restart(self, unit: Unit) -> None:
        """Restart the pass at a unit: queue its fetches from there on, in order."""
        self.counters.num_restarts += 1
        for slot in self._slots:
            if not (slot.is_free or slot.num_users):
                self._release(slot)
        start = self._place[unit]
        later = [other for other in self._fetches if self._place[other] >= start]
        lent = [other for other in later if self._is_lent(other)]
        self._ahead = deque(other for other in later if other not in lent)
        if self._num_before(unit) >= len(self._free):
            # too few free slots: fetch this unit first
            self._ahead.remove(unit)
            self._ahead.appendleft(unit)

    def _is_lent(self, unit: Unit) -> bool:
        slot = self._held.get(unit)
        return slot is not None and not slot.is_free

    def _release(self, slot: _Slot) -> None:
        slot.is_free = True
        self._free.append(slot)

    def _fetch_ahead(self) -> None:
        """Fetch the next units into free slots, until all streamed units are present."""
        while self._free and len(self._slots) - len(self._free) < len(self._fetches):
            if not self._ahead:
                self._ahead.extend(self._fetches)
            try:
                self._fetch_next()
            except RuntimeError as error:
                # retried when the unit is used; only that failure ends the step
                logger.warning(
                    "could not fetch weights ahead of use: %s; retrying when their layer runs",
                    error,
                )
                return

    def _fetch_next(self) -> None:
        """Fetch the next unit into a free slot; raises RuntimeError if its copy fails."""
        unit = self._ahead[0]
        slot = self._held.get(unit)
        if slot is None:
            slot = self._free[0]
            self._begin(slot, unit)
        self._ahead.popleft()
        # reuse weights that are still in a slot, possibly unused ones
        if slot.is_free:
            self._free.remove(slot)
            slot.is_free = False

    def _begin(self, slot: _Slot, unit: Unit) -> None:
        # the old weights are invalid from here on, even if the copy fails
        self._forget(slot)
        try:
            transfer = self._copier.start(unit, slot.index, slot.last_use)
        except COPY_ERRORS as error:
            raise self._failure(unit, error) from error
        slot.unit, slot.transfer = unit, transfer
        self._held[unit] = slot

    def _forget(self, slot: _Slot) -> None:
        if slot.unit is not None:
            del self._held[slot.unit]
        slot.unit, slot.transfer = None, None

    def _wait(self, slot: _Slot, unit: Unit) -> None:
        transfer = slot.transfer
        if transfer is None:
            return
        began = None if transfer.is_done() else time.perf_counter()
        try:
            transfer.wait()
        except COPY_ERRORS as error:
            self._forget(slot)
            self._release(slot)
            raise self._failure(unit, error) from error
        slot.transfer = None
        if began is not None:
            self.counters.num_stalls += 1
            self.counters.wait_s += time.perf_counter() - began

    def _failure(self, unit: Unit, error: Exception) -> RuntimeError:
        self.counters.num_failures += 1
        return RuntimeError(
            f"could not copy the weights of layer {unit.layer} to the device: {error_text(error)}"
        )
