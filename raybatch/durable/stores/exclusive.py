"""What is said where a store cannot refuse to replace a file."""

import logging

logger = logging.getLogger(__name__)


def tell_last_writer_wins(uri: str) -> None:
    """Warn that two runs at once would replace each other's files; they hold the same rows."""
    logger.warning(
        "%s cannot refuse to replace a file, so of two runs at once the last writer wins; let one "
        "run at a time write here",
        uri,
    )
