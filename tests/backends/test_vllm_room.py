"""The blocks that vLLM's scheduler keeps free for running requests."""

from types import SimpleNamespace

import pytest

from raybatch.backends.vllm.patches import blocks_to_grow, leave_room

BLOCK = 16


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "blocks"),
    [(16, 100, 1), (12, 100, 0), (13, 100, 1), (13, 16, 0), (16, 16, 0), (31, 32, 0), (15, 17, 0)],
)
def test_a_request_grows_by_the_tokens_that_it_may_still_make(num_tokens, max_tokens, blocks):
    assert blocks_to_grow(num_tokens, max_tokens, BLOCK) == blocks


def waiting(num_prompt_tokens, max_tokens=8, status="WAITING"):
    return SimpleNamespace(
        status=SimpleNamespace(name=status),
        num_tokens=num_prompt_tokens,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
    )


class RecordingManager:
    def __init__(self, watermark_blocks):
        self.watermark_blocks = watermark_blocks
        self.watermarks = []

    def allocate_slots(self, request, num_new_tokens):
        self.watermarks.append(self.watermark_blocks)
        return num_new_tokens or None


def scheduler_of(manager, *running):
    scheduler = SimpleNamespace(kv_cache_manager=manager, running=list(running))
    scheduler.schedule = lambda: "a step"
    leave_room(scheduler, BLOCK)
    return scheduler


def test_a_request_that_starts_counts_for_later_ones_of_the_step():
    manager = RecordingManager(0)
    scheduler = scheduler_of(manager, waiting(32, status="RUNNING"), waiting(20, status="RUNNING"))
    scheduler.schedule()
    for tokens in (5, 0, 5):
        manager.allocate_slots(waiting(48), tokens)

    assert manager.watermarks == [2, 3, 3]


def test_every_step_starts_a_new_count():
    manager = RecordingManager(0)
    scheduler = scheduler_of(manager, waiting(32, status="RUNNING"))
    for _ in range(2):
        assert scheduler.schedule() == "a step"
        manager.allocate_slots(waiting(40), 5)
        scheduler.running[0].num_tokens = 20

    assert manager.watermarks == [1, 0]


def test_a_watermark_that_is_given_still_holds():
    manager = RecordingManager(7)
    scheduler_of(manager).schedule()
    manager.allocate_slots(waiting(48), 5)

    assert manager.watermarks == [7]


def test_an_engine_without_a_watermark_is_left_as_it_is():
    manager = SimpleNamespace(allocate_slots=print)
    scheduler_of(manager)

    assert manager.allocate_slots is print
