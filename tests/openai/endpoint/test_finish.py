"""Rows whose backend writes the text and counts the tokens itself."""

import numpy as np
import pyarrow as pa

from raybatch.actors.wire.columns import combine_results, encode_completions
from raybatch.records.types import Completion, Sampling
from raybatch.rows.finish import finish_rows
from raybatch.rows.prepare import Prepared
from raybatch.rows.schema import OutputSchema
from raybatch.text.tokenizer import Prompt
from raybatch_openai.endpoint.options import openai_options
from raybatch_openai.endpoint.prompts import EndpointTokenizer, triples

TOKENIZER = EndpointTokenizer(openai_options({"base_url": "http://localhost/v1"}))
USER = pa.table({"text": ["same", "same"]})


def finish(completions, **options):
    prompts = [Prompt(triples("a long prompt"), payload="{}") for _ in range(2)]
    sampling = Sampling(n=options.pop("n", 1))
    batch = encode_completions([0] * len(completions), completions)
    prepared = Prepared(
        table=USER,
        row_ids=["0", "1"],
        prompts=prompts,
        rows=[0],
        copies={1: 0},
        requests=pa.table({}),
        samplings=[sampling],
        request_samplings=[sampling],
    )
    results = combine_results([batch], np.ones(1, np.int16))
    output = OutputSchema(num_samples=sampling.n)
    return finish_rows(prepared, results, tokenizer=TOKENIZER, output=output).to_pylist()


def sample(index=0, **fields):
    usage = {"num_input_tokens": 40, "num_cached_tokens": 16} if not index else {}
    return Completion(
        request_id=0, sample_idx=index, text=f"t{index}", num_generated_tokens=7, **usage, **fields
    )


def test_counts_are_those_of_the_backend_and_copies_count_as_cached():
    row, copy = finish([sample()])
    names = ("generated_text", "num_input_tokens", "num_generated_tokens", "num_cached_tokens")
    assert [row[name] for name in names] == ["t0", 40, 7, 16]
    assert [copy[name] for name in names] == ["t0", 40, 7, 40]
    assert row["generated_tokens"] == []


def test_samples_have_counts_of_their_own():
    row, _ = finish([sample(), sample(1)], n=2)
    assert (row["generated_text"], row["num_generated_tokens"]) == (["t0", "t1"], [7, 7])


def test_an_error_row_has_no_text_and_the_length_of_its_prompt():
    completion = Completion(request_id=0, finish_reason="error", error="BadRequest: 400 no")
    row, _ = finish([completion])
    assert (row["generated_text"], row["__inference_error__"]) == (None, "BadRequest: 400 no")
    assert row["num_input_tokens"] == len(triples("a long prompt"))
