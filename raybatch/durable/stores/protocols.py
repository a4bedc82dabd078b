"""What the commit protocol needs of the store of an output."""

import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Store(Protocol):
    """Files below one root.

    Names are relative, with "/", and never leave the root. Every method may be called from many
    threads, and a store can be sent to another process.
    """

    @property
    def uri(self) -> str:
        """Return the root with its protocol, without a slash at the end."""

    @property
    def is_exclusive(self) -> bool:
        """Return whether `create` never replaces a file, even when many call it at once."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file under a name that nobody has; return False where it is there."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file that may be there already; for what can be made again, such as a report."""

    def read(self, name: str) -> bytes:
        """Return a whole file; FileNotFoundError where there is none."""

    def tail(self, name: str, num_bytes: int) -> bytes:
        """Return the last bytes of a file, or all where it is shorter; FileNotFoundError."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None where there is none; never from a cache."""

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder, sorted, relative to the root; never from a cache."""

    def remove(self, name: str) -> None:
        """Remove a file that the protocol does not count with; a missing one is fine."""


def warn_last_writer_wins(uri: str) -> None:
    """Warn that two runs at once would replace each other's files; they hold the same rows."""
    logger.warning(
        "%s cannot refuse to replace a file, so of two runs at once the last writer wins; let one "
        "run at a time write here",
        uri,
    )
