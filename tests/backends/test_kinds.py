"""Facts of the kinds of backends."""

from typing import get_args

from raybatch.backends.kinds import KINDS, facts_of
from raybatch.config import BackendConfig
from raybatch.config.engine import BackendKind


def test_there_are_facts_of_every_kind():
    assert set(KINDS) == set(get_args(BackendKind))


def test_a_kind_that_is_not_decided_promises_nothing_that_one_of_its_candidates_lacks():
    undecided, native, vllm = (facts_of(BackendConfig(kind=k)) for k in ("auto", "native", "vllm"))
    for name in KINDS["auto"].__slots__:
        assert getattr(undecided, name) <= min(getattr(native, name), getattr(vllm, name))
