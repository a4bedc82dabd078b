"""What Ray Data writes to the terminal while a run of this library executes a dataset."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# They log an error, with its traceback and an invitation to report it to Ray, and then raise it.
_LOGGERS = ("ray.data.exceptions", "ray.data._internal.execution.streaming_executor_state")


@contextmanager
def errors_told_once() -> Iterator[None]:
    """Leave what Ray Data says about the error that ends the run to its log file.

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
