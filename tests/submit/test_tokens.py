"""The token of a cluster: taken from where Ray takes it, and sent only to those who ask."""

import pytest

from raybatch.errors import ConfigError
from raybatch_submit.probe import find_token, token_for, token_path


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-home\n")
    return tmp_path


def test_variable_wins_over_files(home):
    assert find_token({"RAY_AUTH_TOKEN": "given"}, home).value == "given"


def test_named_file_wins_over_that_of_the_user(home, tmp_path):
    (tmp_path / "other").write_text("of-file\n")
    token = find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")}, home)
    assert (token.value, token.origin) == ("of-file", str(tmp_path / "other"))


def test_file_of_the_user_is_taken(home):
    assert find_token({}, home).value == "of-home"


def test_no_file_is_no_token(tmp_path):
    assert find_token({}, tmp_path) is None


def test_named_file_that_is_missing_is_an_error(home):
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH: /none cannot be read"):
        find_token({"RAY_AUTH_TOKEN_PATH": "/none"}, home)


def test_token_does_not_show_in_its_text(home):
    assert "of-home" not in repr(find_token({}, home))


def test_token_path_is_that_of_ray(home):
    assert token_path({}, home) == home / ".ray" / "auth_token"


def test_server_that_asks_gets_the_token_though_no_mode_is_set(home):
    assert token_for("token", {}, home, address="x").value == "of-home"


@pytest.mark.parametrize("mode", ["disabled", None])
def test_server_that_does_not_ask_gets_none(home, mode):
    assert token_for(mode, {}, home, address="x") is None


def test_server_that_does_not_say_gets_what_the_user_has_set(home):
    assert token_for(None, {"RAY_AUTH_MODE": "token"}, home, address="x").value == "of-home"


def test_missing_token_is_told_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"http://h requires a token.*RAY_AUTH_TOKEN_PATH"):
        token_for("token", {}, tmp_path, address="http://h")
