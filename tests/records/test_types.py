import pytest

from raybatch.errors import ConfigError
from raybatch.records.types import Sampling


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": "5"},
        {"max_tokens": 5.5},
        {"max_tokens": True},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"ignore_eos": "no"},
        {"stop": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [10**23]},
        {"stop_token_ids": [1 << 31]},
        {"stop_token_ids": [-5]},
        {"stop_token_ids": [True]},
        {"top_p": 0},
    ],
    ids=str,
)
def test_a_wrong_option_is_named(options):
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(options))} must be"):
        Sampling(**options)


def test_more_tokens_at_least_than_at_most_are_told_with_both():
    with pytest.raises(ConfigError, match=r"between 0 and max_tokens \(256\), got 300"):
        Sampling(min_tokens=300)


def test_one_stop_string_and_lists_become_tuples():
    sampling = Sampling(stop="ab", stop_token_ids=[1, 2])
    assert (("ab",), (1, 2)) == (sampling.stop, sampling.stop_token_ids)
