"""What goes over the wire comes out as it went in."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raybatch.actors.pool import make_submission
from raybatch.actors.wire.columns import (
    RESULT_SCHEMA,
    RequestReader,
    combine_results,
    decode_completions,
    encode_completions,
    generated_lengths,
    has_error,
    is_planned,
    request_table,
    row_numbers,
    total,
)
from raybatch.actors.wire.records import RowGroups
from raybatch.config import EngineConfig
from raybatch.records.parsed_text import ParsedText
from raybatch.records.types import Completion, Sampling

SAMPLINGS = (Sampling(max_tokens=4), Sampling(max_tokens=3, n=2))


def ids(*values):
    return np.array(values, np.int32)


def submitted(table):
    return make_submission(table, SAMPLINGS, "client", EngineConfig())


def small_table():
    return request_table(
        ["a", "b", "c"],
        [ids(1, 2), ids(), ids(3)],
        seeds=[2**64 - 1, 0, 7],
        sampling=[0, 1, 0],
        group_ids=[5, None, 5],
        prefix_lens=[1, 0, 1],
        expected_lens=[2, None, 9],
        payloads=[None, '{"prompt": "p"}', None],
    )


def as_tuple(completion):
    logprobs = completion.logprobs
    if logprobs is not None:
        logprobs = [(i.tolist(), v.tolist()) for i, v in logprobs]
    return (
        completion.request_id,
        completion.sample_idx,
        completion.token_ids.tolist(),
        completion.finish_reason,
        completion.stop_reason,
        completion.num_cached_tokens,
        completion.text,
        None if completion.vector is None else completion.vector.tolist(),
        logprobs,
        completion.error,
        completion.num_input_tokens,
        completion.num_generated_tokens,
        completion.cost,
        completion.parsed,
    )


@pytest.mark.parametrize("table", [small_table(), small_table().slice(0)], ids=["whole", "slice"])
def test_requests_come_out_as_they_went_in(table):
    requests = RequestReader(table, SAMPLINGS).read(0, 3, 100)
    assert [r.row_id for r in requests] == ["a", "b", "c"]
    assert [r.request_id for r in requests] == [100, 101, 102]
    assert [r.prompt_token_ids.tolist() for r in requests] == [[1, 2], [], [3]]
    assert [r.seed for r in requests] == [2**64 - 1, 0, 7]
    assert [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[0]] == [r.sampling for r in requests]
    assert [r.group_id for r in requests] == [5, None, 5]
    assert [r.prefix_len for r in requests] == [1, 0, 1]
    assert [r.expected_output_len for r in requests] == [2, None, 9]
    assert [r.payload for r in requests] == [{}, {"prompt": "p"}, {}]


def test_groups_beside_the_table_win():
    groups = RowGroups(group_ids=np.array([-1, 8]), prefix_lens=np.array([0, 1], np.int32))
    requests = RequestReader(small_table(), SAMPLINGS).read(1, 3, 0, groups)
    assert [(None, 0), (8, 1)] == [(r.group_id, r.prefix_len) for r in requests]


def test_a_table_without_expected_lengths_has_none():
    table = request_table(["a"], [ids(1)])
    assert RequestReader(table, SAMPLINGS).read(0, 1, 0)[0].expected_output_len is None
    assert [4] == submitted(table).expected_new_tokens.tolist()


def test_expected_tokens_are_at_most_the_upper_bound():
    # the second row has two samples of at most 3 tokens
    assert [2, 6, 4] == submitted(small_table()).expected_new_tokens.tolist()


@pytest.mark.parametrize(("group_ids", "expected"), [([3], True), ([None], True), (None, False)])
def test_a_table_says_whether_its_rows_are_planned(group_ids, expected):
    assert expected == is_planned(request_table(["a"], [ids(1)], group_ids=group_ids))


def test_a_slice_of_a_table_is_read_from_its_own_start():
    requests = RequestReader(small_table().slice(1), SAMPLINGS).read(1, 2, 0)
    assert [(r.row_id, r.prompt_token_ids.tolist()) for r in requests] == [("c", [3])]


def test_large_lists_are_read_too():
    table = small_table()
    large = table["prompt_token_ids"].cast(pa.large_list(pa.int32()))
    table = table.set_column(1, "prompt_token_ids", large)
    requests = RequestReader(table, SAMPLINGS).read(0, 3, 0)
    assert [r.prompt_token_ids.tolist() for r in requests] == [[1, 2], [], [3]]


def test_prompts_are_views_of_the_table():
    table = small_table()
    request = RequestReader(table, SAMPLINGS).read(0, 1, 0)[0]
    values = table["prompt_token_ids"].chunk(0).flatten().to_numpy()
    assert np.shares_memory(values, request.prompt_token_ids)


def test_lengths_and_output_bounds_are_per_row():
    submission = submitted(small_table())
    assert submission.prompt_tokens.tolist() == [2, 0, 1]
    assert submission.max_new_tokens.tolist() == [4, 6, 4]


def test_completions_come_out_as_they_went_in():
    completions = [
        Completion(request_id=0, token_ids=ids(1, 2), stop_reason="END", num_cached_tokens=3),
        Completion(request_id=1, sample_idx=1, token_ids=ids(9), stop_reason=9, text="nine"),
        Completion(request_id=2, text="", num_input_tokens=9, num_generated_tokens=4, cost=0.5),
        Completion(request_id=2, text="", parsed=ParsedText(reasoning="r", error="e")),
        Completion(
            request_id=2,
            token_ids=ids(4),
            finish_reason="length",
            logprobs=((ids(4, 5), np.array([-0.5, -1.0], np.float32)),),
        ),
        Completion(request_id=3, finish_reason="error", error="ValueError: no"),
    ]
    completions = [replace(c, request_id=row) for row, c in enumerate(completions)]
    decoded = decode_completions(encode_completions(range(6), completions))
    assert [as_tuple(c) for c in completions] == [as_tuple(c) for c in decoded]


def test_vectors_come_out_as_they_went_in():
    vectors = [np.array([0.5, -1], np.float32), None, np.empty(0, np.float32)]
    completions = [Completion(request_id=i, vector=v) for i, v in enumerate(vectors)]
    decoded = decode_completions(encode_completions([0, 1, 2], completions))
    assert [as_tuple(c) for c in completions] == [as_tuple(c) for c in decoded]


def test_results_keep_one_schema_also_when_empty():
    assert encode_completions([], []).schema == RESULT_SCHEMA
    assert combine_results([], np.zeros(0, np.int16)).schema == RESULT_SCHEMA


def test_results_are_combined_in_order_of_row_and_sample():
    first = encode_completions(
        [2, 0], [Completion(request_id=0, sample_idx=1), Completion(request_id=0)]
    )
    second = encode_completions([2], [Completion(request_id=0)])
    table = combine_results([first, second], np.array([1, 1, 4], np.int16))
    assert table["row"].to_pylist() == [0, 2, 2]
    assert table["sample_idx"].to_pylist() == [0, 0, 1]
    assert table["attempts"].to_pylist() == [1, 4, 4]


def test_row_numbers_are_distinct():
    results = encode_completions([3, 1, 3], [Completion(request_id=0)] * 3)
    assert row_numbers(results).tolist() == [1, 3]


def test_what_is_read_of_results_is_what_arrow_computes():
    counted = [None, 7, None, 2]
    completions = [
        Completion(request_id=0, token_ids=np.arange(n, dtype=np.int32), num_generated_tokens=c)
        for n, c in zip((3, 0, 5, 1), counted, strict=True)
    ]
    completions[3] = replace(completions[3], error="Odd: row")
    whole = encode_completions([5, 4, 5, 2], completions)
    for results in (whole, whole.slice(1, 2), whole.slice(2), whole.slice(0, 0)):
        lengths = pc.list_value_length(results["token_ids"])
        expected = pc.coalesce(results["num_generated_tokens"], lengths)
        assert expected.to_pylist() == generated_lengths(results).tolist()
        assert pc.not_equal(results["error"], "").to_pylist() == has_error(results).tolist()
        assert sorted(set(results["row"].to_pylist())) == row_numbers(results).tolist()
        for name in ("cost", "num_cached_tokens", "num_generated_tokens"):
            assert (pc.sum(results[name]).as_py() or 0) == total(results[name])
