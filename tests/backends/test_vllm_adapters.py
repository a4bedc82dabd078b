"""Adapters in the hands of an engine: loaded once, refused for a while, and tried again."""

from typing import NamedTuple

import pytest

from raybatch.backends.vllm.frontend import VllmAdapters
from raybatch.backends.vllm.requests import RequestRefused


class LoRARequest(NamedTuple):
    """Has the fields of vLLM's that are used."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Told:
    """An engine that loads adapters, or breaks; and its clock."""

    def __init__(self):
        self.error = None
        self.requested = []
        self.now_s = 1000.0

    def load(self, request):
        self.requested.append(request)
        if self.error is not None:
            raise self.error

    def clock(self):
        return self.now_s


@pytest.fixture
def reported():
    return Told()


@pytest.fixture
def adapters(reported):
    return VllmAdapters(LoRARequest, reported.load, clock=reported.clock)


def refusal(adapters, source="/a"):
    with pytest.raises(RequestRefused) as raised:
        adapters.find(source)
    return str(raised.value)


def test_an_adapter_is_loaded_once(adapters, reported):
    assert [adapters.find("/a").lora_path for _ in range(2)] == ["/a", "/a"]
    assert len(reported.requested) == 1


def test_a_row_without_an_adapter_loads_none(adapters, reported):
    assert (adapters.find(None), reported.requested) == (None, [])


def test_an_adapter_that_has_failed_is_refused_without_another_try(adapters, reported):
    reported.error = OSError("the bucket is away")
    message = refusal(adapters)
    reported.error = None
    reported.now_s += 59
    assert message == "the adapter '/a' cannot be loaded: OSError: the bucket is away"
    assert (refusal(adapters), len(reported.requested)) == (message, 1)


def test_an_adapter_that_has_failed_is_tried_again_after_a_minute(adapters, reported):
    reported.error = OSError("the bucket is away")
    refusal(adapters)
    reported.error = None
    reported.now_s += 60
    assert adapters.find("/a").lora_path == "/a"


def test_no_two_tries_have_one_id(adapters, reported):
    adapters.find("/a")
    reported.error = RuntimeError("no")
    refusal(adapters, "/b")
    reported.error = None
    adapters.find("/c")
    reported.now_s += 60
    adapters.find("/b")
    assert len({request.lora_int_id for request in reported.requested}) == 4
