"""Finds secrets in what a job would publish: values of environment variables, and URIs."""

import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from raybatch.errors import ConfigError

_ENDINGS = ("TOKEN", "SECRET", "KEY", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
# of a variable that tells where the secret lies
_PLACES = ("PATH", "FILE", "DIR")
_VALUES = re.compile(r"(hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA|-----BEGIN )")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WAY_OUT = (
    "give the hosts a role (instance profile, workload identity) or mount a file with it and send "
    "its path, such as HF_TOKEN_PATH"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret, by the words in its name."""
    words = [word for word in name.upper().split("_") if word]
    if not words or words[-1] in _PLACES:
        return False
    return any(word.removesuffix("S").endswith(_ENDINGS) for word in words)


def read_env_vars(settings: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a job gets.

    Args:
        settings: `NAME`, whose value is taken from `environment`, or `NAME=value`.
        environment: of this process.

    Raises:
        ConfigError: a variable is not set, is named or looks like a secret.
    """
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--env {setting!r}: expected NAME or NAME=value")
        if is_secret_name(name):
            raise ConfigError(
                f"--env {name}: by its name a secret, and everyone who may ask the job server "
                f"reads the variables of a job in clear; {_WAY_OUT}"
            )
        if not equals and name not in environment:
            raise ConfigError(f"--env {name}: not set here; set it, or give {name}=value")
        values[name] = value if equals else environment[name]
        if _VALUES.match(values[name]) or _has_password(values[name]):
            raise ConfigError(
                f"--env {name}: its value looks like a secret, and everyone who may ask the job "
                f"server reads the variables of a job in clear; {_WAY_OUT}"
            )
    return values


def check_no_secret_in_uri(what: str, uri: str) -> None:
    """Raise ConfigError if the URI holds a password."""
    if _has_password(uri):
        raise ConfigError(
            f"{what}: the URI holds a password, which would stand in clear in the job file that "
            f"is sent; {_WAY_OUT}"
        )


def _has_password(text: str) -> bool:
    try:
        return urlsplit(text).password is not None
    except ValueError:
        return False
