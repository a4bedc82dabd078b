"""The exception tree of raybatch.

    RaybatchError
      ConfigError(ValueError)         a wrong option, template or job file
        UnreachableError              what an option names cannot be read now
      CapacityError                   a prompt cannot fit the KV cache or the model's context
      ReplicaError                    an engine actor failed and could not be restarted
      RankError                       a rank of a group of engines died, hung or refused
      EndpointError                   an endpoint refuses every request: its key, model or address
        EndpointUnreachable           nothing answers at its address now
      RowError                        raised only where the user asked for on_error="raise"
      CommitError                     an output does not match the plan of its job
      RunStopped                      a run was stopped before its rows started
      MeasureError                    the cost of a backend could not be measured
      MissingDependency(ImportError)  an optional package is not installed

A bad row is data (see `Completion.error`), never an exception that ends a job.
"""

import difflib
import math
import shlex
from collections.abc import Iterable
from functools import partial
from typing import Any

from raybatch.redaction import redacted


class RaybatchError(Exception):
    """Base of every exception that raybatch raises on purpose; its messages hold no secrets."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(RaybatchError, ValueError):
    """A wrong option, template or job file, found before any work starts."""


class UnreachableError(ConfigError):
    """A resource that an option names, such as a model in a bucket, cannot be read at present."""


class CapacityError(RaybatchError):
    """A prompt needs more tokens than the KV cache or the model's context can hold."""

    def __init__(self, message: str, *, needed_tokens: int, available_tokens: int) -> None:
        super().__init__(message)
        self.needed_tokens = needed_tokens
        self.available_tokens = available_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        needed, available = self.needed_tokens, self.available_tokens
        make = partial(type(self), needed_tokens=needed, available_tokens=available)
        return make, self.args


class ReplicaError(RaybatchError):
    """An engine actor, of index `rank` in its pool, failed and could not be restarted."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"replica {rank} failed: {cause}")
        self.rank = rank
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.cause)


class RankError(RaybatchError):
    """A rank of a group died, hung, or refused to join or to continue.

    The driver rank of a TP group then continues without the others.
    """


class EndpointError(RaybatchError):
    """An endpoint refuses every request, so no row can be answered and the run ends."""


class EndpointUnreachable(EndpointError):
    """Nothing answers at the address of an endpoint now; it may be reachable later."""


class RowError(RaybatchError):
    """A row failed, and the stage was built with on_error="raise", so the run ends."""


class CommitError(RaybatchError):
    """Rows, a part or an output do not match the plan of the job; nothing was changed."""


class RunStopped(RaybatchError):
    """A run was stopped before its rows started; the next run starts with them."""


class MeasureError(RaybatchError):
    """The speed of a backend could not be measured; plans are made without run times."""


class MissingDependency(RaybatchError, ImportError):
    """An optional package is not installed; the message names the pip command."""


# a retry raises these again: options, files and packages do not change
_PERMANENT = (ConfigError, EndpointError, ImportError)
_PASSING = (UnreachableError, EndpointUnreachable)


def is_permanent(error: BaseException) -> bool:
    """Return whether a retry would raise `error` again.

    Other errors, such as a lack of memory or a busy device, may be temporary.
    """
    return isinstance(error, _PERMANENT) and not isinstance(error, _PASSING)


def encodable(text: str) -> str:
    """Return `text` with lone surrogates escaped, as no output file can hold them."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return "Class: message" without secrets."""
    return encodable(redacted(f"{type(error).__name__}: {error}"))


def last_line(error: BaseException) -> str:
    """Return "Class: text" with the last line of an error to which Ray added a traceback.

    The six lines in which Ray guesses why a process died are left out.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[-1].partition(" Some common causes include: ")[0] if lines else ""
    return encodable(f"{type(error).__name__}: {message}")


def one_line(text: str, max_chars: int = 2000) -> str:
    """Return a text with its line breaks replaced by spaces, cut after `max_chars`."""
    found = " ".join(text.split())
    return found if len(found) <= max_chars else f"{found[:max_chars]} ..."


def range_text(allowed: str, value: object) -> str:
    """Return "a number of <allowed>", or "a finite number of <allowed>" if `value` is not finite.

    `value` is the refused one, `allowed` the range of the allowed ones.

    Example:
        >>> range_text("at least 0", float("inf")), range_text("at least 0", -1)
        ('a finite number of at least 0', 'a number of at least 0')
    """
    is_endless = isinstance(value, float) and not math.isfinite(value)
    of = "of " if allowed.startswith("at least") else ""
    return f"a {'finite ' if is_endless else ''}number {of}{allowed}"


def shell_path(path: str) -> str:
    """Quote a path or another word for a shell, without a leading `file://`.

    Example:
        >>> shell_path("file:///data/my answers"), shell_path("out/part-000000.parquet")
        ("'/data/my answers'", 'out/part-000000.parquet')
    """
    return shlex.quote(path.removeprefix("file://"))


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, ignoring case; None if none is similar."""
    folded = {other.casefold(): other for other in sorted(known)}
    matches = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name nearest to `name`, else ""."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f" (did you mean {nearest!r}?)"
