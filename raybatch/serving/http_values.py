"""Values in requests to the API, checked, and lists and problems in its answers."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from raybatch.errors import RaybatchError, encodable

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error"}
FILE, BATCH = "file-", "batch_"
_TAIL = re.compile(r"[0-9a-f]{32}", re.ASCII)
_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400


class Problem(RaybatchError):  # noqa: N818 - it ends one request, and becomes its answer
    """A request that is refused: what is wrong, the way out, and the parameter that is wrong."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = "invalid_value",
    ) -> None:
        super().__init__(encodable(message))
        self.status = status
        self.param = param if param is None else encodable(param)
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def no_such(what: str, param: str = "id") -> Problem:
    """Return the problem of a name that nothing has."""
    return Problem(f"there is no such {what}", status=404, param=param, code="not_found")


def new_id(kind: str, now_s: float) -> str:
    """Return an id with 80 bits that nobody can guess, after the time in milliseconds."""
    return f"{kind}{int(now_s * 1000):012x}{secrets.token_hex(10)}"


def check_id(text: str, kind: str) -> str:
    """Return an id as a client names it.

    Raises:
        Problem: nothing can have that id.
    """
    if not text.startswith(kind) or not _TAIL.fullmatch(text.removeprefix(kind)):
        raise no_such("file" if kind == FILE else "batch")
    return text


def window_seconds(window: object) -> int:
    """Return the seconds of a completion window, such as "24h".

    Raises:
        Problem: it is no such time, or too long a one.
    """
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < seconds <= _MAX_WINDOW_S:
        raise Problem(
            "completion_window must be a time of 30d at most, such as 24h",
            param="completion_window",
        )
    return seconds


def checked_metadata(value: object) -> dict[str, str] | None:
    """Return the metadata of a batch; raise Problem where they are more than a few texts."""
    if value is None:
        return None
    if (
        isinstance(value, dict)
        and len(value) <= 16
        and all(_is_text(name, 64) and _is_text(text, 512) for name, text in value.items())
    ):
        return value
    raise Problem(
        "metadata must be up to 16 texts of 512 characters, with names of 64", param="metadata"
    )


def page_of(
    ids: Sequence[str], query: Mapping[str, str], *, default: int, most: int
) -> tuple[Sequence[str], bool]:
    """Return the ids of one page of a list, and whether more follow.

    The query may have `after`, the last id of the page before, and `limit`.

    Raises:
        Problem: a value is wrong.
    """
    text, after = query.get("limit", str(default)), query.get("after")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise Problem(f"limit must be a whole number from 1 to {most}", param="limit")
    limit = int(text[:9])
    if after is not None:
        if after not in ids:
            raise Problem("after names nothing in the list", param="after")
        ids = ids[list(ids).index(after) + 1 :]
    return ids[:limit], len(ids) > limit


def listed(views: Sequence[Mapping[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """Return the object of a list."""
    return {
        "object": "list",
        "data": list(views),
        "first_id": views[0]["id"] if views else None,
        "last_id": views[-1]["id"] if views else None,
        "has_more": has_more,
    }


def _is_text(value: object, max_chars: int) -> bool:
    """Return whether a value is a short text that can be written."""
    return isinstance(value, str) and len(value) <= max_chars and encodable(value) == value
