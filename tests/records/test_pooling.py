"""Options of pooling tasks: their names and their ranges."""

import pytest

from raybatch.errors import ConfigError
from raybatch.records.pooling import Pooling, pooling_of


def test_options_of_a_row_win_and_absent_ones_keep_the_stages_value():
    default = Pooling(use_activation=True, dimensions=8)
    found = pooling_of({"dimensions": 4.0, "use_activation": None}, default=default)
    assert found == Pooling(use_activation=True, dimensions=4)


def test_normalize_is_another_name():
    assert pooling_of({"normalize": False}) == Pooling(use_activation=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimension": 4}, "did you mean 'dimensions'"),
        ({"dimensions": 0}, "at least 1"),
        ({"dimensions": 1.5}, "whole number"),
        ({"dimensions": True}, "whole number"),
        ({"use_activation": 1}, "must be true, false or none"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        pooling_of(options)
