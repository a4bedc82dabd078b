"""Numbers as people read them."""

import pytest

from raybatch.pictures.wording import amount, count, duration, percent, printable, tick


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10.0 k"),
        (123_456, "123 k"),
        (999_400, "999 k"),
        (999_950, "1.00 M"),
        (1_234_567, "1.23 M"),
        (18_022_400, "18.0 M"),
        (2.5e9, "2.50 G"),
        (3e12, "3.00 T"),
    ],
)
def test_amounts_have_three_digits(number, expected):
    assert expected == amount(number)


def test_ticks_have_no_zeros_at_the_end():
    assert ["10 k", "2.5 M", "1,000"] == [tick(10_000), tick(2_500_000), tick(1000)]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0, "0.0 %"), (0.8454, "84.5 %"), (0.99999, "99.9 %"), (1, "100.0 %"), (1.4, "140.0 %")],
)
def test_only_everything_is_a_hundred_percent(share, expected):
    assert expected == percent(share)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.04, "0.0 s"),
        (9.96, "10 s"),
        (125, "2 min 5 s"),
        (599.6, "10 min"),
        (3_565, "59 min"),
        (3_599, "1 h 0 min"),
        (11_400, "3 h 10 min"),
        (200_000, "2 d 8 h"),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds, expected):
    assert expected == duration(seconds)


def test_one_is_singular():
    assert ["1 row", "2,000 rows"] == [count(1, "row"), count(2000, "row")]


def test_control_characters_are_escaped():
    assert r"a\x1b[2Jb\u2028" == printable("a\x1b[2Jb\u2028")
