"""File systems of every kind behind one kind of error."""

from collections.abc import Iterator
from contextlib import contextmanager

from raybatch.errors import ConfigError, RaybatchError, error_text


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Turn what a file system raises into a ConfigError that begins with `what`."""
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"{what}: {error_text(error)}") from error
