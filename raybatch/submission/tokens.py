"""The token of a cluster: where it lies, and when it is sent.

Ray's job clients send it only where RAY_AUTH_MODE=token is set in their process, whatever the
cluster wants; here its authentication mode is read first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raybatch.errors import ConfigError

_WAY_OUT = (
    "copy the token of the cluster into ~/.ray/auth_token (mode 600), or name its file in "
    "RAY_AUTH_TOKEN_PATH; on Kubernetes it lies in the secret that has the cluster's name"
)


@dataclass(frozen=True, slots=True)
class Token:
    """A token, and the variable or file that it comes from."""

    value: str
    origin: str

    def __repr__(self) -> str:
        return f"Token(origin={self.origin!r})"


def token_path(environment: Mapping[str, str], home: Path) -> Path:
    """Return the file in which Ray looks for the token."""
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    return Path(named).expanduser() if named else home / ".ray" / "auth_token"


def find_token(environment: Mapping[str, str], home: Path) -> Token | None:
    """Return the token that Ray would take; None where there is none.

    Raises:
        ConfigError: a file that RAY_AUTH_TOKEN_PATH names cannot be read.
    """
    value = environment.get("RAY_AUTH_TOKEN", "").strip()
    if value:
        return Token(value, "RAY_AUTH_TOKEN")
    path = token_path(environment, home)
    try:
        value = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        if environment.get("RAY_AUTH_TOKEN_PATH"):
            raise ConfigError(f"RAY_AUTH_TOKEN_PATH: {path} cannot be read: {error}") from error
        return None
    return Token(value, str(path)) if value else None


def token_for(
    auth_mode: str | None, environment: Mapping[str, str], home: Path, *, address: str
) -> Token | None:
    """Return the token to send to a job server; None where it asks for none.

    Raises:
        ConfigError: the server asks for a token, and there is none here.
    """
    # an old server does not say; what it wants is then what the user has set
    is_asked = auth_mode == "token" or (
        auth_mode is None and environment.get("RAY_AUTH_MODE", "").lower() == "token"
    )
    if not is_asked:
        return None
    token = find_token(environment, home)
    if token is None:
        raise ConfigError(f"{address} asks for a token, and none is here: {_WAY_OUT}")
    return token
