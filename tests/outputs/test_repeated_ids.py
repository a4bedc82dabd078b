"""Ids that occur twice are found, whatever their number and however they come."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.outputs.repeated_ids import RepeatedIds, id_hashes


def repeated(chunks, **options):
    with RepeatedIds(sum(map(len, chunks)), **options) as ids:
        for chunk in chunks:
            ids.add(pa.chunked_array([pa.array(chunk, pa.string())]))
        return ids.repeated()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(max_size=4), max_size=8), max_size=6))
def test_as_many_ids_are_repeated_as_a_set_says(chunks):
    every = [one for chunk in chunks for one in chunk]
    assert len(every) - len(set(every)) == repeated(chunks, hashes_at_once=4)[0]


def test_the_hashes_of_a_repeated_id_are_told():
    _, examples = repeated([["a", "b"], ["b", "c"]], hashes_at_once=1)
    assert id_hashes(pa.chunked_array([["b"]])).tolist() == examples.tolist()


@pytest.mark.parametrize("ids", [["ab", "ba"], ["a", "aa"], ["", "\0"], ["a:1", "a:10"]])
def test_different_ids_have_different_hashes(ids):
    hashes = id_hashes(pa.chunked_array([ids]))
    assert (hashes[0] != hashes[1]).all()


def test_a_slice_of_an_array_has_the_hashes_of_its_ids():
    ids = pa.array(["x", "yy", "", "zzz"])
    whole = id_hashes(pa.chunked_array([ids]))
    assert np.array_equal(whole[1:3], id_hashes(pa.chunked_array([ids.slice(1, 2)])))
