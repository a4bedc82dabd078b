"""A weight buffer is never overwritten before its unit was used, in any order of copies."""

import random
from contextlib import ExitStack

import pytest

from raybatch.engine.weights.weight_buffers import SlotState, WeightBufferPool
from raybatch.records.share import Unit
from raybatch_extensions.sharing.ownership import Ownership

LAYERS = tuple(Unit(layer) for layer in (1, 2, 4, 5, 7))


def in_order(num_slots, link, units=LAYERS):
    return WeightBufferPool(units, units, num_slots, link)


class Link:
    """Copies that end at random times, in order, and fail at random."""

    def __init__(self, num_slots, seed=0, failures=0.0):
        self.held = [None] * num_slots
        self.lent = [0] * num_slots
        self.started = []
        self.num_marks = 0
        self._open = []
        self._random = random.Random(seed)
        self.failures = failures

    def mark(self):
        self.num_marks += 1
        return self.num_marks

    def start(self, unit, slot, after):
        assert not self.lent[slot], f"slot {slot} is overwritten while it is in use"
        # no computation that reads this slot may still run
        assert after is None or after <= self.num_marks
        self.started.append((unit, slot, after))
        # torn from here on
        self.held[slot] = None
        if self._random.random() < self.failures:
            raise OSError("the link is down (start)")
        transfer = Copy(self, unit, slot)
        self._open.append(transfer)
        return transfer

    def go_on(self, count):
        for transfer in self._open[:count]:
            self.held[transfer.slot] = transfer.unit
            transfer.has_ended = True
        del self._open[:count]

    def some_time(self):
        self.go_on(self._random.randint(0, 2))

    def finish(self, transfer):
        if transfer.is_broken or self._random.random() < self.failures:
            # fails again
            transfer.is_broken = True
            raise OSError("the link is down (wait)")
        if not transfer.has_ended:
            self.go_on(1 + self._open.index(transfer))


class Copy:
    def __init__(self, link, unit, slot):
        self.link, self.unit, self.slot = link, unit, slot
        self.has_ended = self.is_broken = False

    def has_begun(self):
        return self.link._open[0] is self or self.has_ended

    def is_done(self):
        return self.has_ended

    def wait(self):
        self.link.finish(self)


def use(buffers, link, unit):
    """Use a unit as the decoder does, while copies run."""
    with buffers.use(unit) as slot:
        link.lent[slot] += 1
        try:
            for _ in range(3):
                assert unit == link.held[slot], "the weights are not there"
                link.some_time()
        finally:
            link.lent[slot] -= 1


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_passes_find_each_unit_and_copy_it_once(num_slots, seed):
    link = Link(num_slots, seed)
    buffers = in_order(num_slots, link)
    num_passes = 6
    for _ in range(num_passes):
        for unit in LAYERS:
            use(buffers, link, unit)
            buffers.check()
    assert buffers.counters.num_restarts == 0
    if num_slots >= len(LAYERS):
        assert len(link.started) == len(LAYERS)
        return
    # and the copy of the first unit of the next pass has begun
    assert len(link.started) == num_passes * len(LAYERS) + num_slots
    assert [unit for unit, _, _ in link.started[: len(LAYERS)]] == list(LAYERS)


def test_the_next_unit_is_copied_while_one_computes_and_after_it():
    link = Link(2)
    buffers = in_order(2, link)
    with buffers.use(Unit(1)):
        assert [1, 2] == [unit.layer for unit, _, _ in link.started]
    # its slot is free at once, while attention of the next layer computes
    assert [1, 2, 4] == [unit.layer for unit, _, _ in link.started]


def test_states_of_slots_follow_their_copies():
    link = Link(3)
    buffers = in_order(3, link)
    assert [SlotState.FREE] * 3 == buffers.states
    with buffers.use(Unit(1)):
        assert [SlotState.IN_USE, SlotState.FILLING, SlotState.RESERVED] == buffers.states
        link.go_on(1)
        assert [SlotState.IN_USE, SlotState.READY, SlotState.FILLING] == buffers.states
    assert [SlotState.RESERVED, SlotState.READY, SlotState.FILLING] == buffers.states


def test_a_copy_waits_for_the_last_use_of_its_slot():
    link = Link(2)
    buffers = in_order(2, link)
    for unit in LAYERS:
        use(buffers, link, unit)
    # the third copy follows the first use, and so on
    assert [None, None, 1, 2, 3, 4, 5] == [after for _, _, after in link.started]


def test_waits_for_units_are_counted():
    link = Link(2)
    buffers = in_order(2, link)
    with buffers.use(Unit(1)):
        pass
    assert buffers.counters.num_stalls == 1
    link.go_on(2)
    with buffers.use(Unit(2)):
        pass
    assert buffers.counters.num_stalls == 1


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_random_uses_and_failing_copies_leave_the_buffers_usable(num_slots, seed):
    choice = random.Random(seed)
    link = Link(num_slots, seed, failures=0.2)
    buffers = in_order(num_slots, link)
    messages = []
    for _ in range(300):
        try:
            use(buffers, link, choice.choice(LAYERS))
        except RuntimeError as error:
            messages.append(str(error))
        buffers.check()
        assert not any(link.lent)
    link.failures = 0.0
    for unit in LAYERS:
        use(buffers, link, unit)
    for text in messages:
        assert "to the device: OSError: the link is down" in text
    assert buffers.counters.num_failures >= len(messages) > 10


def test_a_failed_copy_ahead_is_tried_again_when_its_unit_is_used():
    link = Link(2)
    buffers = in_order(2, link)
    link.failures = 1.0
    with pytest.raises(RuntimeError, match="the weights of layer 1"):
        use(buffers, link, Unit(1))
    link.failures = 0.0
    for unit in LAYERS:
        use(buffers, link, unit)
    assert buffers.counters.num_failures == 1
    buffers.check()


def test_a_pass_that_fails_leaves_the_buffers_correct():
    link = Link(3, seed=1)
    group = Ownership(size=4, num_layers=10)
    buffers = WeightBufferPool(group.fetches(1), group.uses(1), 3, link)
    fetched = set(group.fetches(1))
    for stop in (10, 3, 7, 1, 10, 10):
        for unit in [unit for unit in group.uses(1) if unit in fetched][:stop]:
            use(buffers, link, unit)
            buffers.check()


def test_an_error_of_the_computation_gives_the_slot_back():
    link = Link(1)
    buffers = in_order(1, link)
    with pytest.raises(KeyError), buffers.use(Unit(1)):
        raise KeyError("of a kernel")
    use(buffers, link, Unit(2))


def test_more_units_at_once_than_slots_are_refused():
    link = Link(2)
    buffers = in_order(2, link)
    with ExitStack() as stack:
        stack.enter_context(buffers.use(Unit(1)))
        stack.enter_context(buffers.use(Unit(5)))
        with pytest.raises(RuntimeError, match="every slot is in use"):
            stack.enter_context(buffers.use(Unit(7)))
    use(buffers, link, Unit(7))
    buffers.check()


@pytest.mark.parametrize("by", ["layer", "shard"])
@pytest.mark.parametrize("order", ["shifted", "in_order"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_hundred_thousand_layers_with_delays_and_failing_copies(by, order, size):
    group = Ownership(size=size, num_layers=80, by=by, order=order)
    for num_slots in {group.least_slots, group.default_slots}:
        link = Link(num_slots, seed=size, failures=0.001)
        buffers = WeightBufferPool(group.fetches(1), group.uses(1), num_slots, link)
        slots = [id(slot) for slot in buffers._slots]
        uses = [unit for unit in group.uses(1) if group.owner(unit) != 1]
        num_used = num_failed = 0
        while num_used < 100_000 // 4:
            try:
                for unit in uses:
                    use(buffers, link, unit)
                    num_used += 1
            except RuntimeError:
                # the step ends, and the next one begins with the first layer
                num_failed += 1
        buffers.check()
        assert [id(slot) for slot in buffers._slots] == slots
        assert num_failed > 5
        # a pass that fails restarts; no other use is out of order
        assert buffers.counters.num_restarts <= 2 * num_failed
        # copies are repeated only after failures
        assert len(link.started) <= num_used + (num_failed + 1) * 2 * num_slots + num_failed


def test_fewer_slots_than_the_order_needs_cost_copies_and_never_hang():
    group = Ownership(size=4, num_layers=8)
    link = Link(1)
    buffers = WeightBufferPool(group.fetches(1), group.uses(1), 1, link)
    uses = [unit for unit in group.uses(1) if group.owner(unit) != 1]
    for unit in 3 * uses:
        use(buffers, link, unit)
    assert buffers.counters.num_restarts > 0
