"""Host pages reserved for outputs follow the lengths of those that have ended."""

import pytest
from host_chunk import AdaptiveHostChunk

from raybatch.errors import ConfigError


def after(*lengths, **options):
    chunk = AdaptiveHostChunk(**options)
    for length in lengths:
        chunk.observe(length)
    return chunk.tokens


def test_a_fixed_length_is_reserved_until_ten_outputs_have_ended():
    assert 8192 == after()
    assert 8192 == after(*[2000] * 9)
    assert 3008 == after(*[2000] * 10)


def test_the_newest_output_counts_a_tenth():
    # 0.9 * 2000 + 0.1 * 4000 = 2200, times 1.5, in whole pages of 64
    assert 3328 == after(*[2000] * 10, 4000)
    assert 3136 == after(*[2000] * 10, 2900)


def test_the_reservation_stays_within_its_bounds():
    assert 1024 == after(*[3] * 10)
    assert 65536 == after(*[10**6] * 10)


def test_the_reservation_is_a_whole_number_of_pages():
    assert 16 == after(9, page_tokens=16, min_tokens=1, min_observed=1)
    assert 32 == after(11, page_tokens=16, min_tokens=1, min_observed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_tokens": 0}, "page_tokens must be at least 1, got 0"),
        ({"first_tokens": 0}, "first_tokens must be at least 1"),
        ({"min_tokens": 0}, "min_tokens must be at least 1"),
        ({"min_observed": 0}, "min_observed must be at least 1"),
        ({"min_tokens": 70_000}, "max_tokens=65536 is below min_tokens=70000"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        AdaptiveHostChunk(**options)
