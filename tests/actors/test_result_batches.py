"""Results on their way between processes."""

import pickle

import numpy as np
import pytest
from ray import cloudpickle

from raybatch.actors.wire.columns import RESULT_SCHEMA, encode_completions
from raybatch.actors.wire.records import Answer, ResultBatches
from raybatch.records.types import Completion


def batch_of(rows):
    completions = [
        Completion(
            request_id=row,
            token_ids=np.arange(row, dtype=np.int32),
            finish_reason="stop",
            text=None if row % 2 else f"text {row}",
            vector=np.array([0.5, row], np.float32) if row == 3 else None,
        )
        for row in rows
    ]
    return encode_completions(rows, completions)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
@pytest.mark.parametrize("rows", [[], [range(0)], [range(5)], [range(2), range(2, 9)]])
def test_an_answer_has_the_same_results_in_another_process(rows, pickler):
    batches = ResultBatches(map(batch_of, rows))
    answer = pickler.loads(pickler.dumps(Answer(status="done", results=batches)))
    assert isinstance(answer.results, ResultBatches)
    assert answer.results == batches
    assert all(batch.schema.equals(RESULT_SCHEMA) for batch in answer.results)


def test_a_part_of_a_batch_takes_no_more_than_its_rows():
    whole = batch_of(range(1000))
    part = ResultBatches([whole.slice(500, 2)])
    assert len(pickle.dumps(part)) < len(pickle.dumps(ResultBatches([whole]))) / 100
    assert pickle.loads(pickle.dumps(part)) == part
