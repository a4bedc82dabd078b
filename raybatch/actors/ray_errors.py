"""What Ray puts around an error, kept out of what a user reads."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from raybatch.errors import RaybatchError

# They log an error, with its traceback and an invitation to report it to Ray, and then raise it.
_LOGGERS = ("ray.data.exceptions", "ray.data._internal.execution.streaming_executor_state")


@contextmanager
def message_kept() -> Iterator[None]:
    """Note the message of an error of this library: Ray puts advice of its own behind it."""
    try:
        yield
    except RaybatchError as error:
        vars(error)["message"] = str(error)
        raise


def own_cause(error: BaseException) -> RaybatchError | None:
    """Return the exception of this library that Ray has wrapped, with its message, if any."""
    from ray.exceptions import RayTaskError  # slow to load, and the caller has used Ray

    seen: BaseException | None = error
    while seen is not None:
        # Ray's wrapper is an instance of the cause's class as well, with a traceback for a message
        if isinstance(seen, RayTaskError):
            seen = seen.cause
        elif isinstance(seen, RaybatchError):
            message = vars(seen).get("message")
            seen.args = seen.args if message is None else (message, *seen.args[1:])
            return seen
        else:
            seen = getattr(seen, "cause", None) or seen.__cause__
    return None


@contextmanager
def errors_logged_once() -> Iterator[None]:
    """Send messages of Ray Data about the error that ends a run to its log file alone.

    The caller raises that error, so that nothing is hidden.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(_hide)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_hide)


def _hide(record: logging.LogRecord) -> bool:
    vars(record)["hide"] = True  # Ray's handler for the terminal leaves such records out
    return True
