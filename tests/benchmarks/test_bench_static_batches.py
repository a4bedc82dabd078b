import dataclasses

import numpy as np
import pytest
from static_batches import RowLengths, prefers_static

from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling

UNIFORM = RowLengths(shortest_prompt=128, longest_prompt=128, is_output_equal=True)
SLOW = [2.0, 2.1, 2.2, 2.0, 2.05]


def request(prompt, **sampling):
    options = {"max_tokens": 8, "ignore_eos": True} | sampling
    return Request(
        request_id=0,
        row_id="",
        prompt_token_ids=np.zeros(prompt, np.int32),
        sampling=Sampling(**options),
    )


@pytest.mark.parametrize(
    ("requests", "is_homogeneous"),
    [
        ([request(100), request(100)], True),
        ([request(100), request(90)], True),
        ([request(100), request(89)], False),
        ([request(100), request(100, max_tokens=9)], False),
        ([request(100), request(100, ignore_eos=False)], False),
        ([request(100, ignore_eos=False)] * 2, False),
        ([request(100, stop=("x",))] * 2, False),
        ([request(100, stop_token_ids=(3,))] * 2, False),
    ],
)
def test_rows_are_alike_where_prompts_are_and_outputs_end_together(requests, is_homogeneous):
    assert RowLengths.of(requests).is_homogeneous == is_homogeneous


def test_static_batches_are_chosen_where_they_were_clearly_quicker():
    # one run beside other work decides nothing
    assert prefers_static(UNIFORM, static_s=[1.9, 1.8, 3.7, 1.9, 1.9], continuous_s=SLOW)


@pytest.mark.parametrize("static_s", [[1.91] * 5, [3.0] * 5], ids=["by noise", "slower"])
def test_what_was_not_clearly_quicker_is_not_chosen(static_s):
    assert not prefers_static(UNIFORM, static_s=static_s, continuous_s=SLOW)


def test_rows_of_several_lengths_never_run_in_static_batches():
    mixed = dataclasses.replace(UNIFORM, is_output_equal=False)
    assert not prefers_static(mixed, static_s=[1.0] * 5, continuous_s=SLOW)


def test_nothing_is_chosen_without_a_measurement():
    with pytest.raises(ConfigError, match="5 runs of each way at least, got 4 and 5"):
        prefers_static(UNIFORM, static_s=[1.0] * 4, continuous_s=SLOW)
    with pytest.raises(ConfigError, match="no rows"):
        RowLengths.of([])
