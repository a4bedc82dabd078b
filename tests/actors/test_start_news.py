"""What is told of starts that failed."""

from raybatch.actors.replicas.start_news import StartNews

TRACE = "Traceback (most recent call last):\n  ...\nRuntimeError: no"


def test_a_trace_is_told_once():
    news = StartNews()
    first, second = (news.again(rank, "RuntimeError: no", TRACE) for rank in (0, 1))
    assert first == f"replica 0 is started again: RuntimeError: no\n{TRACE}"
    assert second == "replica 1 is started again: RuntimeError: no"


def test_an_error_of_this_library_has_no_trace():
    assert StartNews().again(0, "ConfigError: x") == "replica 0 is started again: ConfigError: x"


def test_a_rank_that_is_given_up_is_told_when_it_is_asked_for_and_once():
    news = StartNews()
    news.given_up(1, "ConfigError: x")
    news.given_up(2, "RuntimeError: no", TRACE)
    assert news.take() == [
        "replica 1 is given up: ConfigError: x",
        f"replica 2 is given up: RuntimeError: no\n{TRACE}",
    ]
    assert news.take() == []
