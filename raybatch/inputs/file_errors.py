"""What is wrong with a source file, told so that names cannot forge lines of a log."""

from collections.abc import Iterator
from contextlib import contextmanager

from raybatch.errors import ConfigError, RaybatchError, error_text


class BadFileError(ConfigError):
    """What a file holds is cut, broken or of another kind; `skip_bad_files` leaves it out.

    That a file cannot be opened (rights, network) says nothing of what it holds, and is none.

    Args:
        reason: without the name of the file.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[0])


@contextmanager
def content_of(path: str) -> Iterator[None]:
    """Turn what the parser of a file's bytes raises into a BadFileError.

    Args:
        path: with its protocol. Nothing is to be read from its file system here: what that raises
            is no fault of the content.
    """
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each format has errors of its own
        raise unreadable(path, error_text(error)) from error


def unreadable(path: str, reason: str) -> BadFileError:
    """Return the error of a file whose content cannot be read."""
    return BadFileError(
        f"source file {safe_text(path)} cannot be read; write it again, leave it out, or set "
        f"skip_bad_files: {reason}",
        reason,
    )


def safe_text(name: str) -> str:
    r"""Return a file name as printable text; two names never become one.

    Letters of all scripts stay. A backslash and what cannot be printed (line breaks, control
    characters, bytes that are no UTF-8) are written as Python escapes.

    Example:
        >>> safe_text("a b%20\n.parquet")
        'a b%20\\n.parquet'
    """
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in name
    )
