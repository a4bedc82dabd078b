"""How what is no token travels: one text for one meaning, and an adapter that is found at once."""

import json

import numpy as np
import pytest

from raybatch.records import payload
from raybatch.records.payload import LORA, adapter_in, add_payload, with_images

IDS = np.array([1, 2], np.int32)


def test_equal_payloads_are_equal_texts():
    one = add_payload(add_payload(None, {LORA: "a"}), {"pooling": {"dimensions": 2}})
    other = add_payload(add_payload(None, {"pooling": {"dimensions": 2}}), {LORA: "a"})
    assert one == other
    assert json.loads(one) == {LORA: "a", "pooling": {"dimensions": 2}}


def test_images_make_equal_texts_whatever_came_first():
    one = add_payload(with_images(None, IDS, [b"file"]), {LORA: "a"})
    other = with_images(add_payload(None, {LORA: "a"}), IDS, [b"file"])
    assert one == other


def test_nothing_more_leaves_a_payload_as_it_is():
    assert (add_payload(None, {}), add_payload("{}", {})) == (None, "{}")


@pytest.mark.parametrize(
    ("keys", "adapter"),
    [
        ({}, None),
        ({LORA: 's3://b/\u00e4 "x"'}, 's3://b/\u00e4 "x"'),
        ({LORA: "a", "chat": {LORA: "b"}, "images": ["c"]}, "a"),
        ({"chat": {LORA: "b", "tools": [f'{{"{LORA}":"c"}}']}}, None),
        ({"prompt": f'{{"{LORA}":"c"}}'}, None),
    ],
    ids=["nothing", "quoted", "beside-others", "below", "in-a-text"],
)
def test_the_adapter_of_a_payload_is_the_one_at_its_top(keys, adapter):
    assert adapter_in(add_payload(None, keys)) == adapter


def test_the_adapter_is_the_first_of_all_keys():
    names = [name for name in vars(payload) if name.isupper()]
    assert min(getattr(payload, name) for name in names) == LORA


def test_what_follows_an_adapter_is_not_read():
    assert adapter_in(f'{{"{LORA}":"a","images":[never closed') == "a"
