"""The fingerprint of a job: named texts of everything that decides answers, compared on resume.

Options that only decide order or speed of a run (plan, pool, KV memory, replicas) are not part of
it: on resume the stored plan applies.
"""

import hashlib
import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import fsspec
import pyarrow as pa

from raybatch.backends.registry import answering_options, type_of
from raybatch.config import WaveConfig
from raybatch.config.option import Decides, decided_by, fields_of, is_default
from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError, encodable
from raybatch.inputs.file_errors import safe_text
from raybatch.inputs.source import Source
from raybatch.models.checkpoint import model_fingerprint
from raybatch.models.source import commit_in, model_identity, names_content, resolve_model
from raybatch.rows.options import StageConfig
from raybatch.rows.schema import OutputSchema
from raybatch.rows.stage_model import find_model

_logger = logging.getLogger(__name__)

PROTOCOL = "2"
# options that are always named, as in the first outputs of this protocol; other options are only
# named if not default, so that a new option does not change earlier fingerprints
_ALWAYS_NAMED = frozenset(
    [
        "prompt",
        "messages",
        "tokenized_prompt",
        "system",
        "overrides",
        "sampling_column",
        "id_column",
        "chat",
        "chat_template",
        "chat_template_kwargs",
        "chat_template_kwargs_column",
        "special_tokens",
        "on_too_long",
        "output_prefix",
        "max_row_bytes",
        "input_error_column",
        "prompt_column_special_tokens",
        "conventional_columns",
        "engine.dtype",
        "engine.max_model_len",
        "partition_by",
        "waves",
    ]
)
# options that decide answers and are named by their effect: columns and files of the output
_NAMED_OTHERWISE = ("row_logprobs", "columns", "schema_policy", "skip_bad_files")
_WEIGHTS = "model.weights"
# files of a checkpoint that decide tokenization and the end of an output
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)
_MAX_TEXT = 200
_TAIL_BYTES = 64 << 10
_THREADS = 32

# name, rows, and a digest of size and end
InputFile = tuple[str, int, str]
InputFiles = Sequence[InputFile]


def fingerprint(
    config: StageConfig, schema: pa.Schema, job: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Return the fingerprint of a job: all that decides its answers, except the input files.

    It has texts by name; long ones are digests. The backend must be decided. `schema` is that of
    the output. `job` are `deciding_options` of the job's config, if any.
    """
    assert config.backend.is_decided, "the backend is not decided yet"
    named: dict[str, Any] = {
        "protocol": PROTOCOL,
        **_model(config),
        **deciding_options(config),
        **deciding_options(config.engine, prefix="engine."),
        **{f"sampling.{f.name}": getattr(config.sampling, f.name) for f in fields(config.sampling)},
        "backend": answering_options(config.backend, config.model),
        "output columns": [f"{field.name}: {field.type}" for field in schema],
        "waves": [],
        "partition_by": [],
        **(job or {}),
    }
    if config.task != "generate":
        named["task"] = config.task
    if parsed := config.output.parsed:
        named["parsed"] = list(parsed)
    texts = {name: _as_text(value) for name, value in named.items()}
    if (answers := config.output.answers) is not None:
        texts["parse"] = json.dumps(answers)  # whole: the types of a column follow from it
    return texts


def deciding_options(config: object, prefix: str = "") -> dict[str, object]:
    """Return the options of a config that decide answers, by name with `prefix`.

    Nested configs are left out, and most options that have their default value.
    """
    named = {}
    for name, field in fields_of(type(config)).items():
        value = getattr(config, name)
        is_nested = is_dataclass(value) and name != "pooling"
        if is_nested or decided_by(field) is not Decides.ANSWERS or name in _NAMED_OTHERWISE:
            continue
        if prefix + name in _ALWAYS_NAMED or not is_default(config, name):
            named[prefix + name] = value
    return named


def backend_kind(fingerprint: Mapping[str, str]) -> str | None:
    """Return the backend kind in a fingerprint; None for a user's pipeline."""
    # long options end in a digest and are not JSON
    match = re.match(r'\{"kind": "(\w+)"', fingerprint.get("backend", ""))
    return None if match is None else match[1]


def _model(config: StageConfig) -> dict[str, str]:
    """Return digests of the model's files, so that its name does not matter."""
    folder = find_model(config)
    if folder is None:
        return {"model.tokenizer": "of the endpoint"}
    digest = hashlib.blake2b(digest_size=8)
    for name in _TEXT_FILES:
        if (path := folder / name).is_file():
            digest.update(f"\0{name}\0".encode() + path.read_bytes())
    digests = {"model.tokenizer": digest.hexdigest()}
    if type_of(config.backend).has_weights:
        digests[_WEIGHTS] = model_identity(config.model, folder)
    return digests


def comparable(
    now: Mapping[str, str], stored: Sequence[Mapping[str, str]], config: StageConfig
) -> list[Mapping[str, str]]:
    """Return the fingerprint `now`, once for each of `stored`, in a form comparable with it.

    A stored fingerprint may have a digest of the weights, if its output was started with a model on
    the driver's host, or by an earlier version. A remote model is then fetched, and `now` gets the
    digest of its weights.
    """
    new = _text(now.get(_WEIGHTS))
    is_other = new is not None and not names_content(new)
    are_bytes = [is_other and stored_content(each) is not None for each in stored]
    if not any(are_bytes):
        return [now] * len(stored)
    _logger.info(
        "fetching the model %s to compare its weights with those that the output was made with",
        config.model,
    )
    by_bytes = {**now, _WEIGHTS: json.dumps(model_fingerprint(resolve_model(config.model)))}
    return [by_bytes if is_bytes else now for is_bytes in are_bytes]


def stored_commit(fingerprint: Mapping[str, str]) -> str | None:
    """Return the hub commit that an output was started with, if any."""
    text = _text(fingerprint.get(_WEIGHTS))
    return None if text is None else commit_in(text)


def stored_content(fingerprint: Mapping[str, str]) -> str | None:
    """Return the digest of the weights that an output was started with, if it has one."""
    text = _text(fingerprint.get(_WEIGHTS))
    return text if text is not None and names_content(text) else None


def _text(value: str | None) -> str | None:
    return None if value is None else str(json.loads(value))


def _as_text(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=_describe)
    if len(text) <= _MAX_TEXT:
        return encodable(text)
    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()
    return f"{encodable(text[: _MAX_TEXT // 2])}... ({len(text)} characters, {digest})"


def _describe(value: object) -> object:
    if callable(value):
        return f"function {getattr(value, '__qualname__', type(value).__name__)} {_source(value)}"
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, WaveConfig):
        return asdict(value)
    return repr(value)


def _source(function: Callable[..., object]) -> str:
    """Return a digest of a function's source, or of its bytecode if there is no source."""
    try:
        content = inspect.getsource(function).encode()
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        content = b"" if code is None else code.co_code + repr(code.co_consts).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def output_schema(source: pa.Schema, config: StageConfig) -> pa.Schema:
    """Return the schema of every part: the user's columns, then those of the stage."""
    output = config.output
    kept = [field for field in source if field.name != output.prefix + "row_id"]
    return pa.schema([*kept, *output.arrow()], metadata=source.metadata)


def output_columns(fingerprint: Mapping[str, str]) -> OutputSchema | None:
    """Return the columns that the stage of a job adds, by its fingerprint.

    None if the fingerprint lacks them, as for a user's pipeline.
    """
    if "output_prefix" not in fingerprint:
        return None
    return OutputSchema(
        num_samples=json.loads(fingerprint["sampling.n"]),
        has_logprobs=json.loads(fingerprint["sampling.logprobs"]) is not None,
        prefix=json.loads(fingerprint["output_prefix"]),
        task=json.loads(fingerprint.get("task", '"generate"')),
        parsed=tuple(json.loads(fingerprint.get("parsed", "[]"))),
        answers=json.loads(fingerprint.get("parse", "null")),
    )


def input_files(source: Source) -> tuple[InputFile, ...]:
    """Return (name, number of rows, digest of size and last bytes) of each file of a source.

    The end of a Parquet file has sizes, places and statistics of all pages. Modification times are
    not compared: a copy of the input is the same input.

    Raises:
        ConfigError: a file cannot be read.
    """
    rows = Counter[tuple[str, str]]()
    for part in source.slices:
        rows[part.name, part.path] += part.num_rows
    with ThreadPoolExecutor(_THREADS) as pool:
        digests = pool.map(_digest, [path for _, path in rows])
        return tuple((name, rows[name, path], next(digests)) for name, path in rows)


def compare_files(root: str, files: Sequence[InputFile]) -> tuple[list[str], list[str]]:
    """Return (names of files below `root` that have changed, names of unreadable files).

    `files` are results of `input_files` from an earlier time.
    """

    def digest(name: str) -> str | None:
        try:
            return _digest(f"{root}/{name}")
        except ConfigError:
            return None

    with ThreadPoolExecutor(_THREADS) as pool:
        now = list(pool.map(digest, [name for name, _, _ in files]))
    pairs = list(zip(files, now, strict=True))
    changed = [name for (name, _, was), new in pairs if new not in (None, was)]
    return changed, [name for (name, _, _), new in pairs if new is None]


def _digest(path: str) -> str:
    with error_context(f"source file {safe_text(path)} cannot be read"):
        fs, name = fsspec.core.url_to_fs(path)
        size = fs.size(name)
        tail = fs.cat_file(name, start=max(0, size - _TAIL_BYTES), end=size)
    return hashlib.blake2b(tail, digest_size=8, salt=int(size).to_bytes(8, "little")).hexdigest()


def fingerprint_digest(fingerprint: Mapping[str, str]) -> str:
    text = json.dumps(dict(fingerprint), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_same(
    sink: str,
    *,
    stored: Mapping[str, str],
    stored_files: InputFiles,
    now: Mapping[str, str],
    files: InputFiles,
    may_grow: bool = False,
    can_extend: bool = True,
) -> None:
    """Raise ConfigError if the output below a sink was started by a job with other answers.

    `stored` and `stored_files` are fingerprint and input files of the output, `now` and `files`
    those of the job. The message names what differs. New files are allowed if the input
    `may_grow`. `can_extend`: the message may advise the option `extend`.
    """
    different = [
        f"{name} is {now.get(name, 'not set')} and was {stored.get(name, 'not set')}"
        for name in sorted({*stored, *now})
        if not _is_same(stored.get(name), now.get(name))
    ]
    # if only new files differ
    would_extend = not different and not _different_files(stored_files, files, may_grow=True)
    different += _different_files(stored_files, files, may_grow)
    if different:
        hint = ", set extend=True (--extend in a shell) to add new files"
        more = hint if would_extend and can_extend else ""
        raise ConfigError(
            f"the output in {sink} belongs to another job: {'; '.join(different)}. Restore these "
            f"to resume{more}, choose another folder, or set overwrite=True (--overwrite in a "
            "shell) to start over"
        )


def _is_same(before: str | None, now: str | None) -> bool:
    try:  # 0 and 0.0 are equal
        return before == now or float(before or "none") == float(now or "none")
    except ValueError:
        return False


def _different_files(stored: InputFiles, files: InputFiles, may_grow: bool) -> list[str]:
    before, after = ({name: rest for name, *rest in some} for some in (stored, files))
    differences = []
    for what, names in (
        ("is missing", sorted(before.keys() - after.keys())),
        ("is new", [] if may_grow else sorted(after.keys() - before.keys())),
        ("has changed", sorted(n for n in before.keys() & after.keys() if before[n] != after[n])),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            differences.append(f"the input file {names[0]}{more} {what}")
    order = [name for name, *_ in files if name in before]
    if not differences and [name for name, *_ in stored] != order:
        differences.append("the input files are read in another order")
    return differences
