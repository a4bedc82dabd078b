"""Values in requests to the API, checked, and lists in its answers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from raybatch.errors import encodable
from raybatch.serving.problems import Problem

_WINDOW = re.compile(r"([1-9]\d{0,5})([mhd])", re.ASCII)
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MAX_WINDOW_S = 30 * 86400


def checked_endpoint(endpoint: object, known: Sequence[str]) -> str:
    """Return the endpoint of a batch.

    Raises:
        Problem: it is none of the known ones.
    """
    if endpoint not in known:
        raise Problem(f"endpoint must be {' or '.join(known)} on this server", param="endpoint")
    return str(endpoint)


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
    if isinstance(value, dict) and len(value) <= 16:
        texts = value.items()
        if all(_is_text(k, 64) and _is_text(v, 512) for k, v in texts):
            return value
    raise Problem(
        "metadata must be up to 16 texts of 512 characters, with names of 64", param="metadata"
    )


def checked_limit(query: Mapping[str, str], *, default: int, most: int) -> int:
    """Return the most items that a list may have; raise Problem where that is no such number."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most):
        raise Problem(f"limit must be a whole number from 1 to {most}", param="limit")
    return int(text[:9])


def page_of(
    ids: Sequence[str], query: Mapping[str, str], *, default: int, most: int
) -> tuple[Sequence[str], bool]:
    """Return the ids of one page of a list, and whether more follow.

    Args:
        ids: of the whole list, in its order.
        query: with `after`, the last id of the page before, and `limit`.
        default: limit where the query has none.
        most: that a limit may be.

    Raises:
        Problem: a value is wrong.
    """
    limit, after = checked_limit(query, default=default, most=most), query.get("after")
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
    if not isinstance(value, str) or len(value) > max_chars:
        return False
    return encodable(value) == value
