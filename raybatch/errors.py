"""The exception tree of raybatch, and texts without secrets for logs, errors and reports.

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
import logging
import math
import re
import shlex
from collections.abc import Iterable
from functools import partial
from typing import Any

_HIDDEN = "***"
# longer texts are cut first, so that hostile input costs little
_MAX_CHARS = 1 << 16

_SECRET_WORD = (
    r"(?:pass(?:word|wd|phrase)?|secret|token|credentials?|signature|authorization|"
    r"(?:api|access|account|private|shared|encryption|session)[_-]?key|key[_-]?id|sig|pwd)"
)
# user:password@ of a URL; a password may hold slashes and further at signs. There is none where no
# colon and no at sign comes before the first slash, as in s3://bucket/model@revision
_IN_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)(?=[^\s'\"<>/]*[:@])([^\s'\"<>]{1,2000})@")
# name=value, "name": "value", --name value, in queries, headers, options and JSON
_NAMED = re.compile(
    rf"(?i)((?<![a-z])[\w.-]{{0,64}}?{_SECRET_WORD}(?:s|_id|-id)?\\?[\"']?\s{{0,3}}(?:=>|[=:])\s{{0,3}})"
    r"(\\?\"[^\"\n]{1,4000}\"?|\\?'[^'\n]{1,4000}'?|[^\s,;&'\"(){}\[\]]{1,4000})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9._~+/=-]{6,}")
# what providers begin their tokens with; hf_overrides is an option of vLLM
_KNOWN = re.compile(
    r"\b(?:hf_(?![a-z_]+\b)\w{8,}|sk-[\w-]{8,}|gh[opsur]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|"
    r"xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|"
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]{1,40}-----[\s\S]{0,20000}?(?:-----END [A-Z ]{1,40}-----|\Z)")
# who is hidden already, and counts such as "tokens: 12", stay as they are
_HARMLESS = re.compile(r"(?:\*{3}|\d{1,12}(?:\.\d+)?|true|false|none|null)\Z", re.IGNORECASE)
# "num_input_tokens: int32" is a column of a schema
_TYPE = re.compile(
    r"(?:u?int(?:8|16|32|64)|halffloat|float(?:16|32|64)?|double|bool|(?:large_)?(?:string|binary)|"
    r"(?:large_)?list<.*|fixed_size_list<.*|struct<.*|dictionary<.*|timestamp|date32|date64)>?\Z"
)
# "HF_TOKEN: by its name a secret" is a sentence
_WORD = re.compile(r"[A-Za-z]{1,11}\Z")


def redacted(text: str) -> str:
    """Return a text with passwords, tokens and keys replaced by `***`.

    The text may be hostile; only its first 65,536 characters are kept.
    """
    if len(text) > _MAX_CHARS:
        text = text[:_MAX_CHARS] + " ..."
    text = _PEM.sub(_HIDDEN, text)
    text = _IN_URL.sub(rf"\1{_HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {_HIDDEN}", text)
    text = _NAMED.sub(_hide_value, text)
    return _KNOWN.sub(_HIDDEN, text)


def _hide_value(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    is_prose = name.endswith(" ") and "pass" not in name.lower() and _WORD.match(value)
    if is_prose or _HARMLESS.match(value.strip("\\\"'")) or _TYPE.match(value):
        return match[0]
    return name + _HIDDEN


class DiscreetFormatter(logging.Formatter):
    """Writes log lines without secrets, tracebacks included."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


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
