"""Ids that occur twice are found, whatever their number and however they come."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.planning.source_checks import RepeatedIds, as_texts, id_hashes


def repeated(chunks, **options):
    with RepeatedIds(sum(map(len, chunks)), **options) as ids:
        row = 0
        for chunk in chunks:
            ids.add(pa.chunked_array([pa.array(chunk, pa.string())]), first_row=row)
            row += len(chunk)
        return ids.repeated()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.text(max_size=4), max_size=8), max_size=6))
def test_as_many_ids_are_repeated_as_a_set_says(chunks):
    every = [one for chunk in chunks for one in chunk]
    found = repeated(chunks, hashes_at_once=4)
    assert len(every) - len(set(every)) == found.num_rows
    assert sum(every.count(one) > 1 for one in set(every)) == found.num_ids
    places = [[i for i, other in enumerate(every) if other == one] for one in every]
    first = next(((rows[0], rows[1]) for rows in places if len(rows) > 1), None)
    assert first == found.first


def test_the_hashes_of_a_repeated_id_are_told():
    found = repeated([["a", "b"], ["b", "c"]], hashes_at_once=1)
    assert id_hashes(pa.chunked_array([["b"]])).tolist() == found.examples.tolist()


@pytest.mark.parametrize("ids", [["ab", "ba"], ["a", "aa"], ["", "\0"], ["a:1", "a:10"]])
def test_different_ids_have_different_hashes(ids):
    hashes = id_hashes(pa.chunked_array([ids]))
    assert (hashes[0] != hashes[1]).all()


def test_a_slice_of_an_array_has_the_hashes_of_its_ids():
    ids = pa.array(["x", "yy", "", "zzz"])
    whole = id_hashes(pa.chunked_array([ids]))
    assert np.array_equal(whole[1:3], id_hashes(pa.chunked_array([ids.slice(1, 2)])))


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([1, 2, 10, -1]),
        pa.array([b"a", b"b", b"", b"ab"]),
        pa.array(["a", "b", "", "ab"]).dictionary_encode(),
        pa.array([0.1, 0.2, 1e300, -0.5]),
        pa.array([i.to_bytes(16, "big") for i in range(4)], pa.uuid()),
    ],
    ids=lambda ids: str(ids.type),
)
def test_ids_of_any_plain_type_have_texts_of_their_own(ids):
    texts = as_texts(pa.chunked_array([ids]))
    assert 4 == len(set(texts.to_pylist()))
