"""What a measuring actor would wait for."""

import pytest

from raybatch.actors.executors.ray_pools import busy_resources


@pytest.mark.parametrize(
    ("wanted", "free", "total", "busy"),
    [
        ({"GPU": 1}, {"GPU": 1}, {"GPU": 2}, []),
        ({"GPU": 1}, {}, {"GPU": 2}, ["1 GPUs, of which 0 are free"]),
        ({"CPU": 2, "GPU": 0.5}, {"CPU": 1, "GPU": 1}, {"CPU": 4, "GPU": 1}, ["2 CPUs"]),
        ({"CPU": 0, "GPU": 0}, {}, {"CPU": 4}, []),
        ({"GPU": 1}, {}, {"CPU": 4}, []),
    ],
    ids=["free", "held", "one of two is held", "nothing wanted", "the cluster has none yet"],
)
def test_what_others_hold_is_told(wanted, free, total, busy):
    found = busy_resources(wanted, free, total)
    assert len(busy) == len(found)
    assert all(text.startswith(start) for text, start in zip(found, busy, strict=True))
