"""Adapters in the hands of an engine: loaded once, refused for a while, and tried again."""

from typing import NamedTuple

import pytest

from raybatch.backends.vllm.lora import VllmAdapters
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
        self.asked = []
        self.now_s = 1000.0

    def load(self, request):
        self.asked.append(request)
        if self.error is not None:
            raise self.error

    def clock(self):
        return self.now_s


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def adapters(told):
    return VllmAdapters(LoRARequest, told.load, clock=told.clock)


def refusal(adapters, source="/a"):
    with pytest.raises(RequestRefused) as raised:
        adapters.find(source)
    return str(raised.value)


def test_an_adapter_is_loaded_once(adapters, told):
    assert [adapters.find("/a").lora_path for _ in range(2)] == ["/a", "/a"]
    assert len(told.asked) == 1


def test_a_row_without_an_adapter_loads_none(adapters, told):
    assert (adapters.find(None), told.asked) == (None, [])


def test_an_adapter_that_has_failed_is_refused_without_another_try(adapters, told):
    told.error = OSError("the bucket is away")
    said = refusal(adapters)
    told.error = None
    told.now_s += 59
    assert said == "the adapter '/a' cannot be loaded: OSError: the bucket is away"
    assert (refusal(adapters), len(told.asked)) == (said, 1)


def test_an_adapter_that_has_failed_is_tried_again_after_a_minute(adapters, told):
    told.error = OSError("the bucket is away")
    refusal(adapters)
    told.error = None
    told.now_s += 60
    assert adapters.find("/a").lora_path == "/a"


def test_no_two_tries_have_one_id(adapters, told):
    adapters.find("/a")
    told.error = RuntimeError("no")
    refusal(adapters, "/b")
    told.error = None
    adapters.find("/c")
    told.now_s += 60
    adapters.find("/b")
    assert len({request.lora_int_id for request in told.asked}) == 4
