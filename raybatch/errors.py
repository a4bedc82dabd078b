"""The exception tree of raybatch.

    RaybatchError
      ConfigError(ValueError)         a wrong option, template or job file
        UnreachableError              what an option names cannot be read now
      CapacityError                   a prompt cannot fit the KV cache or the model's context
      ReplicaError                    an engine actor failed and could not be restarted
      TeamError                       a rank of a team of engines died, hung or refused
      EndpointError                   an endpoint refuses every request: its key, model or address
        EndpointUnreachable           nothing answers at its address now
      RowError                        raised only where the user asked for on_error="raise"
      CommitError                     an output that is not what the plan of its job says
      RunStopped                      a run was asked to stop before its rows were at work
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
    """Base of every exception that raybatch raises on purpose; its texts hold no secrets."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(RaybatchError, ValueError):
    """A wrong option, template or job file, found before any work starts."""


class UnreachableError(ConfigError):
    """What an option names, such as a model in a bucket, cannot be read now; it may be later."""


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


class TeamError(RaybatchError):
    """A rank of a team died, hung or refused; the leader goes on alone."""


class EndpointError(RaybatchError):
    """An endpoint refuses every request, so that no row can be answered and the run has to end."""


class EndpointUnreachable(EndpointError):
    """Nothing answers at the address of an endpoint now; it may be there later."""


class RowError(RaybatchError):
    """A row failed and the stage was built with on_error="raise"."""


class CommitError(RaybatchError):
    """Rows, a part or a whole output are not what the plan of the job says; nothing was changed."""


class RunStopped(RaybatchError):
    """A run was asked to stop before its rows were at work; started again it begins there."""


class MeasureError(RaybatchError):
    """The cost of a backend could not be measured; plans go on without times."""


class MissingDependency(RaybatchError, ImportError):
    """An optional package is not installed; the message names the pip command."""


# what another try would raise again: options, files and packages stay as they are
_PERMANENT = (ConfigError, EndpointError, ImportError)
_PASSING = (UnreachableError, EndpointUnreachable)


def is_permanent(error: BaseException) -> bool:
    """Return whether what raised `error` would raise it again if it was tried once more.

    What nobody has named here, such as a lack of memory or a device that is busy, may pass.
    """
    return isinstance(error, _PERMANENT) and not isinstance(error, _PASSING)


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which no output file can hold, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return "Class: message" without secrets."""
    return encodable(redacted(f"{type(error).__name__}: {error}"))


def last_line(error: BaseException) -> str:
    """Return "Class: text" with the last line of an error that Ray has put a trace into.

    What Ray guesses about a process that died, in six lines at each death, is left out.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[-1].partition(" Some common causes include: ")[0] if lines else ""
    return encodable(f"{type(error).__name__}: {message}")


def one_line(text: str, max_chars: int = 2000) -> str:
    """Return a text with blanks in place of line breaks, cut where it is endless."""
    found = " ".join(text.split())
    return found if len(found) <= max_chars else f"{found[:max_chars]} ..."


def range_text(allowed: str, value: object) -> str:
    """Return what a number may be, and that it must be finite where the refused `value` is not.

    Example:
        >>> range_text("at least 0", float("inf")), range_text("at least 0", -1)
        ('a finite number of at least 0', 'a number of at least 0')
    """
    is_endless = isinstance(value, float) and not math.isfinite(value)
    of = "of " if allowed.startswith("at least") else ""
    return f"a {'finite ' if is_endless else ''}number {of}{allowed}"


def shell_path(path: str) -> str:
    """Return a path or another word as it can be pasted into a shell, a URI of this host as a path.

    Example:
        >>> shell_path("file:///data/my answers"), shell_path("out/part-000000.parquet")
        ("'/data/my answers'", 'out/part-000000.parquet')
    """
    return shlex.quote(path.removeprefix("file://"))


def nearest_name(name: object, known: Iterable[str]) -> str | None:
    """Return the known name nearest to `name`, in letters of either case; None if none is near."""
    folded = {other.casefold(): other for other in sorted(known)}
    matches = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name nearest to `name`, else ""."""
    nearest = nearest_name(name, known)
    return "" if nearest is None else f" (did you mean {nearest!r}?)"
