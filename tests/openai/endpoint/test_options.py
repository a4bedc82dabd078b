"""Options of an endpoint: what is refused, and that secrets are named and never held."""

import pytest

from raybatch.errors import ConfigError
from raybatch_openai.endpoint.options import decisive_options, headers_of, openai_options

URL = "http://localhost:8000/v1"
SECRET = "Zx9-not-a-name"


def options(**changes):
    return openai_options({"base_url": URL, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_url": "localhost:8000"}, "must be an http or https URL"),
        ({"base_url": None}, "must be an http or https URL"),
        ({"base_url": f"http://me:{SECRET}@host/v1"}, "not contain a password or a query"),
        ({"base_url": f"http://host/v1?key={SECRET}"}, "not contain a password or a query"),
        ({"api_key_env": SECRET}, "api_key_env must be the name of an environment variable"),
        ({"api_key_env": "x" * 65}, "api_key_env must be the name of an environment variable"),
        ({"headers_env": {"X-Key": SECRET}}, r"headers_env\['X-Key'\] must be the name"),
        ({"headers_env": [SECRET]}, "headers_env must map headers"),
        ({"endpoint": "chats"}, "endpoint must be one of chat, completions, auto"),
        ({"max_concurrency": 0}, "max_concurrency must be a whole number of at least 1"),
        ({"requests_per_minute": 0}, "requests_per_minute must be a number of at least"),
        ({"price_per_million_output_tokens": -1}, "price_per_million_output_tokens must be"),
        ({"extra_body": {"model": "x", "n": 2}}, "extra_body sets model, n"),
        ({"extra_body": "x"}, "extra_body must be a mapping"),
        ({"max_concurency": 3}, "did you mean 'max_concurrency'"),
    ],
)
def test_wrong_options_are_refused_and_secrets_are_not_repeated(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        options(**changes)
    assert SECRET not in str(caught.value)


def test_a_missing_address_is_named_with_an_example():
    with pytest.raises(ConfigError, match=r"base_url is missing; .* http://localhost:8000/v1"):
        openai_options({})


def test_headers_come_from_the_environment():
    found = options(api_key_env="KEY", headers_env={"X-Org": "ORG"})
    headers = headers_of(found, {"KEY": " abc\n", "ORG": "us"})
    assert headers == {"Authorization": "Bearer abc", "X-Org": "us"}


def test_a_key_may_lie_in_a_file(tmp_path):
    (tmp_path / "key").write_text("abc\n")
    found = options(api_key_file=str(tmp_path / "key"))
    assert headers_of(found, {}) == {"Authorization": "Bearer abc"}


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"], ids=["missing", "empty", "binary"])
def test_a_file_without_a_key_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=r"the file .*key"):
        headers_of(options(api_key_file=str(tmp_path / "key")), {})


def test_a_key_has_one_place():
    with pytest.raises(ConfigError, match="api_key_file must be a path"):
        options(api_key_env="KEY", api_key_file="key")


@pytest.mark.parametrize("environment", [{}, {"KEY": ""}, {"KEY": "  "}])
def test_a_variable_that_is_not_set_is_named(environment):
    with pytest.raises(ConfigError, match="the environment variable KEY is not set"):
        headers_of(options(api_key_env="KEY"), environment)


@pytest.mark.parametrize("value", ["a\nb", "schl\u00fcssel"])
def test_a_value_that_no_header_can_have_is_refused_without_it(value):
    with pytest.raises(ConfigError, match="KEY cannot be in an HTTP header") as caught:
        headers_of(options(api_key_env="KEY"), {"KEY": value})
    assert value not in str(caught.value)


def test_what_decides_an_answer_leaves_speed_and_money_out():
    plain = {"base_url": URL}
    fast = {**plain, "max_concurrency": 7, "timeout_s": 3, "price_per_million_input_tokens": 1}
    assert decisive_options(plain, "m") == decisive_options(fast, "m")
    assert decisive_options(plain, "m") == decisive_options({**plain, "model": "m"}, "other")
    for other in ({"model": "x"}, {"endpoint": "chat"}, {"extra_body": {"a": 1}}):
        assert decisive_options(plain, "m") != decisive_options({**plain, **other}, "m")
