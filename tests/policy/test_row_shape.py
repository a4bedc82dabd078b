"""What rows are like in each phase."""

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.batches.layer_plan import Workload
from raybatch.policy.batches.row_shape import RowShape

ROW = RowShape(prompt_tokens=100, output_tokens=50)


def test_rows_decode_half_way_through_their_output():
    decode = Workload(cached_tokens=125, reserved_tokens=24, waiting_sequences=9)
    assert decode == ROW.workload("decode", waiting_sequences=9)
    prefill = Workload(tokens_per_sequence=100, reserved_tokens=50)
    assert prefill == ROW.workload("prefill")


def test_rows_without_tokens_are_refused():
    with pytest.raises(ConfigError, match="output_tokens of a row is 0"):
        RowShape(output_tokens=0)


def test_default_rows_fit_a_short_model():
    assert RowShape(prompt_tokens=512, output_tokens=128) == RowShape.within(640)
    assert RowShape(prompt_tokens=410, output_tokens=102) == RowShape.within(512)
