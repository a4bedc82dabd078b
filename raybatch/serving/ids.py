"""Ids of files and batches: in the order of time, not to be guessed, and safe as names of files."""

import re
import secrets

from raybatch.serving.problems import Problem

FILE, BATCH = "file-", "batch_"
_TAIL = re.compile(r"[0-9a-f]{32}", re.ASCII)


def new_id(kind: str, now_s: float) -> str:
    """Return an id with 80 bits that nobody can guess, after the time in milliseconds."""
    return f"{kind}{int(now_s * 1000):012x}{secrets.token_hex(10)}"


def check_id(text: str, kind: str) -> str:
    """Return an id as a client names it.

    Raises:
        Problem: nothing can have that id.
    """
    if not text.startswith(kind) or not _TAIL.fullmatch(text.removeprefix(kind)):
        what = "file" if kind == FILE else "batch"
        raise Problem(f"there is no such {what}", status=404, param="id", code="not_found")
    return text
