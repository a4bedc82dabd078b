"""The log of a worker of Ray, which shows warnings alone unless the environment asks for more."""

import logging

from raybatch.config import log_level
from raybatch.redaction import DiscreetFormatter


def obey_log_level() -> None:
    """Show the log of this process as RAYBATCH_LOG_LEVEL says; Ray prints it at the driver.

    Raises:
        ConfigError: the variable names no level.
    """
    level = log_level()
    if level is None:
        return
    logger = logging.getLogger("raybatch")
    logger.setLevel(level)
    # who logs in a way of their own has handlers
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(DiscreetFormatter())
        logger.addHandler(handler)
