"""How fast an endpoint is asked: concurrency, budgets and waits as plain numbers."""

from email.utils import formatdate

import pytest

from raybatch_openai.endpoint.rate_limits import (
    Budget,
    Concurrency,
    backoff_s,
    retry_after_s,
    until_reset_s,
)

NOW_S = 1_800_000_000.0


def answer_many(concurrency, num_answers, latency_s=1.0, *, is_full=True):
    for _ in range(num_answers):
        concurrency.answered(latency_s, 50, is_full=is_full)
    return concurrency.limit


def test_concurrency_doubles_with_each_round_of_answers_up_to_its_bound():
    concurrency = Concurrency(4, 20)
    assert [8, 16, 20] == [answer_many(concurrency, concurrency.limit) for _ in range(3)]


def test_concurrency_that_is_not_used_does_not_grow():
    assert answer_many(Concurrency(4, 20), 50, is_full=False) == 4


def test_concurrency_does_not_grow_while_answers_take_much_longer_than_they_did():
    concurrency = Concurrency(4, 1000)
    answer_many(concurrency, 40)
    before = answer_many(concurrency, 60, latency_s=40.0)
    assert answer_many(concurrency, 60, latency_s=40.0) == before


def test_a_pushback_halves_once_for_all_that_was_in_flight():
    concurrency = Concurrency(16, 100)
    for _ in range(10):
        concurrency.pushed_back(sent_s=1.0, now_s=2.0)
    assert (concurrency.limit, concurrency.num_cuts) == (8, 1)
    concurrency.pushed_back(sent_s=2.5, now_s=3.0)
    assert (concurrency.limit, concurrency.num_cuts) == (4, 2)


def test_after_a_pushback_concurrency_grows_by_one_in_a_round():
    concurrency = Concurrency(16, 100)
    concurrency.pushed_back(sent_s=1.0, now_s=2.0)
    assert answer_many(concurrency, 9) == 9


def test_one_sample_may_always_be_in_flight():
    concurrency = Concurrency(2, 2)
    for second in range(5):
        concurrency.pushed_back(sent_s=second, now_s=second + 0.5)
    assert concurrency.limit == 1


@pytest.mark.parametrize("per_minute", [30, 600])
def test_a_budget_is_kept_in_every_minute(per_minute):
    budget, spent = Budget(per_minute), []
    now_s = 100.0
    while now_s < 400:
        if not budget.wait_s(now_s):
            budget.spend(1, now_s)
            spent.append(now_s)
        now_s += 0.01
    most = max(sum(first <= s < first + 60 for s in spent) for first in spent)
    assert per_minute * 0.9 <= most <= per_minute + 1


def test_a_request_larger_than_the_budget_is_paid_off_before_the_next():
    budget = Budget(60)
    budget.spend(180, now_s=0.0)
    assert [180, 80, 0] == [budget.wait_s(second) for second in (0.0, 100.0, 180.0)]


def test_what_was_charged_too_much_is_given_back():
    budget = Budget(60)
    budget.spend(180, now_s=0.0)
    budget.spend(-170, now_s=0.0)
    assert budget.wait_s(0.0) == 10


def test_no_budget_never_waits():
    budget = Budget(None)
    budget.spend(1e9, now_s=0.0)
    assert budget.wait_s(0.0) == 0


def test_backoff_doubles_to_a_bound_and_is_spread_by_half():
    assert [0.5, 1, 2, 60] == [backoff_s(n, jitter=1.0) for n in (1, 2, 3, 50)]
    assert [0.25, 0.5] == [backoff_s(n, jitter=0.0) for n in (1, 2)]


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "1.5"}, 1.5),
        ({"retry-after": formatdate(NOW_S + 90, usegmt=True)}, 90),
        ({"retry-after": formatdate(NOW_S - 90, usegmt=True)}, 0),
        ({"retry-after": "999999"}, 3600),
        ({"retry-after": "-3"}, 0),
        ({"retry-after-ms": "250", "retry-after": "1"}, 0.25),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_the_wait_that_an_answer_asks_for(headers, seconds):
    assert retry_after_s(headers, NOW_S) == seconds


@pytest.mark.parametrize(
    ("reset", "seconds"),
    [
        ("1s", 1),
        ("17ms", 0.017),
        ("6m0s", 360),
        ("1h2m3.5s", 3600),
        ("2.5", 2.5),
        (str(NOW_S + 20), 20),
        ("later", 0),
        ("", 0),
    ],
)
def test_requests_that_are_used_up_are_waited_for(reset, seconds):
    headers = {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": reset}
    assert until_reset_s(headers, 10, NOW_S) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("left", "seconds"), [("99", 4), ("100", 0), ("-1", 0), ("many", 0)], ids=str
)
def test_tokens_that_are_fewer_than_a_request_has_are_waited_for(left, seconds):
    headers = {
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": left,
        "x-ratelimit-reset-tokens": "4s",
    }
    assert until_reset_s(headers, 100, NOW_S) == seconds


def test_a_request_larger_than_the_whole_limit_is_not_waited_for():
    headers = {
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "50",
        "x-ratelimit-reset-tokens": "4s",
    }
    assert until_reset_s(headers, 100, NOW_S) == 0
