"""Unwraps errors that Ray has wrapped, for the user."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from raybatch.errors import RaybatchError

# they log an error with traceback and an invitation to report it to Ray, before it is raised
_LOGGERS = ("ray.data.exceptions", "ray.data._internal.execution.streaming_executor_state")


@contextmanager
def message_kept() -> Iterator[None]:
    """In this context, store the message of an error of this library in it, for `own_cause`.

    Ray appends advice to the text of an error.
    """
    try:
        yield
    except RaybatchError as error:
        vars(error)["message"] = str(error)
        raise


def own_cause(error: BaseException) -> RaybatchError | None:
    """Return the exception of this library that Ray has wrapped, with its own message, or None."""
    from ray.exceptions import RayTaskError  # slow to load, and the caller has used Ray

    seen: BaseException | None = error
    while seen is not None:
        # Ray's wrapper subclasses the cause's class, with a traceback as message
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
    """In this context, Ray Data logs the error of a run only to its log file.

    The caller raises that error, so the user sees it once.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    hide = partial(_hide)  # an own one, since two runs of Ray Data may overlap
    for logger in loggers:
        logger.addFilter(hide)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(hide)


def _hide(record: logging.LogRecord) -> bool:
    vars(record)["hide"] = True  # Ray's handler for the terminal leaves such records out
    return True
