"""A buffer of the ring is never overwritten while its layer is in use, whatever copies do."""

import random
from contextlib import ExitStack

import pytest

from raybatch.engine.weights.layer_store import WeightRing

LAYERS = (1, 2, 4, 5, 7)


class Link:
    """Copies that end when they like, in order, and fail when they like."""

    def __init__(self, num_buffers, seed=0, failures=0.0):
        self.held = [None] * num_buffers
        self.lent = [0] * num_buffers
        self.started = []
        self.num_marks = 0
        self._open = []
        self._random = random.Random(seed)
        self.failures = failures

    def mark(self):
        self.num_marks += 1
        return self.num_marks

    def start(self, layer, buffer, after):
        assert not self.lent[buffer], f"buffer {buffer} is overwritten while it is in use"
        # nothing that was computed with what lay here may still be on its way
        assert after is None or after <= self.num_marks
        self.started.append((layer, buffer, after))
        # torn from here on
        self.held[buffer] = None
        if self._random.random() < self.failures:
            raise OSError("the link is down (start)")
        transfer = Copy(self, layer, buffer)
        self._open.append(transfer)
        return transfer

    def go_on(self, count):
        for transfer in self._open[:count]:
            self.held[transfer.buffer] = transfer.layer
            transfer.has_ended = True
        del self._open[:count]

    def some_time(self):
        self.go_on(self._random.randint(0, 2))

    def finish(self, transfer):
        if transfer.is_broken or self._random.random() < self.failures:
            # and does not mend
            transfer.is_broken = True
            raise OSError("the link is down (wait)")
        if not transfer.has_ended:
            self.go_on(1 + self._open.index(transfer))


class Copy:
    def __init__(self, link, layer, buffer):
        self.link, self.layer, self.buffer = link, layer, buffer
        self.has_ended = self.is_broken = False

    def is_done(self):
        return self.has_ended

    def wait(self):
        self.link.finish(self)


def use(ring, link, layer):
    """Use a layer as the decoder does, while copies go on."""
    with ring.use(layer) as buffer:
        link.lent[buffer] += 1
        try:
            for _ in range(3):
                assert layer == link.held[buffer], "the weights are not there"
                link.some_time()
        finally:
            link.lent[buffer] -= 1


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_passes_find_each_layer_and_copy_it_once(num_buffers, seed):
    link = Link(num_buffers, seed)
    ring = WeightRing(LAYERS, num_buffers, link)
    num_passes = 6
    for _ in range(num_passes):
        for layer in range(9):
            # attention of three parts, then their feed-forward block
            for _ in range(4):
                use(ring, link, layer) if layer in LAYERS else ring.advance(layer)
            ring.check()
    if num_buffers >= len(LAYERS):
        assert len(link.started) == len(LAYERS)
        return
    # and what comes first in the next pass, on its way already
    assert len(link.started) == num_passes * len(LAYERS) + num_buffers
    assert [layer for layer, _, _ in link.started[: len(LAYERS)]] == list(LAYERS)


def test_the_next_layer_is_on_its_way_while_one_computes():
    link = Link(2)
    ring = WeightRing(LAYERS, 2, link)
    with ring.use(1):
        assert [1, 2] == [layer for layer, _, _ in link.started]
    with ring.use(2):
        assert [1, 2, 4] == [layer for layer, _, _ in link.started]
    # a resident layer leaves time for one more
    ring.advance(3)
    ring.advance(6)
    assert [1, 2, 4, 5, 7, 1] == [layer for layer, _, _ in link.started]


def test_a_copy_waits_for_what_used_its_buffer_last():
    link = Link(2)
    ring = WeightRing(LAYERS, 2, link)
    for layer in LAYERS:
        use(ring, link, layer)
    # the third copy follows the first use, and so on
    assert [None, None, 1, 2, 3, 4] == [after for _, _, after in link.started]


def test_layers_that_are_not_there_yet_are_counted():
    link = Link(2)
    ring = WeightRing(LAYERS, 2, link)
    with ring.use(1):
        pass
    assert ring.num_stalls == 1
    link.go_on(2)
    with ring.use(2):
        pass
    assert ring.num_stalls == 1


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_random_uses_and_failing_copies_leave_the_ring_usable(num_buffers, seed):
    choice = random.Random(seed)
    link = Link(num_buffers, seed, failures=0.2)
    ring = WeightRing(LAYERS, num_buffers, link)
    said = []
    for _ in range(300):
        layer = choice.randrange(9)
        try:
            use(ring, link, layer) if layer in LAYERS else ring.advance(layer)
        except RuntimeError as error:
            said.append((layer, str(error)))
        ring.check()
        assert not any(link.lent)
    link.failures = 0.0
    for layer in LAYERS:
        use(ring, link, layer)
    for layer, text in said:
        assert f"the weights of layer {layer} could not be copied" in text
        assert "OSError: the link is down" in text
    assert ring.num_failures >= len(said) > 10


def test_a_failed_copy_ahead_is_tried_again_when_its_layer_runs():
    link = Link(2)
    ring = WeightRing(LAYERS, 2, link)
    with ring.use(1):
        pass
    link.failures = 1.0
    ring.advance(3)
    link.failures = 0.0
    use(ring, link, 4)
    assert ring.num_failures == 1


def test_an_error_of_the_computation_gives_the_buffer_back():
    link = Link(1)
    ring = WeightRing(LAYERS, 1, link)
    with pytest.raises(KeyError), ring.use(1):
        raise KeyError("of a kernel")
    use(ring, link, 2)


def test_more_layers_at_once_than_buffers_are_refused():
    link = Link(2)
    ring = WeightRing(LAYERS, 2, link)
    with ExitStack() as stack:
        stack.enter_context(ring.use(1))
        stack.enter_context(ring.use(5))
        with pytest.raises(RuntimeError, match="every buffer is in use"):
            stack.enter_context(ring.use(7))
    use(ring, link, 7)
    ring.check()
