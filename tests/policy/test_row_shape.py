"""What rows are like."""

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import RowShape


def test_rows_without_tokens_are_refused():
    with pytest.raises(ConfigError, match="output_tokens of a row must be at least 1, got 0"):
        RowShape(output_tokens=0)


def test_default_rows_fit_a_short_model():
    assert RowShape(prompt_tokens=512, output_tokens=128) == RowShape.within(640)
    assert RowShape(prompt_tokens=410, output_tokens=102) == RowShape.within(512)
