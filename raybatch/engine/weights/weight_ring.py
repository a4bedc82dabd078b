"""Slots through which weights pass on their way to the decoder; knows no tensors.

```
fetches   2 3 0 | 6 7 4 | ..      in an order of their own, as far ahead as there are free slots
uses      0 2 3 | 4 6 7 | ..      a slot is free again once its unit was used
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

from raybatch.engine.memory.block_copies import COPY_ERRORS
from raybatch.engine.weights.weight_copies import HostCopies, Transfer
from raybatch.errors import error_text
from raybatch.policy.ownership import Unit

logger = logging.getLogger(__name__)


class SlotState(Enum):
    FREE = auto()
    RESERVED = auto()
    """For a unit whose copy has not begun."""
    FILLING = auto()
    READY = auto()
    IN_USE = auto()


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    # whose weights are here or on their way; of a free slot those that were here
    unit: Unit | None = None
    is_free: bool = True
    # that nobody has waited for yet
    transfer: Transfer | None = None
    # uses that have not ended, and the mark behind the last one that has
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
    """What was copied to the device since the start.

    Args:
        num_stalls: uses whose weights had not arrived.
        wait_s: that the host waited in them.
        num_restarts: uses in another order than expected.
    """

    num_copies: int = 0
    num_bytes: int = 0
    num_stalls: int = 0
    wait_s: float = 0.0
    num_failures: int = 0
    num_restarts: int = 0


class WeightRing:
    """Hands out slots by unit; a slot that is in use, or to be used, is never given to another one.

    Args:
        fetches: the units that pass through, in the order in which a pass fetches them.
        uses: in the order in which a pass uses them; others in between are passed over.
        num_slots: at least `raybatch.policy.ownership.least_slots`, or fetches are repeated.
    """

    def __init__(
        self, fetches: Sequence[Unit], uses: Sequence[Unit], num_slots: int, copier: HostCopies
    ) -> None:
        self.counters = WeightCounters()
        self._fetches = tuple(fetches)
        self._place = {unit: place for place, unit in enumerate(uses)}
        self._copier = copier
        self._slots = [_Slot(index) for index in range(num_slots)]
        # the longest free first
        self._free = deque(self._slots)
        self._held: dict[Unit, _Slot] = {}
        # that come next; when it is empty, another pass begins
        self._ahead = deque(self._fetches)

    @property
    def states(self) -> list[SlotState]:
        return [slot.state for slot in self._slots]

    @contextmanager
    def use(self, unit: Unit) -> Iterator[int]:
        """Lend the slot with the weights of a unit, until the block ends.

        Raises RuntimeError: the weights could not be copied, or all slots are lent; the ring goes
        on as if there had been no call.
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
        """Raise RuntimeError where the ring contradicts itself."""
        held = [slot.unit for slot in self._slots if slot.unit is not None]
        if len(set(held)) != len(held) or not set(held) <= set(self._fetches):
            raise RuntimeError(f"weight ring: slots hold {held} of {self._fetches}")
        if {unit: slot.index for unit, slot in self._held.items()} != {
            slot.unit: slot.index for slot in self._slots if slot.unit is not None
        }:
            raise RuntimeError(f"weight ring: {held} lie elsewhere than it knows")
        free = sorted(slot.index for slot in self._free)
        if free != [slot.index for slot in self._slots if slot.is_free]:
            raise RuntimeError(f"weight ring: slots {free} are not those that are free")
        for slot in self._slots:
            if slot.num_users < 0 or (slot.num_users and (slot.unit is None or slot.is_free)):
                raise RuntimeError(f"weight ring: {slot.num_users} uses of {slot.unit}")
            if slot.transfer is not None and slot.unit is None:
                raise RuntimeError("weight ring: weights of no unit are on their way")

    def _slot_of(self, unit: Unit) -> _Slot:
        """Return the slot that has a unit, or gets it now."""
        slot = self._held.get(unit)
        if slot is not None and not slot.is_free:
            return slot
        if unit not in self._ahead or self._num_before(unit) >= len(self._free):
            self._restart(unit)
        # no more than that unit, as what comes behind it may fail
        for _ in range(self._num_before(unit) + 1):
            if not self._free:
                raise RuntimeError("weight ring: every slot is in use")
            self._fetch_next()
        return self._held[unit]

    def _num_before(self, unit: Unit) -> int:
        """Return how many fetches come before that of a unit."""
        return self._ahead.index(unit)

    def _restart(self, unit: Unit) -> None:
        """Begin with a unit as if a pass did: fetch what it uses from there on, in order."""
        self.counters.num_restarts += 1
        for slot in self._slots:
            if not (slot.is_free or slot.num_users):
                self._release(slot)
        start = self._place[unit]
        later = [other for other in self._fetches if self._place[other] >= start]
        lent = [other for other in later if self._is_lent(other)]
        self._ahead = deque(other for other in later if other not in lent)
        if self._num_before(unit) >= len(self._free):
            # so few slots are free that it has to come first
            self._ahead.remove(unit)
            self._ahead.appendleft(unit)

    def _is_lent(self, unit: Unit) -> bool:
        slot = self._held.get(unit)
        return slot is not None and not slot.is_free

    def _release(self, slot: _Slot) -> None:
        slot.is_free = True
        self._free.append(slot)

    def _fetch_ahead(self) -> None:
        """Fill the free slots with what comes next, until all that passes through is there."""
        while self._free and len(self._slots) - len(self._free) < len(self._fetches):
            if not self._ahead:
                self._ahead.extend(self._fetches)
            try:
                self._fetch_next()
            except RuntimeError as error:
                # it is tried again when its unit is used, and ends the step only then
                logger.warning("%s; it is tried again", error)
                return

    def _fetch_next(self) -> None:
        """Fetch the next unit into a free slot; raises RuntimeError where its copy fails."""
        unit = self._ahead[0]
        slot = self._held.get(unit)
        if slot is None:
            slot = self._free[0]
            self._begin(slot, unit)
        self._ahead.popleft()
        # weights that are still here are lent again, and some no pass has used yet
        if slot.is_free:
            self._free.remove(slot)
            slot.is_free = False

    def _begin(self, slot: _Slot, unit: Unit) -> None:
        # the old weights may be overwritten from here on, also if the copy fails
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
            f"the weights of layer {unit.layer} could not be copied to the device: "
            f"{error_text(error)}"
        )
