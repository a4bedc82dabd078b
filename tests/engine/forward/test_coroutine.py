"""Yield points of sequence coroutines; `tests/engine/test_runtime.py` runs the coroutines."""

from raybatch.engine.forward.coroutine import Module, YieldPoint


def test_points_follow_one_another_through_the_layers():
    first, later = YieldPoint(0, Module.ATTENTION), YieldPoint(1, Module.FFN)
    assert first.after() == YieldPoint(0, Module.FFN)
    assert first.after().after() == YieldPoint(1, Module.ATTENTION)
    assert sorted([later, first, first.after()]) == [first, first.after(), later]
