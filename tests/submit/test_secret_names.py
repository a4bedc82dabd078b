"""Secrets are refused before they are sent, by name and by looks; paths to them are not."""

import pytest

from raybatch.errors import ConfigError
from raybatch_submit.checks import check_no_secret_in_uri, is_secret_name, read_env_vars

SECRETS = (
    "HF_TOKEN",
    "hf_token",
    "API_TOKENS",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_ACCESS_KEY_ID",
    "OPENAI_API_KEY",
    "APIKEY",
    "DB_PASSWORD",
    "PGPASSWORD",
    "MY_CREDENTIALS",
    "SSH_PASSPHRASE",
)
HARMLESS = (
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "HF_TOKEN_PATH",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "KEYBOARD",
    "OMP_NUM_THREADS",
)


@pytest.mark.parametrize("name", SECRETS)
def test_secret_is_known_by_its_name(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_name_is_no_secret(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize("setting", ["HF_TOKEN", "HF_TOKEN=x"])
def test_secret_is_refused_with_the_reason_and_the_way_out(setting):
    with pytest.raises(ConfigError, match=r"--env HF_TOKEN .*; give the hosts a role.* --secret"):
        read_env_vars([setting], {"HF_TOKEN": "x"})


@pytest.mark.parametrize(
    "value",
    ["hf_abcdefgh", "sk-proj-1", "AKIA1234", "-----BEGIN KEY-----", "https://me:pass@host/x"],
)
def test_value_that_looks_like_a_secret_is_refused_and_not_repeated(value):
    with pytest.raises(ConfigError, match="--env PLAIN: its value looks like a secret") as caught:
        read_env_vars([f"PLAIN={value}"], {})
    assert value not in str(caught.value)


def test_value_is_given_or_taken_from_here():
    taken = read_env_vars(["A", "B=2", "C="], {"A": "1", "B": "0"})
    assert taken == {"A": "1", "B": "2", "C": ""}


def test_variable_that_is_not_set_is_named():
    with pytest.raises(ConfigError, match="--env A: not set here; set it, or write A=value"):
        read_env_vars(["A"], {})


@pytest.mark.parametrize("setting", ["", "=1", "A B=1", "1A=1", "a-b=1"])
def test_malformed_variable_is_refused(setting):
    with pytest.raises(ConfigError, match="expected NAME or NAME=value"):
        read_env_vars([setting], {})


def test_password_in_a_uri_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="source: the URI contains a password") as caught:
        check_no_secret_in_uri("source", "ftp://me:hunter2@host/prompts")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("uri", ["s3://bucket/a", "/data/a", "https://me@host/a", "http://[x"])
def test_uri_without_a_password_passes(uri):
    check_no_secret_in_uri("source", uri)
